"""The methods experiments compare by name are what they say, also inside jit, scan and unrolled scan."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import leapquant_jax as lq
from leapquant_jax import stepwise
from leapquant_jax.numerics import round_to_grid
from tests.library import helpers as hp
from tests.library import oracle

NAMES = (
    "exact", "step-bf16", "step-fp16", "step-int8", "step-fp8", "step-int4", "window-bf16", "window-int8",
    "leapquant-int8-paper", "leapquant-int8", "leapquant-int6", "leapquant-int4",
)  # fmt: skip


def test_the_names():
    assert tuple(lq.list_methods()) == NAMES
    for name in NAMES:
        method = lq.get_method(name)
        assert method.name == name and lq.get_method(method) is method and hash(method) == hash(lq.get_method(name))
    with pytest.raises(ValueError, match="unknown method 'leapquant-int2'; known: exact, step-bf16"):
        lq.get_method("leapquant-int2")
    with pytest.raises(ValueError, match="a method is a name or an object with the Method protocol, got int"):
        lq.get_method(8)


# --- B10: a bf16 state must be a bf16 state -----------------------------------------------------------------------------


@functools.cache
def _bf16_values():
    """Every bfloat16 value in [0.01, 10], once."""
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    return every[(every >= 0.01) & (every <= 10)]


@pytest.mark.parametrize(("decay", "share"), [(0.999, 100.0), (0.998, 95.30), (0.997, 29.52)])
@pytest.mark.parametrize("how", ["step", "scan", "unrolled scan"])
def test_B10_step_bf16_drops_decays_inside_jit(decay, share, how):
    """METHOD.md: bf16 leaves 100 / 95.30 / 29.52 % of the values unchanged under these decays. fp32 would change all."""
    values = _bf16_values()
    method = lq.get_method("step-bf16")
    dense = jnp.asarray(values)[None, None, None]  # one key row, many value columns
    token = (
        jnp.zeros((1, 1, 1)), jnp.zeros((1, 1, 1)), jnp.zeros((1, 1, len(values))),
        jnp.full((1, 1), np.log(np.float32(decay))), jnp.zeros((1, 1)),
    )  # fmt: skip

    def once(state):
        if how == "step":
            return method.step(state, *token)[0]
        unroll = 1 if how == "scan" else 4
        # four steps, of which three keep everything (decay 1)
        logs = jnp.array([0, 0, 0, 1], jnp.float32)

        def body(state, log):
            return method.step(state, *token[:3], token[3] * log, token[4])

        return jax.lax.scan(body, state, logs, unroll=unroll)[0]

    state = method.init(batch=1, num_heads=1, num_key_heads=1, key_dim=1, value_dim=len(values), dense=dense)
    assert hp.relative(method.dense_state(state), dense) == 0
    after = np.asarray(method.dense_state(jax.jit(once)(state)))[0, 0, 0]
    assert abs(100 * np.mean(after == values) - share) < 0.01


def test_B10_fp16_keeps_9995_and_freezes_at_9999():
    values = np.random.default_rng(0).uniform(0.01, 10, 4096).astype(np.float16).astype(np.float32)
    method = lq.get_method("step-fp16")
    state = method.init(
        batch=1, num_heads=1, num_key_heads=1, key_dim=1, value_dim=4096, dense=jnp.asarray(values)[None, None, None]
    )
    zero = jnp.zeros((1, 1, 1))
    step = jax.jit(method.step)
    for decay, frozen in ((0.9995, 0.0), (0.9999, 1.0)):
        new, _ = step(state, zero, zero, jnp.zeros((1, 1, 4096)), jnp.full((1, 1), np.log(decay)), jnp.zeros((1, 1)))
        assert abs(np.mean(np.asarray(method.dense_state(new))[0, 0, 0] == values) - frozen) < 0.02


def test_B10_a_window_of_bf16_rounds_once_per_window():
    """The windowed baseline does decay: 16 decays of .999 are one of .984."""
    method = lq.get_method("window-bf16")
    values = np.tile(_bf16_values()[:64], (1, 1, 3, 1))
    state = method.init(batch=1, num_heads=1, num_key_heads=1, key_dim=3, value_dim=64, dense=jnp.asarray(values))
    step = jax.jit(method.step)
    zero = jnp.zeros((1, 1, 3))
    for _ in range(16):
        state, _ = step(state, zero, zero, jnp.zeros((1, 1, 64)), jnp.full((1, 1), np.log(0.999)), jnp.zeros((1, 1)))
    assert state.codes.dtype == jnp.bfloat16 and int(state.position[0]) == 0
    expected = oracle.round_to(values * 0.999**16, "bfloat16")
    after = np.asarray(method.dense_state(state))
    assert np.mean(after == expected) > 0.99 and hp.relative(after, expected) < 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_B10_rounding_is_not_simplified_away(dtype):
    """A round trip through round_to_grid inside one jit, between other fp32 operations, still rounds."""
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    scaled = x * np.float32(1.5)
    result = jax.jit(lambda x: round_to_grid(x * jnp.float32(1.5), dtype).astype(dtype).astype(jnp.float32) * 2)(x)
    np.testing.assert_array_equal(result, scaled.astype(jnp.dtype(dtype)).astype(np.float32) * 2)
    assert (np.asarray(result) != scaled * 2).mean() > 0.9


# --- the formats -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["bfloat16", "float16", "float8_e4m3fn", "int8", "int4"])
def test_step_formats_against_the_oracle(format):
    """Dense [K, V] with K != V: one scale per value column, largest over key rows, nearest even."""
    dense = np.random.default_rng(1).standard_normal((1, 2, 9, 6)).astype(np.float32)
    dense[..., 2] *= 1000
    dense[..., 4] = 0
    rounded = jax.jit(lambda x: stepwise.round_dense(x, format))(dense)
    values = np.asarray(stepwise.dense_values(rounded, format, 9))
    if format in ("bfloat16", "float16"):
        expected = oracle.round_to(dense, format)
        assert rounded.column_scales is None
    else:
        largest = {"float8_e4m3fn": 448.0, "int8": 127.0, "int4": 7.0}[format]
        scales = np.abs(dense).max(2, keepdims=True).astype(np.float64) / largest
        scaled = np.divide(dense, scales, out=np.zeros_like(dense, np.float64), where=scales > 0)
        codes = np.rint(scaled) if format[0] == "i" else scaled.astype(np.float32).astype(jnp.dtype(format))
        expected = codes.astype(np.float64) * scales
        assert rounded.column_scales.shape == (1, 2, 6)
    off = np.abs(values - expected) > 1e-6 * np.abs(expected) + 1e-30
    assert off.mean() < 0.02  # a tie may fall the other way in fp32
    assert not values[..., 4].any()
    assert (
        rounded.values.nbytes
        == {"bfloat16": 216, "float16": 216, "float8_e4m3fn": 108, "int8": 108, "int4": 60}[format]
    )


def test_a_step_baseline_rounds_after_reading():
    """o_t = S_t^T q_t is read before the rounding of step t, and the state it leaves is rounded."""
    x = hp.tokens(2, B=2, T=1, G=2, H=4, K=8, V=6)
    start = np.random.default_rng(3).standard_normal((2, 4, 8, 6)).astype(np.float32)
    S, outs = oracle.exact(oracle.round_to(start, "bfloat16"), *x)
    method = lq.get_method("step-bf16")
    state, out = jax.jit(method.step)(method.init(**hp.sizes(x), dense=jnp.asarray(start)), *hp.at(x, 0))
    assert hp.relative(out, outs[:, 0]) < 1e-6
    assert np.mean(np.asarray(method.dense_state(state)) == oracle.round_to(S, "bfloat16")) > 0.99


@pytest.mark.parametrize("name", ["step-int8", "step-int4", "step-fp8"])
def test_step_baselines_over_many_tokens_against_the_oracle(name):
    """40 tokens, S_t = quant(recurrence(S_{t-1})) in float64 with fp32 scales: the accumulated error has the same size."""
    x = hp.tokens(4, B=1, T=40, H=2, K=8, V=6)
    method = lq.get_method(name)
    state, _ = jax.jit(method.decode)(method.init(**hp.sizes(x)), *x)
    S, exact = np.zeros((1, 2, 8, 6)), oracle.exact(hp.zeros(x), *x)[0]
    for t in range(40):
        S, _ = oracle.exact(S, *hp.span(x, t, t + 1))
        for h in range(2):
            if name == "step-fp8":
                scale = np.abs(S[0, h]).max(0) / 448
                S[0, h] = (S[0, h] / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(
                    np.float64
                ) * scale
            else:
                S[0, h] = oracle.quantize(S[0, h], int(name[-1]), smoothing=0).dense()
    error, expected = hp.relative(method.dense_state(state), exact), hp.relative(S, exact)
    assert expected > 1e-3 and 0.7 < error / expected < 1.4


@pytest.mark.parametrize("name", ["exact", "step-int8", "window-int8"])
def test_active_and_mask_in_every_family(name):
    """Inactive rows keep every bit and output 0 even for NaN; a prefill of padding only leaves a row as it is."""
    x = hp.tokens(5, B=2, T=4, H=2, K=8, V=9)
    method = lq.get_method(name)
    state, _ = jax.jit(method.prefill)(method.init(**hp.sizes(x)), *x)
    junk = tuple(np.where(np.arange(2).reshape(2, *(1,) * (a.ndim - 1)) == 1, np.nan, a).astype(np.float32) for a in x)
    active = np.array([[True] * 4, [False] * 4])
    decoded, outs = jax.jit(method.decode)(state, *junk, active=active)
    filled, filled_outs = jax.jit(method.prefill)(state, *junk, mask=active)
    for new, out in ((decoded, outs), (filled, filled_outs)):
        hp.assert_bit_equal(hp.rows_of(new, [1]), hp.rows_of(state, [1]))
        assert not np.asarray(out)[1].any() and np.isfinite(out).all() and np.asarray(out)[0].any()
    assert hp.relative(method.dense_state(decoded), method.dense_state(filled)) < 0.05


def test_baselines_have_no_kernel():
    for name in ("exact", "step-int8"):
        method = lq.get_method(name)
        x = hp.tokens(6, T=1)
        state = method.init(**hp.sizes(x))
        with pytest.raises(NotImplementedError, match="no Mosaic GPU kernel: it is a baseline for accuracy"):
            method.step(state, *hp.at(x, 0), implementation="mosaic_gpu")
        with pytest.raises(ValueError, match="implementation must be None or one of"):
            method.decode(state, *x, implementation="triton")
