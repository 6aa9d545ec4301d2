"""The append kernel's program, lane for lane on a CPU, against the XLA function it must equal."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from leapquant_jax.append import append
from pallas_kernels.shapes import Shape
from pallas_kernels.tuning import Launch
from tests.kernels.helpers import leaves, random_state

xla_append = jax.jit(append, static_argnums=0)
ONE, MANY = Launch(64, 1), Launch(1, 3)
CASES = {
    "grouped": (Shape(2, 1), ONE),
    "grouped, both heads together, few workers": (Shape(4, 2), Launch(1, 2, heads_per_item=2)),
    "few workers": (Shape(2, 2), MANY),
    "64, three heads per key head": (Shape(3, 1, 64, 64, rank=3), ONE),
    "four heads per key head in pairs": (Shape(4, 1, 64, 64, rank=1), Launch(2, 1, heads_per_item=2)),
    "short window, many compensators": (Shape(1, 1, rank=8, window=8), ONE),
    "long window": (Shape(1, 1, 64, 64, window=32), ONE),
    "24 records": (Shape(1, 1, 64, 64, rank=5, window=24), ONE),
}


def compare(config, state, token, active, launch) -> None:
    expected_state, expected = xla_append(config, state, *token, active=active)
    got_state, got = pallas_kernels.append(config, state, *token, active, tuning=launch, interpret=True)
    np.testing.assert_allclose(got, expected, rtol=0, atol=4e-5 * float(jnp.abs(expected).max()))
    for name, leaf in leaves(expected_state).items():
        if name == "ring_values":  # u itself is computed in another order: a unit of fp16 at a tie
            np.testing.assert_allclose(leaves(got_state)[name], leaf, rtol=0, atol=2.0**-10, equal_nan=True)
        else:
            np.testing.assert_array_equal(leaves(got_state)[name], leaf, err_msg=name)


@pytest.mark.parametrize(("shape", "launch"), CASES.values(), ids=CASES)
def test_equals_xla(shape: Shape, launch: Launch) -> None:
    config, state, token = random_state(shape, batch=2)
    compare(config, state, token, None, launch)


@pytest.mark.parametrize("position", [0, 1, 7, 8, 15])
def test_every_fill_of_the_ring(position: int) -> None:
    config, state, token = random_state(Shape(2, 1, 64, 64), batch=1, position=[position])
    compare(config, state, token, None, Launch(1, 1, heads_per_item=2))


def test_inactive_rows_stay_and_output_zero_even_for_nan() -> None:
    config, state, (q, k, v, g, beta) = random_state(Shape(2, 1, 64, 64), batch=3)
    token = (q.at[1].set(jnp.nan), k.at[1].set(jnp.nan), v.at[1].set(jnp.inf), g, beta)
    active = jnp.array([True, False, True])
    compare(config, state, token, active, MANY)
    _, out = pallas_kernels.append(config, state, *token, active, tuning=MANY, interpret=True)
    np.testing.assert_array_equal(out[1], 0)


@pytest.mark.parametrize("position", [-1, 16])
def test_a_row_outside_of_its_window_is_left_alone(position: int) -> None:
    config, state, token = random_state(Shape(1, 1, 64, 64), batch=2)
    state = dataclasses.replace(state, position=state.position.at[0].set(position))
    got, out = pallas_kernels.append(config, state, *token, tuning=ONE, interpret=True)
    for name, leaf in leaves(state).items():
        np.testing.assert_array_equal(leaves(got)[name][0], leaf[0], err_msg=name)
    np.testing.assert_array_equal(out[0], 0)


def test_bfloat16_inputs_are_read_as_they_are() -> None:
    config, state, (q, k, v, g, beta) = random_state(Shape(2, 1), batch=1)
    token = (*(x.astype(jnp.bfloat16) for x in (q, k, v)), g, beta)
    compare(config, state, token, None, ONE)


def test_nan_stays_in_its_head() -> None:
    config, state, token = random_state(Shape(2, 2, 64, 64), batch=1)
    state = dataclasses.replace(state, row_scales=state.row_scales.at[0, 0, 5].set(jnp.nan))
    _, out = pallas_kernels.append(config, state, *token, tuning=ONE, interpret=True)
    assert np.isnan(out[0, 0]).all() and np.isfinite(out[0, 1]).all()


@pytest.mark.parametrize("scale", [1e-20, 1e10])
def test_states_of_any_magnitude(scale: float) -> None:
    config, state, (q, k, v, g, beta) = random_state(Shape(1, 1, 64, 64), batch=1)
    state = dataclasses.replace(
        state, column_scales=state.column_scales * scale, ring_scales=state.ring_scales * 2.0 ** np.round(np.log2(scale)),
        compensator_values=state.compensator_values * 0,
    )  # fmt: skip
    compare(config, state, (q, k, v * jnp.float32(scale), g, beta), None, ONE)


def test_full_erase() -> None:
    config, state, (q, k, v, g, beta) = random_state(Shape(1, 1, 64, 64), batch=1)
    compare(config, state, (q, k, v, jnp.full_like(g, -jnp.inf), beta), None, ONE)
