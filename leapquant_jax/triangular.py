"""Inverse of unit lower triangular matrices by matrix products: what the corrections inside a chunk have to solve."""

import jax
import jax.numpy as jnp
from jax import Array

from leapquant_jax.numerics import HIGHEST

_SMALLEST_BLOCK = 4


@jax.custom_vjp
def unit_lower_inverse(system: Array) -> Array:
    """(I + A)^-1, with A the strictly lower part of `system`; differentiable.

    A triangular solve walks through the rows one by one, for every matrix of the batch. Here diagonal blocks of 4 are
    inverted by their Neumann series (exact, since A^4 = 0 in a block, and too short to lose digits), and neighbouring
    blocks are merged pairwise, [[X, 0], [-Y L X, Y]], until one is left.

    Args:
      system: fp32 [..., C, C], C = 4 times a power of two.

    Returns:
      fp32 [..., C, C], unit lower triangular.
    """
    return _merge_blocks(jnp.tril(system, -1))


def _merge_blocks(strictly_lower: Array) -> Array:
    size, width = strictly_lower.shape[-1], _SMALLEST_BLOCK
    if size % width or (size // width) & (size // width - 1):
        raise ValueError(f"the matrix size must be {width} times a power of two, got {size}")
    a = _diagonal_blocks(strictly_lower, width)
    identity = jnp.broadcast_to(jnp.eye(width, dtype=jnp.float32), a.shape)
    inverse = _product(identity - a, identity + _product(a, a))
    while width < size:
        below = _diagonal_blocks(strictly_lower, 2 * width)[..., width:, :width]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_product(_product(second, below), first)
        inverse = jnp.concatenate(
            [
                jnp.concatenate([first, jnp.zeros_like(first)], axis=-1),
                jnp.concatenate([corner, second], axis=-1),
            ],
            axis=-2,
        )
        width *= 2
    return inverse[..., 0, :, :]


def _diagonal_blocks(matrix: Array, width: int) -> Array:
    """[..., C, C] to [..., C / width, width, width]."""
    starts = range(0, matrix.shape[-1], width)
    return jnp.stack([matrix[..., i : i + width, i : i + width] for i in starts], axis=-3)


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=HIGHEST)


def _forward(system: Array) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(system)
    return inverse, inverse


def _backward(inverse: Array, cotangent: Array) -> tuple[Array]:
    transposed = jnp.swapaxes(inverse, -1, -2)  # d(X) = -X dA X
    return (-jnp.tril(_product(_product(transposed, cotangent), transposed), -1),)


unit_lower_inverse.defvjp(_forward, _backward)
