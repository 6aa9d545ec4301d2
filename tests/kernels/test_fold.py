"""The fold kernel's program, lane for lane on a CPU, against the XLA function it must equal."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import leapquant_jax as lq
from experiments.traces import load_trace
from leapquant_jax.append import append as xla_append
from leapquant_jax.fold import compress as xla_compress
from leapquant_jax.quantize import quantize as xla_quantize
from leapquant_jax.window import materialise as xla_materialise
from pallas_kernels import fold
from pallas_kernels.shapes import Shape
from pallas_kernels.tuning import Launch
from tests.kernels.helpers import leaves, random_state

RECORDED = pathlib.Path(__file__).parents[1] / "data/traces/layer02-recall.safetensors"
append = jax.jit(xla_append, static_argnums=0)
compress = jax.jit(xla_compress, static_argnums=0)
quantize = jax.jit(xla_quantize, static_argnums=0)
materialise = jax.jit(xla_materialise, static_argnums=0)

CASES = {
    "128": Shape(2, 1),
    "64, three heads per key head": Shape(3, 1, 64, 64, rank=3),
    "short window, many compensators": Shape(1, 1, rank=8, window=8),
    "long window, one compensator": Shape(1, 1, 64, 64, rank=1, window=32),
    "24 records, odd rank": Shape(1, 1, 64, 64, rank=5, window=24),
}
BOUNDARY = ("codes", "row_scales", "column_scales", "compensator_keys", "compensator_values")


def check(config, state, folded) -> None:
    """As good a fit and as small an error as XLA's fold, and codes that are XLA's rounding of the same residual."""
    dense = np.asarray(materialise(config, state), np.float64)
    empty = dataclasses.replace(folded, position=jnp.zeros_like(state.position))
    expected = compress(config, state, jnp.asarray(dense, jnp.float32))
    norm = max(np.linalg.norm(dense), 1e-300)
    error, base = (np.linalg.norm(np.asarray(materialise(config, x)) - dense) / norm for x in (empty, expected))
    assert error <= 1.01 * base + 1e-6  # a rounding error, which depends on the last bits of the factors

    residual, xla_residual = (
        dense
        - np.einsum("bhrk,bhrv->bhkv", *(np.asarray(x, np.float64) for x in (s.compensator_keys, s.compensator_values)))
        for s in (folded, expected)
    )
    assert np.linalg.norm(residual) <= 1.0005 * np.linalg.norm(xla_residual) + 1e-6 * norm

    # Given the kernel's own factors, every code is XLA's, but for ties of rounding.
    rounded = quantize(config, jnp.asarray(residual, jnp.float32))
    difference = np.abs(np.asarray(rounded.codes, np.int32) - np.asarray(folded.codes, np.int32))
    assert difference.max() <= 1 and (difference > 0).sum() <= 3 + 1e-4 * difference.size
    np.testing.assert_allclose(folded.row_scales, rounded.row_scales, rtol=3e-6)
    np.testing.assert_allclose(folded.column_scales, rounded.column_scales, rtol=1e-5)


@pytest.mark.parametrize("smoothing", [0.5, 1.0])
@pytest.mark.parametrize("shape", CASES.values(), ids=CASES)
def test_equals_xla(shape: Shape, smoothing: float) -> None:
    config, state, _ = random_state(shape, batch=1, position=[shape.window])
    config = dataclasses.replace(config, smoothing=smoothing)
    folded = fold(config, state, jnp.array([True]), tuning=Launch(1, 2), interpret=True)
    check(config, state, folded)
    assert int(folded.position[0]) == 0


def test_only_the_rows_asked_for_and_at_any_position() -> None:
    config, state, _ = random_state(Shape(2, 1, 64, 64, rank=2), batch=4, position=[16, 16, 5, 16])
    rows = jnp.array([False, True, True, False])
    folded = fold(config, state, rows, tuning=Launch(1, 2), interpret=True)
    for name, leaf in leaves(state).items():
        np.testing.assert_array_equal(leaves(folded)[name][[0, 3]], leaf[[0, 3]], err_msg=name)
    take = [1, 2]
    part = {name: getattr(state, name)[jnp.array(take)] for name in leaves(state)}
    done = {name: getattr(folded, name)[jnp.array(take)] for name in leaves(state)}
    check(config, type(state)(**part), type(state)(**done))
    assert folded.position.tolist() == [16, 0, 0, 16]


def test_no_rows() -> None:
    config, state, _ = random_state(Shape(1, 1, 64, 64), batch=2)
    folded = fold(config, state, jnp.array([False, False]), tuning=Launch(1, 2), interpret=True)
    for name, leaf in leaves(state).items():
        np.testing.assert_array_equal(leaves(folded)[name], leaf, err_msg=name)


def test_the_zero_state_stays_zero_and_finite() -> None:
    config, state, _ = random_state(Shape(1, 1, 64, 64), batch=1, position=[16])
    zeros = {name: getattr(state, name) * 0 for name in ("codes", "compensator_values", "ring_values")}
    state, launch = dataclasses.replace(state, **zeros), Launch(1, 2)
    folded = fold(config, state, jnp.array([True]), tuning=launch, interpret=True)
    assert not np.any(folded.codes) and not np.any(folded.column_scales) and not np.any(folded.compensator_values)
    assert all(np.isfinite(leaf).all() for name, leaf in leaves(folded).items() if name in BOUNDARY)


@pytest.mark.parametrize("smoothing", [0.5, 1.0])
@pytest.mark.parametrize("scale", [1e-20, 1e10])
def test_states_of_any_magnitude(scale: float, smoothing: float) -> None:
    config, state, _ = random_state(Shape(1, 1, 64, 64), batch=1, position=[16])
    config = dataclasses.replace(config, smoothing=smoothing)
    state = dataclasses.replace(
        state, column_scales=state.column_scales * scale, ring_scales=state.ring_scales * 2.0 ** np.round(np.log2(scale)),
        compensator_values=state.compensator_values * 0,
    )  # fmt: skip
    check(config, state, fold(config, state, jnp.array([True]), tuning=Launch(1, 2), interpret=True))


def test_a_state_of_low_rank_gives_no_nan() -> None:
    config, state, _ = random_state(Shape(1, 1, 64, 64), batch=1, position=[2])
    zeros = {name: getattr(state, name) * 0 for name in ("codes", "compensator_values")}
    state = dataclasses.replace(state, **zeros)
    folded = fold(config, state, jnp.array([True]), tuning=Launch(1, 2), interpret=True)
    assert all(np.isfinite(leaf).all() for name, leaf in leaves(folded).items() if name in BOUNDARY)
    dense = np.asarray(materialise(config, state))
    rebuilt = np.asarray(materialise(config, dataclasses.replace(folded, position=jnp.zeros((1,), jnp.int32))))
    assert np.linalg.norm(rebuilt - dense) < 1e-4 * np.linalg.norm(dense)


def test_nan_stays_in_its_head() -> None:
    config, state, _ = random_state(Shape(2, 2, 64, 64), batch=1, position=[16])
    state = dataclasses.replace(state, row_scales=state.row_scales.at[0, 0, 5].set(jnp.nan))
    folded = fold(config, state, jnp.array([True]), tuning=Launch(1, 2), interpret=True)
    assert np.isnan(folded.column_scales[0, 0]).any()
    assert all(np.isfinite(leaf[0, 1]).all() for name, leaf in leaves(folded).items() if name in BOUNDARY)


def test_previous_compensators_stay_unless_new_ones_gain() -> None:
    """One head that has settled, one that was just rewritten: `refit_gain` keeps the first's factors and not the second's."""
    config, state, _ = random_state(Shape(2, 2, 64, 64, rank=4), batch=1, position=[16])
    config = dataclasses.replace(config, refit_gain=0.02)
    settled = compress(dataclasses.replace(config, fit="svd"), state, materialise(config, state))
    quiet = state.ring_values.at[:, 0].multiply(1e-3)
    decays = state.ring_log_decays.at[:, 0].multiply(1e-3)
    state = dataclasses.replace(settled, ring_values=quiet, ring_log_decays=decays, position=state.position)
    expected = compress(config, state, materialise(config, state))
    folded = fold(config, state, jnp.array([True]), tuning=Launch(1, 2), interpret=True)
    np.testing.assert_array_equal(folded.compensator_values[:, 0], state.compensator_values[:, 0])
    assert np.any(folded.compensator_values[:, 1] != state.compensator_values[:, 1])
    np.testing.assert_array_equal(folded.compensator_keys[:, 0], expected.compensator_keys[:, 0])
    difference = np.abs(np.asarray(folded.codes[:, 0], np.int32) - np.asarray(expected.codes[:, 0], np.int32))
    assert difference.max() <= 1 and (difference > 0).sum() <= 3
    check(config, state, folded)


@pytest.mark.parametrize(("key", "value"), [(1.99, 2.01), (1.0, 1.001), (3.98, 1.001), (0.51, 0.501)])
def test_one_compensator_that_is_the_whole_state_fits_fp16(key: float, value: float) -> None:
    """The bound of the state is then its largest entry, and the unit of the value factor nearly twice the factor."""
    config, state, _ = random_state(Shape(1, 1, 64, 64, rank=1), batch=1, position=[16])
    config = dataclasses.replace(config, refit_gain=0.02, smoothing=1.0)
    state = dataclasses.replace(
        state, column_scales=state.column_scales * 1e-9, ring_scales=state.ring_scales * 2.0**-20,
        ring_log_decays=jnp.zeros_like(state.ring_log_decays),
        compensator_keys=jnp.zeros((1, 1, 1, 64), jnp.float16).at[..., 3].set(key).at[..., 4].set(key / 2),
        compensator_values=jnp.zeros((1, 1, 1, 64), jnp.float16).at[..., 5].set(value).at[..., 6].set(value / 2),
    )  # fmt: skip
    folded = fold(config, state, jnp.array([True]), tuning=Launch(1, 2), interpret=True)
    assert all(np.isfinite(np.asarray(leaves(folded)[name], np.float32)).all() for name in BOUNDARY)
    before, after = (
        np.asarray(materialise(config, s))
        for s in (state, dataclasses.replace(folded, position=jnp.zeros((1,), jnp.int32)))
    )
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-6 * np.abs(before).max())


def test_zero_records_on_a_kept_fit_change_nothing() -> None:  # METHOD pitfall 7
    config, state, _ = random_state(Shape(1, 1, 64, 64, rank=2), batch=1, position=[16])
    config = dataclasses.replace(config, refit_gain=0.02)
    state = compress(dataclasses.replace(config, fit="svd"), state, materialise(config, state))
    ring = dict(ring_values=state.ring_values * 0, ring_log_decays=state.ring_log_decays * 0)
    start = state = dataclasses.replace(state, **ring)
    for _ in range(3):
        state = dataclasses.replace(state, position=jnp.array([16], jnp.int32))
        state = fold(config, state, jnp.array([True]), tuning=Launch(1, 2), interpret=True)
    difference = np.abs(np.asarray(state.codes, np.int32) - np.asarray(start.codes, np.int32))
    assert difference.max() <= 1 and (difference > 0).mean() < 1e-3
    np.testing.assert_array_equal(state.compensator_keys, start.compensator_keys)


def float64_codes(config, state, folded) -> np.ndarray:
    """Codes [B, H, V, K] of a fold in float64, given the compensators of `folded`; no row may be zero."""
    wide = {name: np.asarray(leaf, np.float64) for name, leaf in leaves(state).items()}
    dense = np.swapaxes(wide["codes"], -1, -2) * wide["column_scales"][..., None, :] * wide["row_scales"][..., None]
    dense += np.einsum("bhrk,bhrv->bhkv", wide["compensator_keys"], wide["compensator_values"])
    keys = np.repeat(wide["ring_keys"], state.num_heads // state.num_key_heads, axis=1)
    for j in range(state.window):
        written = keys[:, :, j, :, None] * (wide["ring_values"] * wide["ring_scales"][..., None])[:, :, j, None]
        dense = np.exp(wide["ring_log_decays"][:, :, j])[..., None, None] * dense + written
    factors = (np.asarray(x, np.float64) for x in (folded.compensator_keys, folded.compensator_values))
    residual = dense - np.einsum("bhrk,bhrv->bhkv", *factors)
    smooth = residual / (np.abs(residual).mean(-1, keepdims=True) ** config.smoothing)
    return np.swapaxes(np.rint(smooth / (np.abs(smooth).max(-2, keepdims=True) / config.largest_code)), -1, -2)


@pytest.mark.parametrize("name", ["leapquant-int8", "leapquant-int8-paper"])
def test_on_a_recorded_trace_codes_are_as_near_to_float64_as_those_of_xla(name: str) -> None:
    """Given the kernel's compensators, codes differ from float64 only at ties, and no more of them than XLA's do."""
    config = lq.get_method(name).config
    trace, _ = load_trace(RECORDED)
    decode = jax.jit(functools.partial(lq.decode, config))
    state = lq.init_state(config, **trace.sizes, dense=trace.dense)
    differing, xla_differing, total = 0, 0, 0
    for start in range(0, trace.q.shape[1] - 15, 16):
        token = tuple(x[:, start : start + 16] for x in trace.tokens)
        before, _ = decode(state, *(x[:, :15] for x in token))
        full, _ = append(config, before, *(x[:, 15] for x in token))
        state = fold(config, full, jnp.array([True]), tuning=Launch(1, 2), interpret=True)
        factors = (x.astype(jnp.float32) for x in (state.compensator_keys, state.compensator_values))
        residual = materialise(config, full) - jnp.einsum("bhrk,bhrv->bhkv", *factors, precision="highest")
        expected = float64_codes(config, full, state)
        found = [np.asarray(x.codes, np.float64) for x in (state, quantize(config, residual))]
        assert all(np.abs(codes - expected).max() <= 1 for codes in found)
        differing += int((found[0] != expected).sum())
        xla_differing += int((found[1] != expected).sum())
        total += expected.size
    assert differing <= 1e-4 * total and differing <= 1.25 * xla_differing + 5
