"""Shapes nobody thought of: hypothesis draws sizes, windows, ranks, widths, gates, groups and lengths.

Every example compiles its own program, so they are few and small.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, note, settings
from hypothesis import strategies as st

import leapquant_jax as lq
from leapquant_jax.quantize import dequantize, quantize
from tests.library import helpers as hp
from tests.library import oracle


@st.composite
def shapes(draw, max_length=14):
    """Tokens of any small shape, K != V, grouped heads or not, either gate."""
    key_heads = draw(st.integers(1, 2))
    K, V = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    return hp.tokens(
        draw(st.integers(0, 1000)), B=draw(st.integers(1, 3)), T=draw(st.integers(1, max_length)), G=key_heads,
        H=key_heads * draw(st.integers(1, 3)), K=K, V=V + (K == V), gate=draw(st.sampled_from(["scalar", "channel"])),
        half_life=draw(st.sampled_from([1.0, 30.0, 3000.0])),
    )  # fmt: skip


@settings(max_examples=5)
@given(st.data())
def test_decode_of_any_shape_equals_the_oracle(data):
    x = data.draw(shapes())
    K, V = x[1].shape[-1], x[2].shape[-1]
    options = dict(
        bits=data.draw(st.sampled_from([8, 6, 4])), window=data.draw(st.integers(1, 6)),
        rank=data.draw(st.integers(0, min(2, K - 1, V - 1))), smoothing=data.draw(st.sampled_from([0, 0.5, 1])),
        record_dtype=data.draw(st.sampled_from(["float16", "bfloat16", "float32"])),
    )  # fmt: skip
    note(str({**options, "k": x[1].shape, "v": x[2].shape, "g": x[3].shape}))
    config = lq.LeapConfig(**options, fit="svd" if options["rank"] else "subspace")
    state, outs = hp.decode(config, lq.init_state(config, **hp.sizes(x)), *x)
    np.testing.assert_array_equal(state.position, x[0].shape[1] % config.window)
    expected, expected_outs = oracle.windowed(*x, **options)
    # A code at a tie may fall the other way in fp32: one step of one element.
    tolerance = 2 / config.largest_code / np.sqrt(expected.size)
    assert hp.relative(hp.dense_state(config, state), expected) < max(tolerance, 1e-4)
    assert hp.relative(outs, expected_outs) < 4 * max(tolerance, 1e-4)


@settings(max_examples=3)
@given(st.data())
def test_any_mixture_of_prefill_decode_and_fold_is_the_recurrence(data):
    """Quantization off: prefill a ragged prompt, decode some, fold early, prefill again, decode the rest."""
    x = data.draw(shapes(max_length=12))
    batch, length = x[0].shape[:2]
    config = dataclasses.replace(hp.UNQUANTIZED, window=data.draw(st.integers(1, 7)))
    state = lq.init_state(config, **hp.sizes(x))
    valid = np.array(data.draw(st.lists(st.integers(0, length), min_size=batch, max_size=batch)))
    mask = np.arange(length)[None] < valid[:, None]
    note(str({"window": config.window, "valid": valid, "k": x[1].shape, "v": x[2].shape, "g": x[3].shape}))
    state, first = hp.prefill(config, state, *x, mask=mask)
    state, second = hp.decode(config, state, *x, active=mask[:, ::-1])
    state, third = hp.prefill(config, hp.fold(config, state), *x, mask=mask)

    S = np.zeros(hp.zeros(x).shape)
    for outs, live in ((first, mask), (second, mask[:, ::-1]), (third, mask)):
        for t in range(length):
            new, out = oracle.exact(S, *hp.span(x, t, t + 1))
            S = np.where(live[:, t, None, None, None], new, S)
            expected = np.where(live[:, t, None, None], out[:, 0], 0)
            np.testing.assert_allclose(outs[:, t], expected, atol=2e-5)
    np.testing.assert_allclose(hp.dense_state(config, state), S, atol=2e-5)


_round = jax.jit(quantize, static_argnums=0)
_unround = jax.jit(dequantize, static_argnums=(0, 2))


@given(
    bits=st.sampled_from([8, 6, 4]), smoothing=st.sampled_from([0.0, 0.5, 1.0]),
    size=st.tuples(st.integers(1, 17), st.integers(1, 17)), magnitude=st.integers(-25, 25), seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.0, 3.0, 8.0]), holes=st.booleans(),
)  # fmt: skip
@settings(max_examples=12)
def test_rounding_errs_by_half_a_step_at_any_magnitude(bits, smoothing, size, magnitude, seed, spread, holes):
    rng = np.random.default_rng(seed)
    R = rng.standard_normal(size) * np.exp(spread * rng.standard_normal((size[0], 1))) * 10.0**magnitude
    if holes:
        R *= rng.random(size) < 0.3
    R = R.astype(np.float32)
    config = lq.LeapConfig(bits=bits, rank=0, smoothing=smoothing)
    rounded = _round(config, R)
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(rounded))
    back = np.asarray(_unround(config, rounded, size[0]), np.float64)
    rows = np.ones(size[0]) if rounded.row_scales is None else np.asarray(rounded.row_scales, np.float64)
    half = 0.5 * rows[:, None] * np.asarray(rounded.column_scales, np.float64)
    assert (np.abs(back - R) <= half * (1 + 1e-4) + 1e-36).all()
    assert not back[R == 0].any()
    again = np.asarray(_unround(config, _round(config, back.astype(np.float32)), size[0]), np.float64)
    assert np.linalg.norm(again - back) <= 1.5 * np.linalg.norm(half)  # rounding again moves no further than once


@given(
    bits=st.sampled_from([6, 4]), smoothing=st.sampled_from([0.0, 0.5, 1.0]), magnitude=st.integers(-25, 25),
    rotation=st.sampled_from([None, "hadamard"]), seed=st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=12)
def test_a_clipped_scale_takes_energy_away_at_any_magnitude(bits, smoothing, magnitude, rotation, seed):
    """|R^|^2 = |R|^2 - |R - R^|^2 in every column, the property of a least-squares scale."""
    R = (np.random.default_rng(seed).standard_normal((16, 5)) * 10.0**magnitude).astype(np.float32)
    config = lq.LeapConfig(bits=bits, rank=0, smoothing=smoothing, clip="mse", rotation=rotation)
    back = np.asarray(_unround(config, _round(config, R), 16), np.float64) / 10.0**magnitude
    wide = R.astype(np.float64) / 10.0**magnitude
    kept, whole, lost = ((x**2).sum(axis=0) for x in (back, wide, wide - back))
    np.testing.assert_allclose(kept, whole - lost, rtol=1e-4)
    assert (kept < whole).all()


@settings(max_examples=10)
@given(st.integers(1, 6), st.integers(0, 9), st.integers(0, 99))
def test_rows_move_by_any_indices(batch, number, seed):
    """take and put against NumPy indexing, with padding anywhere."""
    rng = np.random.default_rng(seed)
    state = {"a": rng.standard_normal((batch, 3)).astype(np.float32), "b": rng.integers(0, 9, batch).astype(np.int8)}
    state = jax.tree.map(jnp.asarray, state)
    indices = rng.integers(-2, batch, number)
    taken = lq.take_rows(state, indices)
    for name, leaf in state.items():
        expected = np.asarray(leaf)[np.maximum(indices, 0)] * (indices >= 0).reshape(-1, *(1,) * (leaf.ndim - 1))
        np.testing.assert_array_equal(taken[name], expected.astype(leaf.dtype))
    order = rng.permutation(batch)
    where = np.where(rng.random(batch) < 0.5, order, -1)
    put = lq.put_rows(state, lq.take_rows(state, np.arange(batch)), where)
    for name, leaf in state.items():
        expected = np.array(leaf)
        expected[where[where >= 0]] = np.asarray(leaf)[where >= 0]
        np.testing.assert_array_equal(put[name], expected)
