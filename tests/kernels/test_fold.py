"""The fold kernel's program, lane for lane on a CPU, against the XLA function it must equal."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from leapquant_jax.fold import compress as xla_compress
from leapquant_jax.quantize import quantize as xla_quantize
from leapquant_jax.window import materialise as xla_materialise
from pallas_kernels import fold
from pallas_kernels.shapes import Shape
from pallas_kernels.tuning import Launch
from tests.kernels.helpers import leaves, random_state

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
    """Same error of the whole state as XLA's fold, and codes that are XLA's rounding of the same residual."""
    dense = np.asarray(materialise(config, state), np.float64)
    empty = dataclasses.replace(folded, position=jnp.zeros_like(state.position))
    expected = compress(config, state, jnp.asarray(dense, jnp.float32))
    norm = max(np.linalg.norm(dense), 1e-300)
    error, base = (np.linalg.norm(np.asarray(materialise(config, x)) - dense) / norm for x in (empty, expected))
    assert error <= 1.002 * base + 1e-6

    # The factors agree up to fp16 ties; given the kernel's own, every code is XLA's, but for ties of rounding.
    keys, values = (np.asarray(x, np.float64) for x in (folded.compensator_keys, folded.compensator_values))
    residual = dense - np.einsum("bhrk,bhrv->bhkv", keys, values)
    rounded = quantize(config, jnp.asarray(residual, jnp.float32))
    difference = np.abs(np.asarray(rounded.codes, np.int32) - np.asarray(folded.codes, np.int32))
    assert difference.max() <= 1 and (difference > 0).sum() <= 3 + 1e-4 * difference.size
    np.testing.assert_allclose(folded.row_scales, rounded.row_scales, rtol=3e-6)
    np.testing.assert_allclose(folded.column_scales, rounded.column_scales, rtol=1e-5)


LAYOUTS = pytest.mark.parametrize("layout", ["wide", "narrow"])


@LAYOUTS
@pytest.mark.parametrize("shape", CASES.values(), ids=CASES)
def test_equals_xla(shape: Shape, layout: str) -> None:
    config, state, _ = random_state(shape, batch=1, position=[shape.window])
    folded = fold(config, state, jnp.array([True]), tuning=Launch(1, 2, layout=layout), interpret=True)
    check(config, state, folded)
    assert int(folded.position[0]) == 0


@LAYOUTS
def test_only_the_rows_asked_for_and_at_any_position(layout: str) -> None:
    config, state, _ = random_state(Shape(2, 1, 64, 64, rank=2), batch=4, position=[16, 16, 5, 16])
    rows = jnp.array([False, True, True, False])
    folded = fold(config, state, rows, tuning=Launch(1, 2, layout=layout), interpret=True)
    for name, leaf in leaves(state).items():
        np.testing.assert_array_equal(leaves(folded)[name][[0, 3]], leaf[[0, 3]], err_msg=name)
    take = [1, 2]
    part = {name: getattr(state, name)[jnp.array(take)] for name in leaves(state)}
    done = {name: getattr(folded, name)[jnp.array(take)] for name in leaves(state)}
    check(config, type(state)(**part), type(state)(**done))
    assert folded.position.tolist() == [16, 0, 0, 16]


def test_no_rows() -> None:
    config, state, _ = random_state(Shape(1, 1, 64, 64), batch=2)
    folded = fold(config, state, jnp.array([False, False]), tuning=Launch(2, 1), interpret=True)
    for name, leaf in leaves(state).items():
        np.testing.assert_array_equal(leaves(folded)[name], leaf, err_msg=name)


@LAYOUTS
def test_the_zero_state_stays_zero_and_finite(layout: str) -> None:
    config, state, _ = random_state(Shape(1, 1, 64, 64), batch=1, position=[16])
    zeros = {name: getattr(state, name) * 0 for name in ("codes", "compensator_values", "ring_values")}
    state, launch = dataclasses.replace(state, **zeros), Launch(1, 2, layout=layout)
    folded = fold(config, state, jnp.array([True]), tuning=launch, interpret=True)
    assert not np.any(folded.codes) and not np.any(folded.column_scales) and not np.any(folded.compensator_values)
    assert all(np.isfinite(leaf).all() for name, leaf in leaves(folded).items() if name in BOUNDARY)


@LAYOUTS
@pytest.mark.parametrize("scale", [1e-20, 1e10])
def test_states_of_any_magnitude(scale: float, layout: str) -> None:
    config, state, _ = random_state(Shape(1, 1, 64, 64), batch=1, position=[16])
    state = dataclasses.replace(
        state, column_scales=state.column_scales * scale, ring_scales=state.ring_scales * 2.0 ** np.round(np.log2(scale)),
        compensator_values=state.compensator_values * 0,
    )  # fmt: skip
    check(config, state, fold(config, state, jnp.array([True]), tuning=Launch(1, 2, layout=layout), interpret=True))


@LAYOUTS
def test_a_state_of_low_rank_gives_no_nan(layout: str) -> None:
    config, state, _ = random_state(Shape(1, 1, 64, 64), batch=1, position=[2])
    zeros = {name: getattr(state, name) * 0 for name in ("codes", "compensator_values")}
    state = dataclasses.replace(state, **zeros)
    folded = fold(config, state, jnp.array([True]), tuning=Launch(1, 2, layout=layout), interpret=True)
    assert all(np.isfinite(leaf).all() for name, leaf in leaves(folded).items() if name in BOUNDARY)
    dense = np.asarray(materialise(config, state))
    rebuilt = np.asarray(materialise(config, dataclasses.replace(folded, position=jnp.zeros((1,), jnp.int32))))
    assert np.linalg.norm(rebuilt - dense) < 1e-4 * np.linalg.norm(dense)


@LAYOUTS
def test_nan_stays_in_its_head(layout: str) -> None:
    config, state, _ = random_state(Shape(2, 2, 64, 64), batch=1, position=[16])
    state = dataclasses.replace(state, row_scales=state.row_scales.at[0, 0, 5].set(jnp.nan))
    folded = fold(config, state, jnp.array([True]), tuning=Launch(1, 2, layout=layout), interpret=True)
    assert np.isnan(folded.column_scales[0, 0]).any()
    assert all(np.isfinite(leaf[0, 1]).all() for name, leaf in leaves(folded).items() if name in BOUNDARY)
