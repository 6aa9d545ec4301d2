"""Both kernels lower to cuda without a GPU, for every named shape, and what cannot run says why."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import leapquant_jax as lq
import pallas_kernels
from leapquant_jax.state import empty_state
from pallas_kernels.shapes import SHAPES, Shape
from pallas_kernels.support import supports_layout


def abstract(shape: Shape, batch: int, *, dtype=jnp.float32, gate: str = "scalar", **options) -> tuple:
    config = lq.LeapConfig(**{"rank": shape.rank, "window": shape.window, **options})
    sizes = dict(
        batch=batch,
        num_heads=shape.heads,
        num_key_heads=shape.key_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
    )
    state = jax.eval_shape(lambda: empty_state(config, **sizes, gate=gate))
    array = jax.ShapeDtypeStruct
    q = array((batch, shape.key_heads, shape.key_dim), dtype)
    v = array((batch, shape.heads, shape.value_dim), dtype)
    g = array((batch, shape.heads), jnp.float32)
    return config, state, (q, q, v, g, g)


def lower(function, *args) -> str:
    return jax.jit(function, donate_argnums=0).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def donated(text: str) -> int:
    return text.count("tf.aliasing_output")


@pytest.mark.parametrize("batch", [1, 512])
@pytest.mark.parametrize("name", SHAPES)
def test_append(name: str, batch: int) -> None:
    config, state, token = abstract(SHAPES[name], batch)
    text = lower(lambda state, *token: pallas_kernels.append(config, state, *token), state, *token)
    assert text.count("@mosaic_gpu") == 1  # one launch per layer and token
    assert donated(text) == len(dataclasses.fields(state))  # nothing of the state is copied


@pytest.mark.parametrize("batch", [1, 512])
@pytest.mark.parametrize("name", SHAPES)
def test_fold(name: str, batch: int) -> None:
    config, state, _ = abstract(SHAPES[name], batch)
    rows = jax.ShapeDtypeStruct((batch,), jnp.bool_)
    text = lower(lambda state, rows: pallas_kernels.fold(config, state, rows), state, rows)
    assert text.count("@mosaic_gpu") == 1
    assert donated(text) == len(dataclasses.fields(state))


def test_other_dtypes_and_a_mask() -> None:
    config, state, token = abstract(SHAPES["qwen3.5-9b"], 3, dtype=jnp.bfloat16)
    active = jax.ShapeDtypeStruct((3,), jnp.bool_)
    lower(lambda state, active, *token: pallas_kernels.append(config, state, *token, active), state, active, *token)
    config, state, token = abstract(SHAPES["odd"], 3, dtype=jnp.float16)
    lower(lambda state, *token: pallas_kernels.append(config, state, *token), state, *token)


def test_more_than_two_to_the_31_elements_and_65535_blocks() -> None:  # CASES A03, B14
    batch = 8192  # 8192 x 32 heads of 128 x 128 codes: 2^32 elements
    config, state, token = abstract(SHAPES["qwen3.5-9b"], batch)
    lower(lambda state, *token: pallas_kernels.append(config, state, *token), state, *token)
    one_each = pallas_kernels.Launch(batch * 32, 1)  # 262,144 blocks
    lower(lambda state, *token: pallas_kernels.append(config, state, *token, tuning=one_each), state, *token)
    rows = jax.ShapeDtypeStruct((batch,), jnp.bool_)
    lower(lambda state, rows: pallas_kernels.fold(config, state, rows), state, rows)


def test_vmap_is_a_longer_batch() -> None:
    config, state, token = abstract(SHAPES["odd"], 2)
    rows = jax.ShapeDtypeStruct((2,), jnp.bool_)
    stack = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), tree)  # noqa: E731
    functions = {
        "append": (lambda s, *t: pallas_kernels.append(config, s, *t), (state, *token)),
        "fold": (lambda s, r: pallas_kernels.fold(config, s, r), (state, rows)),
    }
    for name, (function, args) in functions.items():
        text = lower(jax.vmap(function), *stack(args))
        assert text.count("@mosaic_gpu") == 1, name
        [call] = [line for line in text.splitlines() if "@mosaic_gpu" in line]
        assert "tensor<6x6x64x64xi8>" in call, name  # 3 x 2 rows of 6 heads
    shared = jax.vmap(functions["append"][0], in_axes=(0, *[None] * 5))  # one token for three states
    lower(shared, stack(state), *token)


def test_empty_batch() -> None:
    config = lq.LeapConfig()
    state = lq.init_state(config, batch=0, num_heads=2, num_key_heads=1, key_dim=128, value_dim=128)
    q, v, g = jnp.zeros((0, 1, 128)), jnp.zeros((0, 2, 128)), jnp.zeros((0, 2))
    assert pallas_kernels.append(config, state, q, q, v, g, g)[1].shape == (0, 2, 128)
    assert pallas_kernels.fold(config, state, jnp.zeros((0,), bool)).batch == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(bits=4), "8-bit"),
        (dict(bits=6), "8-bit"),
        (dict(gate="channel"), "one decay per head"),
        (dict(clip="mse"), "clip"),
        (dict(smoothing=0.0), "smooth"),
        (dict(smoothing=0.75), "smooth"),
        (dict(rotation="hadamard"), "rotate"),
        (dict(rank=0), "compensators"),
        (dict(rank=9), "compensators"),
        (dict(record_dtype="bfloat16"), "record_dtype"),
        (dict(compensator_dtype="float32"), "compensator_dtype"),
        (dict(fit="svd"), "subspace"),
        (dict(window=12), "window"),
    ],
)
def test_what_is_not_supported_says_why(change: dict, words: str) -> None:
    config, state, _ = abstract(SHAPES["qwen3.5-9b"], 2, **change)
    reason = supports_layout(config, state)
    assert reason is not None and words in reason


@pytest.mark.parametrize(
    ("shape", "words"),
    [(Shape(8, 8, 128, 64), "128 x 64"), (Shape(8, 8, 256, 256), "256"), (Shape(10, 2), "value heads")],
)
def test_sizes_that_are_not_supported(shape: Shape, words: str) -> None:
    config, state, _ = abstract(shape, 2)
    reason = supports_layout(config, state)
    assert reason is not None and words in reason


def test_supported_shapes_and_this_machine() -> None:
    for shape in SHAPES.values():
        config, state, _ = abstract(shape, 2)
        assert supports_layout(config, state) is None
        if jax.default_backend() != "gpu":
            assert "Hopper" in (pallas_kernels.supports(config, state) or "")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="about machines without a GPU")
def test_explicit_choice_raises_and_none_falls_back() -> None:
    config = lq.LeapConfig(window=8, rank=1)
    state = lq.init_state(config, batch=1, num_heads=1, num_key_heads=1, key_dim=64, value_dim=64)
    q, v, g = jnp.zeros((1, 1, 64)), jnp.zeros((1, 1, 64)), jnp.zeros((1, 1))
    with pytest.raises(NotImplementedError, match="Hopper"):
        lq.step(config, state, q, q, v, g, g, implementation="mosaic_gpu")
    lq.step(config, state, q, q, v, g, g)
