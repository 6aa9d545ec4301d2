"""Rounding, scaling and normalising, bit by bit against other implementations of the formats."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import leapquant_jax as lq
from leapquant_jax import numerics
from tests.library import oracle

TINY = 2.0**-126  # below, fp32 is subnormal and a backend may flush it to zero


@pytest.fixture(scope="module")
def values():
    """Values over the whole range of fp32, and the corners of the narrow formats."""
    rng = np.random.default_rng(0)
    anything = np.frombuffer(rng.integers(0, 2**32, 50_000, dtype=np.uint32).tobytes(), np.float32)
    usual = rng.standard_normal(20_000).astype(np.float32)
    corners = [0, 65504, 65519.99, 65520, 3.4e38, np.inf, np.nan, 448, 464, 465, 2**-9, 2**-10, 3 * 2.0**-10,
               2.0**-14, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 6e-5, 1e-37, 3e-38]  # fmt: skip
    corners = np.array(corners, np.float32)
    return np.concatenate([anything, usual, usual * np.float32(1e-6), corners, -corners])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("compiled", [True, False])
def test_rounding_equals_ml_dtypes_bit_for_bit(values, dtype, compiled):
    function = (lambda x: numerics.round_and_store(x, dtype)) if not compiled else _compiled_rounding(dtype)
    stored, value = (np.asarray(x) for x in function(jnp.asarray(values)))
    with np.errstate(all="ignore"):
        expected = values
        if dtype == "float8_e4m3fn":  # no infinity: saturate instead of NaN (B12)
            expected = np.where(np.isfinite(values), np.clip(values, -448, 448), values)
        expected = expected.astype(jnp.dtype(dtype))
    compared = np.abs(values) >= TINY
    compared |= values == 0
    as_bits = np.uint8 if stored.itemsize == 1 else np.uint16
    same = (stored.view(as_bits) == expected.view(as_bits)) | (_nan(stored) & _nan(expected))
    assert same[compared].all(), values[compared & ~same][:10]
    finite = np.isfinite(values) & compared
    np.testing.assert_array_equal(stored[finite].astype(np.float32), value[finite])  # both views of one result


def _compiled_rounding(dtype):
    return jax.jit(lambda x: numerics.round_and_store(x, dtype))


def _nan(x):
    return np.isnan(x.astype(np.float32))


@given(st.floats(width=32, min_value=TINY, max_value=2.0**126))
def test_power_of_two_scale_is_exact(magnitude):
    scale = float(numerics.power_of_two_scale(jnp.float32(magnitude)))
    assert np.log2(scale) == round(np.log2(scale))
    assert 0.5 <= np.float32(magnitude) / np.float32(scale) < 1


def test_power_of_two_scale_of_nothing_is_one():
    np.testing.assert_array_equal(numerics.power_of_two_scale(jnp.array([0.0, jnp.inf, jnp.nan])), np.ones(3))


@pytest.mark.parametrize("scale", [1, 0.1, 0.01, 1e-3, 1e-4, 0])
def test_A13_l2norm_adds_eps_to_the_sum(scale):
    x = (np.random.default_rng(1).standard_normal((5, 128)) * scale).astype(np.float32)
    normalised = lq.l2norm(jnp.asarray(x))
    np.testing.assert_allclose(normalised, oracle.l2norm(x), rtol=1e-6, atol=1e-30)
    assert np.isfinite(normalised).all()
    if scale == 0:
        np.testing.assert_array_equal(normalised, np.zeros_like(x))


def test_A13_l2norm_is_computed_in_fp32_for_bfloat16_input():
    x = np.random.default_rng(1).standard_normal((5, 128)).astype(ml_dtypes.bfloat16)
    normalised = lq.l2norm(jnp.asarray(x))
    assert normalised.dtype == jnp.float32
    np.testing.assert_allclose(normalised, oracle.l2norm(x.astype(np.float32)), rtol=1e-6)
