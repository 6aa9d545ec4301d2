"""What every test runs under: strict types and ranks, four fake CPU devices, repeatable hypothesis examples."""

import os

# Before jax is imported: device placement and checkpoints are tested on several devices, also on a laptop.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()

import hypothesis
import jax
import pytest

# A silent promotion is how a low-bit state becomes an fp32 one, and a silent broadcast how heads get mixed up.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Deterministic, so that a red test stays red; no deadline, because the first example compiles.
hypothesis.settings.register_profile(
    "repository",
    derandomize=True,
    deadline=None,
    max_examples=20,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("repository")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` on a machine without one."""
    if any(item.get_closest_marker("gpu") for item in items) and jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason="needs a Hopper GPU")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(scope="module")
def fast_compilation():
    """Few of XLA's optimisations: tiny programs run no slower, and compile in a fraction of the time."""
    name = "jax_disable_most_optimizations"
    before = jax.config.values[name]
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)
