"""Codes in bytes: every code, odd lengths, and the true number of bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leapquant_jax import packing
from tests.library import oracle


def _range(bits):
    return np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1), dtype=np.int8)


@pytest.mark.parametrize("bits", [8, 6, 4])
def test_every_code_in_every_place_survives(bits):
    codes = _range(bits)
    for shift in range(4):  # each code visits each place of its byte
        rolled = np.roll(codes, shift)
        packed = packing.pack(jnp.asarray(rolled), bits)
        assert packed.dtype == packing.packed_dtype(bits) and packed.nbytes == len(codes) * bits // 8
        unpacked = packing.unpack(packed, bits, len(codes))
        assert unpacked.dtype == jnp.int8
        np.testing.assert_array_equal(unpacked, rolled)


@given(st.sampled_from([8, 6, 4]), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_any_length_equals_the_oracle(bits, length, seed):
    codes = np.random.default_rng(seed).choice(_range(bits), (2, length))
    packed = packing.pack(jnp.asarray(codes), bits)
    assert packed.shape == (2, packing.packed_size(length, bits))
    np.testing.assert_array_equal(
        np.asarray(packed).astype(int) % 256, [oracle.pack_bits(row.tolist(), bits) for row in codes]
    )
    np.testing.assert_array_equal(packing.unpack(packed, bits, length), codes)


@pytest.mark.parametrize(("bits", "size"), [(8, 128), (6, 96), (4, 64)])
def test_packed_size_of_128_codes(bits, size):
    assert packing.packed_size(128, bits) == size


def test_B02_widening_is_exact_for_all_256_values():
    every = np.arange(-128, 128).astype(np.int8)
    np.testing.assert_array_equal(jax.jit(lambda x: x.astype(jnp.float32))(every), every.astype(np.float32))
