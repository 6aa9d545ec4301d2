"""The reference network of the fixtures, loaded once, and fp32 matrix products everywhere."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import qwen35

FIXTURES = Path(__file__).parents[1] / "data" / "qwen35"


@dataclasses.dataclass(frozen=True)
class Reference:
    config: qwen35.Config
    model: qwen35.Model
    arrays: dict[str, np.ndarray]

    def cache(self, batch: int = 2, **options) -> qwen35.Cache:
        return qwen35.init_cache(self.config, batch=batch, max_length=options.pop("max_length", 100), **options)


@pytest.fixture(autouse=True)
def _full_precision_and_quick_compiles():
    """The networks are tiny: nearly all of a test's time would be spent optimising code that runs once."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.default_matmul_precision("highest"):
        yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def fixtures() -> Path:
    return FIXTURES


@pytest.fixture(scope="session")
def tiny_a() -> Reference:
    config, model = qwen35.from_pretrained(FIXTURES / "tiny_a")
    with np.load(FIXTURES / "tiny_a" / "reference.npz") as file:
        return Reference(config, model, dict(file))


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Reference:
    """Layers 0 and 3 of the reference network, one of each kind: enough for most tests and quicker to compile."""
    directory = tmp_path_factory.mktemp("small")
    fields = json.loads((FIXTURES / "tiny_a" / "config.json").read_text())
    fields |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    (directory / "config.json").write_text(json.dumps(fields))
    tensors = load_file(FIXTURES / "tiny_a" / "model.safetensors")
    dropped = (".layers.1.", ".layers.2.")
    kept = {n.replace("layers.3.", "layers.1."): x for n, x in tensors.items() if not any(d in n for d in dropped)}
    save_file(kept, directory / "model.safetensors")
    return Reference(*qwen35.from_pretrained(directory), {})
