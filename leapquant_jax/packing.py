"""Codes of 8, 6 and 4 bits in bytes: nothing is stored wider than it is.

The last axis (keys) is cut into equal parts that share bytes, so unpacking is a few shifts and no interleaving:

    4 bits   byte i holds code i in its low nibble and code i + K/2 in its high nibble.
    6 bits   a plane of low nibbles as above, then a plane of top pairs: byte i holds the upper two bits of codes
             i, i + K/4, i + K/2 and i + 3K/4. Three bytes for four codes.
    8 bits   int8 as it is.

An axis that is not a multiple of the group (2 or 4) is padded with zero codes.
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

_GROUP = {8: 1, 6: 4, 4: 2}


def packed_size(length: int, bits: int) -> int:
    """Bytes that `length` codes of `bits` bits take along the packed axis."""
    group = _GROUP[bits]
    return -(-length // group) * group * bits // 8


def packed_dtype(bits: int) -> DTypeLike:
    """dtype of packed codes: int8 at 8 bits, uint8 below."""
    return jnp.int8 if bits == 8 else jnp.uint8


def pack(codes: Array, bits: int) -> Array:
    """Packs the last axis.

    Args:
      codes: int8 [..., N] in [-2^(bits-1), 2^(bits-1) - 1].
      bits: 8, 6 or 4.

    Returns:
      int8 [..., N] or uint8 [..., packed_size(N, bits)].
    """
    if bits == 8:
        return codes
    codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % _GROUP[bits])])
    unsigned = codes.view(jnp.uint8)
    low, high = jnp.split(unsigned & 0x0F, 2, axis=-1)
    nibbles = low | (high << 4)
    if bits == 4:
        return nibbles
    a, b, c, d = jnp.split((unsigned >> 4) & 0x03, 4, axis=-1)
    return jnp.concatenate([nibbles, a | (b << 2) | (c << 4) | (d << 6)], axis=-1)


def unpack_parts(packed: Array, bits: int) -> list[Array]:
    """The codes as equal consecutive parts of the padded axis, int8 [..., padded / parts] each.

    A read multiplies and sums part by part: joining them first would write out all codes once more.
    """
    if bits == 8:
        return [packed]
    if bits == 4:
        unsigned = [packed & 0x0F, packed >> 4]
    else:
        first, second, pairs = jnp.split(packed, 3, axis=-1)
        nibbles = [first & 0x0F, second & 0x0F, first >> 4, second >> 4]
        unsigned = [n | ((pairs >> shift & 0x03) << 4) for n, shift in zip(nibbles, (0, 2, 4, 6), strict=True)]
    unused = 8 - bits  # shift the sign bit up and back down
    return [(part << unused).view(jnp.int8) >> unused for part in unsigned]


def unpack(packed: Array, bits: int, length: int) -> Array:
    """Inverse of `pack`: int8 [..., length]."""
    return jnp.concatenate(unpack_parts(packed, bits), axis=-1)[..., :length]
