"""Writes what the recurrent layers of a model are fed, for `replay` and `ablate`.

    python -m experiments.record                                       # nine traces: three layers, three kinds of prompt
    python -m experiments.record --model_dir=Qwen3.5-0.8B --output_dir=runs/traces-0.8B --storage=float16

A trace holds q, k (L2-normalised, q scaled), v, log decays, write strengths and the state before the first token: all that
the state of a layer depends on, so any way to store that state can be replayed without the model. Each trace is a
safetensors file and a JSON file that says where it comes from (`experiments/traces.py`).
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from absl import app

from experiments import accuracy, prompts, recorder, run_directory, traces
from experiments.run_directory import RunDirectory
from experiments.settings import define_flags, option, start
from experiments.tokenization import load_tokenizer
from models import qwen35


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags; see `--help`."""

    model_dir: str = option(
        str(accuracy.DEFAULT_MODEL),
        "Folder with config.json, *.safetensors, and tokenizer.json unless bytes are tokens.",
    )
    layers: tuple[str, ...] = option(
        ("auto",), "Indices of gated DeltaNet layers, or auto: the shallowest, the middle and the deepest."
    )
    prompts: tuple[str, ...] = option(prompts.KINDS, f"Kinds of prompt, of {', '.join(prompts.KINDS)}.")
    num_tokens: int = option(4095, "Tokens to record. 4,095 leave the last window of 16 unfinished.")
    skip_tokens: int = option(0, "Tokens to read before them; the trace then starts from the state that they leave.")
    key_heads: tuple[str, ...] = option(("all",), "Key heads to keep, with the value heads that they serve.")
    storage: str = option("float32", "Of q, k, v and the state in the files.", choices=("float32", "float16"))
    dtype: str = option("float32", "Of the model's activations and weights.", choices=("float32", "bfloat16"))
    seed: int = option(0, "Chooses text and tasks.")
    output_dir: str = option("runs/traces", "Folder for the traces; a folder of other settings is refused.")

    def __post_init__(self):
        if self.num_tokens < 1:
            raise ValueError(f"--num_tokens must be at least 1, got {self.num_tokens}")
        if self.skip_tokens < 0:
            raise ValueError(f"--skip_tokens must not be negative, got {self.skip_tokens}")


def chosen_layers(names: Sequence[str], config: qwen35.Config) -> list[int]:
    """The layers to record.

    Raises:
      ValueError: If a name is not the index of a layer with a recurrent state.
    """
    linear = recorder.linear_layers(config)
    if list(names) == ["auto"]:
        return sorted({linear[0], linear[len(linear) // 2], linear[-1]})
    wrong = [name for name in names if name not in map(str, linear)]
    if wrong or not names:
        raise ValueError(f"--layers must be auto or some of {', '.join(map(str, linear))}; got {', '.join(names)}")
    return sorted({int(name) for name in names})


def chosen_key_heads(names: Sequence[str], config: qwen35.Config) -> list[int]:
    """The key heads to keep.

    Raises:
      ValueError: If a name is not the index of a key head.
    """
    heads = range(config.linear_num_key_heads)
    if list(names) == ["all"]:
        return list(heads)
    if not names or any(name not in map(str, heads) for name in names):
        raise ValueError(f"--key_heads must be all or some of 0 to {len(heads) - 1}; got {', '.join(names)}")
    return sorted({int(name) for name in names})


def run(settings: Settings) -> list[Path]:
    """Records and writes; returns the files of tensors.

    Raises:
      ValueError, FileNotFoundError: Whose message names the flag to change; nothing is written then.
    """
    directory = Path(settings.model_dir)
    if not (directory / "config.json").exists():
        raise FileNotFoundError(f"--model_dir {directory} holds no config.json: give the folder of a model")
    config, model = qwen35.from_pretrained(directory, dtype=settings.dtype)
    # No TF32, as in the accuracy experiment: the traces are those of the model, not of the device.
    config = dataclasses.replace(config, matmul_precision="highest")
    model = qwen35.with_config(model, config)
    layers, heads = chosen_layers(settings.layers, config), chosen_key_heads(settings.key_heads, config)
    tokens = prompts.make_prompts(
        settings.prompts, settings.skip_tokens + settings.num_tokens, load_tokenizer(directory, config), settings.seed
    )
    options = {
        name: value for name, value in dataclasses.asdict(settings).items() if name not in ("model_dir", "output_dir")
    }
    wanted = {"program": "record", "model_sha256": accuracy.sha256_of_weights(directory), **options}
    folder = RunDirectory.open(settings.output_dir, wanted)
    recorded, _ = recorder.record(model, tokens, layers, skip=settings.skip_tokens)
    origin = {
        "model": directory.resolve().name, "model_sha256": wanted["model_sha256"], "dtype": settings.dtype,
        "skipped_tokens": settings.skip_tokens, "key_heads": heads, "seed": settings.seed,
        "command": run_directory.command(), "versions": run_directory.environment(),
    }  # fmt: skip
    files = []
    for trace in recorded:
        trace = recorder.select_heads(trace, heads)
        for index, kind in enumerate(settings.prompts):
            row = jax.tree.map(lambda x, index=index: x[index : index + 1], trace)
            read = np.ascontiguousarray(tokens[index], np.int32).tobytes()
            metadata = {**origin, "prompt_sha256": hashlib.sha256(read).hexdigest()}
            files.append(traces.save_trace(folder.path, row, prompt=kind, metadata=metadata, storage=settings.storage))
    return files


def main(argv: Sequence[str]) -> None:
    settings = start("record", argv, Settings)
    try:
        files = run(settings)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"record: {error}") from error
    for file in files:
        print(f"{file}  {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    define_flags(Settings)
    app.run(main)
