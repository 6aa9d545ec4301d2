"""Bad input: a ValueError before any work, that names what was given and what to pass instead."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import leapquant_jax as lq
from leapquant_jax import fit
from tests.library import helpers as hp

SIZES = dict(batch=2, num_heads=4, num_key_heads=2, key_dim=8, value_dim=10)

# --- config ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(bits=5), r"bits must be one of \(8, 6, 4\).* got 5"),
        (dict(bits=True), "bits must be one of"),
        (dict(bits=None), "bits must be one of .*with boundary_dtype"),
        (dict(bits="8"), "bits must be one of"),
        (dict(window=0), "window must be at least 1 token, got 0"),
        (dict(window=16.0), "window must be a Python int"),
        (dict(window=np.int32(16)), "window must be a Python int .it shapes the compiled program"),
        (dict(rank=-1), "rank must be at least 0, got -1"),
        (dict(rank=True), "rank must be a Python int"),
        (dict(fit_iterations=0), "fit_iterations must be at least 1, got 0; use rank=0 for no compensators"),
        (dict(smoothing=1.5), r"smoothing is an exponent in \[0, 1\], got 1.5"),
        (dict(smoothing=float("nan")), r"smoothing is an exponent in \[0, 1\], got nan"),
        (dict(smoothing=jnp.float32(0.5)), "smoothing must be a Python number"),
        (dict(record_dtype="int8"), r"record_dtype must be one of \('float16', 'bfloat16', 'float32'\), got 'int8'"),
        (dict(record_dtype=jnp.float16), "record_dtype must be one of"),
        (dict(record_dtype=["float16"]), "record_dtype must be one of"),
        (dict(compensator_dtype=None), "compensator_dtype must be one of"),
        (dict(fit="power"), r"fit must be one of \('subspace', 'svd', 'cold'\), got 'power'"),
        (dict(rotation="random"), "rotation must be one of"),
        (dict(clip=0.9), "clip must be one of"),
        (dict(bits=None, rank=0, smoothing=0, boundary_dtype="int8"), "boundary_dtype must be one of"),
        (dict(rank=0, smoothing=0, boundary_dtype="bfloat16"), "stores floats, not codes: pass bits=None with it"),
    ],
    ids=str,
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        lq.LeapConfig(**options)


@pytest.mark.parametrize(
    "options",
    [
        dict(bits=None, boundary_dtype="bfloat16"),  # rank=4 and smoothing=0.5 by default
        dict(bits=None, boundary_dtype="bfloat16", rank=0, smoothing=0, clip="mse"),
        dict(bits=None, boundary_dtype="bfloat16", rank=0, smoothing=0, rotation="hadamard"),
        dict(bits=None, boundary_dtype="bfloat16", rank=0, smoothing=0, fit="svd"),
        dict(rank=0, fit="svd"),
        dict(rank=0, fit_iterations=2),
        dict(rank=0, compensator_dtype="float32"),
        dict(fit="svd", fit_iterations=2),
    ],
    ids=str,
)
def test_A20_an_option_without_effect_is_refused(options):
    with pytest.raises(ValueError, match="would have no effect"):
        lq.LeapConfig(**options)


def test_a_config_is_frozen_hashable_and_static():
    config = lq.LeapConfig(smoothing=0)
    assert hash(config) == hash(lq.LeapConfig(smoothing=0.0)) and config == lq.LeapConfig(smoothing=0.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.bits = 4
    with pytest.raises(TypeError):
        lq.LeapConfig(8)


@pytest.mark.parametrize("config", [None, {"bits": 8}, "leapquant-int8", lq.get_method("leapquant-int8")], ids=type)
def test_something_else_for_a_config(config):
    with pytest.raises(ValueError, match=r"config must be a LeapConfig, got .*; for methods by name see get_method"):
        lq.init_state(config, **SIZES)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (lq.LeapConfig(rank=8), {}, r"rank \(8\) must be below min\(key_dim, value_dim\) = 8"),
        (
            lq.LeapConfig(rank=0, rotation="hadamard"),
            dict(key_dim=12),
            "needs a key_dim that is a power of two, got 12",
        ),
        (lq.LeapConfig(), dict(num_heads=3), r"num_heads \(3\) must be a multiple of num_key_heads \(2\)"),
        (lq.LeapConfig(), dict(num_key_heads=0), "num_key_heads must be a positive Python int, got 0"),
        (lq.LeapConfig(), dict(key_dim=8.0), "key_dim must be a positive Python int, got 8.0"),
        (lq.LeapConfig(), dict(value_dim=-1), "value_dim must be a positive Python int"),
        (lq.LeapConfig(), dict(batch=-1), "batch must be a .* Python int"),
        (lq.LeapConfig(), dict(gate="vector"), r"gate must be one of \('scalar', 'channel'\), got 'vector'"),
        (lq.LeapConfig(), dict(dense=jnp.zeros((2, 4, 10, 8))), r"dense has shape \(2, 4, 10, 8\), expected"),
        (lq.LeapConfig(), dict(dense=jnp.zeros((2, 4, 8, 10), jnp.bfloat16)), "a dense state is fp32"),
        (lq.LeapConfig(), dict(dense=np.zeros((2, 4, 8, 10))), "a dense state is fp32"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit(config, change, message):
    with pytest.raises(ValueError, match=message):
        lq.init_state(config, **{**SIZES, **change})


@pytest.mark.parametrize("name", lq.list_methods())
def test_every_method_checks_its_sizes(name):
    for change in (dict(num_heads=3), dict(gate="vector"), dict(dense=jnp.zeros((2, 4, 10, 8)))):
        with pytest.raises(ValueError):
            lq.get_method(name).init(**{**SIZES, **change})


# --- states ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "leaf"),
    [
        (dict(bits=6), "codes"), (dict(rank=2), "compensator_keys"), (dict(smoothing=0), "row_scales"),
        (dict(window=8), "ring_keys"), (dict(record_dtype="bfloat16"), "ring_keys"),
        (dict(compensator_dtype="bfloat16"), "compensator_keys"),
    ],
    ids=str,
)  # fmt: skip
def test_A16_a_state_of_another_config_is_refused_everywhere(change, leaf):
    """A dtype is accepted only by code that scales by it."""
    config = lq.LeapConfig()
    other = dataclasses.replace(config, **change)
    state = lq.init_state(other, **SIZES)
    if "window" in change:  # the ring says how long a window is
        message = "window|ring"
    else:
        message = rf"state\.{leaf} is .*, but this config stores .*: pass the config the state was made with"
    x = hp.tokens(0, B=2, T=1, G=2, H=4, K=8, V=10)
    for call in (
        lambda: lq.step(config, state, *hp.at(x, 0)),
        lambda: lq.decode(config, state, *x),
        lambda: lq.prefill(config, state, *x),
        lambda: lq.fold(config, state),
        lambda: lq.dense_state(config, state),
        lambda: lq.rollback(config, state, jnp.zeros(2, jnp.int32)),
        lambda: lq.state_bytes(config, state),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_plain_array_is_no_state():
    x = hp.tokens(0, B=2, T=1, G=2, H=4, K=8, V=10)
    with pytest.raises(ValueError, match=r"state must be a LeapState from init_state, got .*Array"):
        lq.step(lq.LeapConfig(), jnp.zeros((2, 4, 8, 10)), *hp.at(x, 0))


# --- tokens ------------------------------------------------------------------------------------------------------------

NAMES = ("q", "k", "v", "g", "beta")


def _calls(x, **options):
    """Each public function that takes tokens, as a thunk, for a scalar gate; x holds one token per row."""
    config, dense = lq.LeapConfig(rank=0), jnp.zeros((2, 4, 8, 10))
    state = lq.init_state(config, **SIZES)
    many = tuple(a[:, None] if hasattr(a, "ndim") and a.ndim else a for a in x)
    active = options.get("active")
    per_token = {"active": active} if active is not None else {}
    over_time = {"active": active[:, None]} if active is not None and active.ndim else per_token
    mask = {"mask": over_time["active"]} if over_time else {}
    exact, rounded = (lq.get_method(n) for n in ("exact", "step-int8"))
    return (
        lambda: lq.step(config, state, *x, **per_token),
        lambda: lq.decode(config, state, *many, **over_time),
        lambda: lq.prefill(config, state, *many, **mask),
        lambda: lq.exact_step(dense, *x, **per_token),
        lambda: lq.exact_decode(dense, *many, **over_time),
        lambda: lq.chunked_delta_rule(dense, *many, **mask),
        lambda: exact.step(exact.init(**SIZES), *x, **per_token),
        lambda: rounded.step(rounded.init(**SIZES), *x, **per_token),
        lambda: rounded.decode(rounded.init(**SIZES), *many, **over_time),
    )


@pytest.mark.parametrize("name", NAMES)
def test_wrong_shapes_and_dtypes_of_tokens(name):
    x = dict(zip(NAMES, hp.at(hp.tokens(0, B=2, T=1, G=2, H=4, K=8, V=10), 0), strict=True))
    good = x[name]
    for wrong in (good[..., :-1], good[:1], np.swapaxes(good, 1, 2) if good.ndim > 2 else good.T):
        for call in _calls(tuple({**x, name: wrong}.values())):
            with pytest.raises(ValueError, match=r"shape|multiple|tokens"):
                call()
    for call in _calls(tuple({**x, name: np.ones_like(good, np.int32)}.values())):
        with pytest.raises(ValueError, match=rf"{name} has dtype int32; pass a floating point array"):
            call()


def test_the_message_names_the_argument_and_what_is_expected():
    q, k, v, g, beta = hp.at(hp.tokens(0, B=2, T=1, G=2, H=4, K=8, V=10), 0)
    config = lq.LeapConfig(rank=0)
    state = lq.init_state(config, **SIZES)
    with pytest.raises(ValueError, match=r"k has shape \(2, 4, 8\), expected \(2, 2, 8\)"):
        lq.step(config, state, q, np.repeat(k, 2, 1), v, g, beta)
    with pytest.raises(ValueError, match=r"g has shape \(2, 4, 8\), expected \(2, 4\) .*gate='channel'"):
        lq.step(config, state, q, k, v, np.zeros((2, 4, 8), np.float32), beta)
    with pytest.raises(ValueError, match=r"use step for one token"):
        lq.decode(config, state, q, k, v, g, beta)
    with pytest.raises(ValueError, match=r"q has shape \(2, 1, 2, 8\), expected \(2, 2, 8\)"):
        lq.step(config, state, *(a[:, None] for a in (q, k, v, g, beta)))


@pytest.mark.parametrize("active", [np.ones(2, np.int32), np.ones(3, bool), np.ones((2, 2), bool)], ids=str)
def test_wrong_active(active):
    x = hp.at(hp.tokens(0, B=2, T=1, G=2, H=4, K=8, V=10), 0)
    for call in _calls(x, active=active):
        with pytest.raises(ValueError, match=r"(active|mask) must be bool|axis 1"):
            call()


@pytest.mark.parametrize("number", [np.zeros(2), np.zeros(3, np.int32), 1, np.zeros((2, 1), np.int32)], ids=str)
def test_wrong_rollback(number):
    config = lq.LeapConfig(rank=0)
    with pytest.raises(ValueError, match=r"num_tokens must be an integer array \[2\]"):
        lq.rollback(config, lq.init_state(config, **SIZES), number)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the kernel runs here")
def test_A20_an_implementation_that_cannot_run_says_why():
    config, x = lq.LeapConfig(rank=0), hp.tokens(0, B=2, T=1, G=2, H=4, K=8, V=10)
    state = lq.init_state(config, **SIZES)
    for call in (
        lambda: lq.step(config, state, *hp.at(x, 0), implementation="mosaic_gpu"),
        lambda: lq.decode(config, state, *x, implementation="mosaic_gpu"),
        lambda: lq.fold(config, state, implementation="mosaic_gpu"),
    ):
        with pytest.raises(NotImplementedError, match=r"needs a Hopper GPU .* Use implementation='xla' or None"):
            call()
    with pytest.raises(ValueError, match="implementation must be None or one of"):
        lq.step(config, state, *hp.at(x, 0), implementation="cuda")


@pytest.mark.parametrize("size", [0, 3, 5, 12, -4])
def test_wrong_chunk_size(size):
    x = hp.tokens(0, B=2, T=4, G=2, H=4, K=8, V=10)
    with pytest.raises(ValueError, match=f"chunk_size must be 4 times a power of two, got {size}"):
        lq.chunked_delta_rule(jnp.zeros((2, 4, 8, 10)), *x, chunk_size=size)


def test_an_empty_batch_is_no_error():
    config = lq.LeapConfig(rank=0)
    state = lq.init_state(config, **{**SIZES, "batch": 0})
    x = hp.tokens(0, B=0, T=2, G=2, H=4, K=8, V=10)
    new, out = jax.eval_shape(lambda: lq.decode(config, state, *x))
    assert out.shape == (0, 2, 4, 10) and new.position.shape == (0,)
    assert fit.start_directions(3, 5).shape == (3, 5)
