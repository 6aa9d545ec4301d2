"""The exact recurrence and its chunk-parallel form, against the oracle."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import leapquant_jax as lq
from tests.library import helpers as hp
from tests.library import oracle

GATES = ["scalar", "channel"]
exact_step = jax.jit(lq.exact_step)
LENGTHS = np.arange(1, 131)


@pytest.mark.parametrize("gate", GATES)
def test_decode_equals_the_oracle(gate):
    x = hp.tokens(0, B=2, T=11, G=2, H=4, K=8, V=6, gate=gate)
    start = np.random.default_rng(1).standard_normal((2, 4, 8, 6)).astype(np.float32)
    S, outs = hp.exact_decode(start, *x)
    expected, expected_outs, history = oracle.exact(start, *x, history=True)
    assert hp.relative(S, expected) < 1e-6 and hp.relative(outs, expected_outs) < 1e-6
    for t in range(3):  # token by token is the same function
        start, out = exact_step(start, *hp.at(x, t))
        assert hp.relative(start, history[:, t]) < 1e-6
        assert hp.relative(out, expected_outs[:, t]) < 1e-6


@functools.cache
def ragged(gate):
    """130 rows of 1..130 tokens: one compilation tests every length."""
    x = hp.tokens(2, B=130, T=130, H=1, K=4, V=3, gate=gate, half_life=40)
    mask = np.arange(130)[None] < LENGTHS[:, None]
    start = np.random.default_rng(3).standard_normal((130, 1, 4, 3)).astype(np.float32)
    _, outs, states = oracle.exact(start, *x, history=True)
    junk = tuple(np.where(mask.reshape(130, 130, *(1,) * (a.ndim - 2)), a, np.float32(np.nan)) for a in x)
    return junk, mask, start, states[np.arange(130), LENGTHS - 1], outs


def _rows_relative(a, b):
    difference = np.linalg.norm((np.asarray(a, np.float64) - b).reshape(len(b), -1), axis=1)
    return difference / np.linalg.norm(b.reshape(len(b), -1), axis=1)


@pytest.mark.parametrize("gate", GATES)
def test_A06_chunked_state_equals_the_recurrence_for_every_length(gate):
    x, mask, start, states, outs = ragged(gate)
    S, chunked_outs = hp.chunked(start, *x, mask=mask)
    errors = _rows_relative(S, states)
    assert errors.max() < 1e-5, LENGTHS[errors.argmax()]
    assert errors.max() < 10 * np.median(errors)
    assert np.where(mask[..., None, None], np.abs(chunked_outs - outs), 0).max() < 1e-5
    assert not np.asarray(chunked_outs)[~mask].any()  # padding is NaN and outputs exactly 0


def test_A06_prefill_hands_over_the_right_state_for_every_length():
    x, mask, _, _, _ = ragged("scalar")
    zero = np.zeros((130, 1, 4, 3), np.float32)
    clean = tuple(np.nan_to_num(a) for a in x)
    more = hp.tokens(4, B=130, T=17, H=1, K=4, V=3)
    config = lq.LeapConfig(bits=8, window=16, rank=0)
    state, outs = hp.prefill(config, lq.init_state(config, **hp.sizes(x)), *x, mask=mask)
    np.testing.assert_array_equal(state.position, LENGTHS % 16)
    _, decoded = hp.decode(config, state, *more)

    _, before, states = oracle.exact(zero, *clean, history=True)
    _, after = oracle.exact(states[np.arange(130), LENGTHS - 1], *more)
    assert np.where(mask[..., None, None], np.abs(outs - before), 0).max() < 0.02  # one rounding lies before the tail
    assert not np.asarray(outs)[~mask].any()
    errors = _rows_relative(decoded, after)
    assert np.isfinite(errors).all() and errors.max() < 0.03
    # Before the first window boundary nothing has been rounded but the records.
    assert _rows_relative(hp.dense_state(config, state), states[np.arange(130), LENGTHS - 1])[:15].max() < 1e-3


@pytest.mark.parametrize(("length", "gate"), [(1, "scalar"), (5, "channel"), (64, "scalar"), (65, "scalar")])
def test_A06_lengths_as_shapes(length, gate):
    x = hp.tokens(5, T=length, H=1, K=4, V=3, gate=gate)
    S, outs = hp.chunked(hp.zeros(x), *x)
    expected, expected_outs = oracle.exact(hp.zeros(x), *x)
    assert hp.relative(S, expected) < 1e-5 and hp.relative(outs, expected_outs) < 1e-5


def test_no_tokens_change_nothing():
    x = hp.tokens(6, T=0)
    start = jnp.ones((1, 2, 8, 6))
    for function in (lq.exact_decode, lq.chunked_delta_rule):
        S, outs = function(start, *x)
        np.testing.assert_array_equal(S, start)
        assert outs.shape == (1, 0, 2, 6)


@pytest.mark.parametrize("split", [(50,), (49, 1), (1, 49), (16, 16, 16, 2), (7,) * 7 + (1,)], ids=str)
def test_A07_any_split_continues_the_same_state(split):
    x = hp.tokens(7, T=50, H=2, K=4, V=3)
    expected, expected_outs = oracle.exact(hp.zeros(x), *x)
    S, outs, start = hp.zeros(x), [], 0
    for length in split:
        S, out = hp.chunked(S, *hp.span(x, start, start + length))
        outs.append(out)
        start += length
    assert hp.relative(np.concatenate(outs, axis=1), expected_outs) < 1e-5
    assert hp.relative(S, expected) < 1e-5


def test_A08_beta_is_used_as_given_in_fp32():
    beta = np.float32(0.62246)  # rounds to 0.62109 in bf16
    one = (jnp.eye(1, 4, dtype=jnp.bfloat16)[None], jnp.eye(1, 4, dtype=jnp.bfloat16)[None])
    one += (jnp.ones((1, 2, 3), jnp.bfloat16), jnp.zeros((1, 2)), jnp.full((1, 2), beta))
    many = tuple(x[:, None] for x in one)
    S = jnp.zeros((1, 2, 4, 3))
    for state, _ in (lq.exact_step(S, *one), lq.exact_decode(S, *many), lq.chunked_delta_rule(S, *many)):
        assert abs(float(state[0, 0, 0, 0]) - float(beta)) < 1e-7
    token = tuple(np.zeros_like(a) for a in hp.at(hp.pool_tokens(0, 1), 0))
    token[1][:, :, 0], token[2][:], token[4][:] = 1, 1, beta
    state, _ = hp.step(hp.POOL, lq.init_state(hp.POOL, **hp.POOL_SIZES), *token, active=np.ones(16, bool))
    # a record is stored in fp16, so to 11 bits and not to bf16's 8
    assert abs(float(hp.dense_state(hp.POOL, state)[0, 0, 0, 0]) - float(beta)) < 2.0**-12


def test_A09_small_decays_survive_narrow_activations():
    q, k, v, g, beta = hp.tokens(8, T=1)
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in (q, k, v))
    g, beta = np.full_like(g, -1e-3), np.zeros_like(beta)
    start = jnp.ones((1, 2, 8, 6))
    for S, _ in (lq.exact_decode(start, q, k, v, g, beta), lq.chunked_delta_rule(start, q, k, v, g, beta)):
        np.testing.assert_allclose(S, np.exp(-1e-3), rtol=1e-7)  # bf16 would hold exactly 1
    state = hp.init_from(hp.UNQUANTIZED, start, **hp.sizes((q, k, v, g, beta)))
    state, _ = hp.decode(hp.UNQUANTIZED, state, q, k, v, g, beta)
    np.testing.assert_allclose(hp.dense_state(hp.UNQUANTIZED, state), np.exp(-1e-3), rtol=1e-7)


def test_A10_the_state_keeps_its_own_dtype():
    x = hp.tokens(9, T=30)
    narrow = (*(jnp.asarray(a, jnp.bfloat16) for a in x[:3]), *x[3:])
    wide = oracle.exact(hp.zeros(x), *x)[0]
    errors = {}
    for name in ("exact", "step-bf16"):
        method = lq.get_method(name)
        state, out = jax.jit(method.decode)(method.init(**hp.sizes(x)), *narrow)
        dtype = jnp.float32 if name == "exact" else jnp.bfloat16
        assert out.dtype == jnp.float32 and all(leaf.dtype == dtype for leaf in jax.tree.leaves(state))
        errors[name] = hp.relative(method.dense_state(state), wide)
    assert errors["exact"] < 1e-2 and errors["step-bf16"] > errors["exact"]


# --- A11: every exponent ever formed is <= 0 ---------------------------------------------------------------------------

STRENGTHS = [0.0, -1e-6, -5.0, -5.6, -7.0, -10.0, -100.0, -np.inf]


@functools.cache
def gates(gate):
    """Rows: every strength throughout a window; then every strength at one position of an otherwise mild window."""
    rows = len(STRENGTHS) * 17
    q, k, v, g, beta = hp.tokens(10, B=rows, T=20, H=1, K=8, V=6, gate=gate)
    for n, strength in enumerate(STRENGTHS):
        g[17 * n] = strength
        for position in range(16):
            g[17 * n + 1 + position, position] = strength
    if gate == "channel":
        g[:, :, :, 0] = -0.01  # one mild channel beside the strong ones
    start = np.random.default_rng(11).standard_normal((rows, 1, 8, 6)).astype(np.float32)
    x = (q, k, v, g, beta)
    return x, start, *oracle.exact(start, *x)


@pytest.mark.parametrize("gate", GATES)
def test_A11_exact_and_chunked_gates(gate):
    x, start, S, outs = gates(gate)
    for function in (hp.exact_decode, hp.chunked):
        state, out = function(start, *x)
        assert np.isfinite(state).all() and np.isfinite(out).all()
        assert _rows_relative(state, S).max() < 1e-5 and _rows_relative(out, outs).max() < 1e-5


@pytest.mark.parametrize("gate", GATES)
def test_A11_windowed_gates(gate):
    x, start, S, outs = gates(gate)
    state = hp.init_from(hp.UNQUANTIZED, start, **hp.sizes(x))
    state, out = hp.decode(hp.UNQUANTIZED, state, *x)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    assert _rows_relative(hp.dense_state(hp.UNQUANTIZED, state), S).max() < 1e-5
    assert _rows_relative(out, outs).max() < 1e-5


def test_A11_quantized_gates_stay_finite():
    x, start, S, outs = gates("scalar")
    config = lq.LeapConfig(rank=1)
    state = hp.init_from(config, start, **hp.sizes(x))
    state, out = hp.decode(config, state, *x)
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(state))
    # The error is one of rounding, relative to the states the window went through.
    assert np.abs(np.asarray(out) - outs).max() < 0.05 * np.abs(outs).max()
    assert np.abs(np.asarray(hp.dense_state(config, state)) - S).max() < 0.05 * np.abs(S).max()


def test_A11_after_an_erase_only_later_tokens_matter():
    x = hp.tokens(12, B=2, T=16, H=1)
    for a in x[:3]:
        a[1, 9:] = a[0, 9:]
    x[3][:], x[4][1, 9:] = x[3][:1], x[4][0, 9:]
    x[3][:, 9] = -np.inf
    for S, _ in (hp.exact_decode(hp.zeros(x), *x), hp.chunked(hp.zeros(x), *x)):
        np.testing.assert_array_equal(S[0], S[1])


# --- grouped heads, sizes, layout --------------------------------------------------------------------------------------


def test_A31_value_head_reads_key_head_by_repeat():
    # key head j always writes key e_j; value heads 0, 1 belong to key head 0 and 2, 3 to key head 1
    k = jnp.stack([jnp.eye(4)[0], jnp.eye(4)[1]])[None]  # [1, 2, 4]
    v, g, beta = jnp.ones((1, 4, 3)), jnp.zeros((1, 4)), jnp.ones((1, 4))
    expected = np.zeros((1, 4, 4, 3))
    expected[0, :2, 0], expected[0, 2:, 1] = 1, 1
    S, _ = lq.exact_step(jnp.zeros((1, 4, 4, 3)), k, k, v, g, beta)
    np.testing.assert_array_equal(S, expected)
    S, _ = lq.chunked_delta_rule(jnp.zeros((1, 4, 4, 3)), *(a[:, None] for a in (k, k, v, g, beta)))
    np.testing.assert_array_equal(S, expected)
    for name in ("step-int8", "window-int8"):
        method = lq.get_method(name)
        state = method.init(batch=1, num_heads=4, num_key_heads=2, key_dim=4, value_dim=3)
        state, out = jax.jit(method.step)(state, k, k, v, g, beta)
        np.testing.assert_array_equal(method.dense_state(state), expected, err_msg=name)
        np.testing.assert_array_equal(out, np.ones((1, 4, 3)), err_msg=name)


@pytest.mark.parametrize("method", ["exact", "window-bf16", lq.LeapMethod(lq.LeapConfig(bits=4, rank=1))], ids=str)
def test_A33_one_write_lands_at_the_documented_index(method):
    method = lq.get_method(method)
    state = method.init(batch=1, num_heads=1, num_key_heads=1, key_dim=64, value_dim=128)
    token = (jnp.eye(1, 64)[None], jnp.eye(1, 64)[None], jnp.eye(128)[None, 1:2], jnp.zeros((1, 1)), jnp.ones((1, 1)))
    state, out = jax.jit(method.step)(state, *token)
    dense = np.array(jax.jit(method.dense_state)(state))
    assert dense.shape == (1, 1, 64, 128) and dense[0, 0, 0, 1] == 1  # key e_0, value e_1
    dense[0, 0, 0, 1] = 0
    assert not dense.any() and out[0, 0, 1] == 1


@pytest.mark.parametrize(("key_dim", "value_dim"), [(80, 96), (128, 64), (33, 7), (1, 1)])
def test_A32_sizes_other_than_128(key_dim, value_dim):
    x = hp.tokens(13, T=3, K=key_dim, V=value_dim)
    expected, expected_outs = oracle.exact(hp.zeros(x), *x)
    S, outs = hp.chunked(hp.zeros(x), *x)
    assert hp.relative(S, expected) < 1e-5 and hp.relative(outs, expected_outs) < 1e-5
    # compensators need a rank below the smaller side, and say so
    if min(key_dim, value_dim) <= 4:
        with pytest.raises(ValueError, match=r"rank \(4\) must be below"):
            lq.init_state(lq.LeapConfig(), **hp.sizes(x))


def test_A32_odd_sizes_when_quantized():
    x = hp.tokens(13, T=3, K=33, V=7)
    expected, expected_outs = oracle.exact(hp.zeros(x), *x)
    config = lq.LeapConfig(bits=6, window=2, rank=2)
    state, outs = hp.decode(config, lq.init_state(config, **hp.sizes(x)), *x)
    assert hp.relative(hp.dense_state(config, state), expected) < 0.05
    assert hp.relative(outs, expected_outs) < 0.05


def test_chunked_is_differentiable():
    x = hp.tokens(14, T=9, H=2, K=4, V=3)

    def loss(function, x):
        S, outs = function(jnp.zeros((1, 2, 4, 3)), *x)
        return jnp.sum(S * S) + jnp.sum(jnp.sin(outs))

    exact = jax.jit(jax.grad(lambda x: loss(lq.exact_decode, x)))(x)
    chunked = jax.jit(jax.grad(lambda x: loss(lq.chunked_delta_rule, x)))(x)
    for a, b in zip(chunked, exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_narrow_numpy_input_is_accepted():
    x = hp.tokens(15, T=2)
    narrow = tuple(a.astype(ml_dtypes.bfloat16) for a in x)
    S, _ = lq.exact_decode(hp.zeros(x), *narrow)
    expected, _ = oracle.exact(hp.zeros(x), *(a.astype(np.float64) for a in narrow))
    assert hp.relative(S, expected) < 1e-6
