"""Ragged batches: padded rows in any arrangement become right-padded rows with a count each.

Attention survives padding by masking keys; a recurrence and a convolution do not. So every call begins by moving
each row's real tokens to the front. Left padding, right padding, holes, rows of different lengths and rows with no
token at all are then one case: the first `counts[b]` positions of row b are real, and layers stop there.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Span:
    """Where the tokens of one call lie in their rows' histories.

    Attributes:
      lengths: int32 [B], tokens of the row seen before this call.
      counts: int32 [B], real tokens of the row in this call.
      valid: bool [B, T], true for the first `counts` positions; None when every position is real.
    """

    lengths: Array
    counts: Array
    valid: Array | None

    def positions(self, num_tokens: int) -> Array:
        """Absolute positions, int32 [B, T], of the tokens of this call."""
        steps = jax.lax.broadcasted_iota(jnp.int32, (self.lengths.shape[0], num_tokens), 1)
        return self.lengths[:, None] + steps


def full_span(lengths: Array, num_tokens: int) -> Span:
    """The span of a call whose `num_tokens` positions are real in every row."""
    return Span(lengths, jnp.full_like(lengths, num_tokens), None)


def masked_span(lengths: Array, mask: Array) -> Span:
    """The span of a call with the real tokens of `mask` (bool [B, T]) moved to the front of their rows."""
    counts = jnp.sum(mask, axis=1, dtype=jnp.int32)
    steps = jax.lax.broadcasted_iota(jnp.int32, mask.shape, 1)
    return Span(lengths, counts, steps < counts[:, None])


def pack(x: Array, mask: Array) -> Array:
    """Moves the real positions of each row to the front, in order; the others follow.

    Args:
      x: [B, T, ...].
      mask: bool [B, T], true at real positions.

    Returns:
      [B, T, ...] whose first sum(mask[b]) positions are the real ones of row b.
    """
    order = jnp.argsort(jnp.logical_not(mask), axis=1, stable=True)
    return jnp.take_along_axis(x, _like(order, x), axis=1)


def unpack(x: Array, mask: Array) -> Array:
    """The inverse of `pack` at real positions; padding positions are zero."""
    rank = jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)
    gathered = jnp.take_along_axis(x, _like(rank, x), axis=1)
    return jnp.where(_like(mask, x), gathered, jnp.zeros((), x.dtype))


def last_real(x: Array, counts: Array) -> Array:
    """The last real position of each packed row: [B, T, d] to [B, d]; zeros for a row without tokens."""
    last = jnp.maximum(counts - 1, 0)[:, None, None]
    gathered = jnp.take_along_axis(x, last, axis=1)[:, 0]
    return jnp.where(counts[:, None] > 0, gathered, jnp.zeros((), x.dtype))


def _like(index: Array, x: Array) -> Array:
    """Appends axes of size one to `index` [B, T] until it has the rank of `x`."""
    return index.reshape(index.shape + (1,) * (x.ndim - index.ndim))
