"""Gated full attention with partial rotary positions, over a plain cache or a sliding-window ring."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from models.blocks import RMSNorm, linear
from models.qwen35.config import Config
from models.ragged import Span

# Queries of a long prefill are processed in blocks of this many, so that no T x T score matrix exists.
QUERY_BLOCK = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionCache:
    """Keys (after norm and rotation) and values of one full layer, [B, HKV, N, D] in the activation dtype.

    Without a window, slot p holds the token at position p. With one, N is the window and slot p % N holds it.
    """

    keys: Array
    values: Array


class GatedAttention(nnx.Module):
    """Grouped-query attention whose output is gated per channel by the query projection's other half."""

    def __init__(self, config: Config, *, param_dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        width, dim = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
        project = functools.partial(
            linear, dtype=config.dtype, param_dtype=param_dtype, precision=config.matmul_precision,
            std=config.initializer_range, rngs=rngs,
        )  # fmt: skip
        self.q_proj = project(width, 2 * queries)
        self.k_proj = project(width, keys)
        self.v_proj = project(width, keys)
        self.o_proj = project(queries, width)
        self.q_norm = RMSNorm(dim, eps=config.rms_norm_eps, param_dtype=param_dtype)
        self.k_norm = RMSNorm(dim, eps=config.rms_norm_eps, param_dtype=param_dtype)

    def __call__(self, x: Array, cache: AttentionCache, span: Span, *, step: bool) -> tuple[Array, AttentionCache]:
        """Attends from the tokens of one call to the cache and to each other.

        Args:
          x: [B, T, hidden_size], real tokens first.
          cache: The layer's cache before the call.
          span: The real positions. Writes past the end of a cache without a window are dropped.
          step: Whether this is a decode step, T = 1.

        Returns:
          [B, T, hidden_size] and the new cache.
        """
        config = self.config
        batch, num_tokens, _ = x.shape
        dim, window, precision = config.head_dim, config.attention_window, config.matmul_precision
        # Each head owns 2 D outputs: first its query, then its gate.
        qg = self.q_proj(x).reshape(batch, num_tokens, config.num_attention_heads, 2 * dim)
        q, gate = jnp.split(qg, 2, axis=-1)
        k = self.k_proj(x).reshape(batch, num_tokens, config.num_key_value_heads, dim)
        v = self.v_proj(x).reshape(batch, num_tokens, config.num_key_value_heads, dim)
        if span.valid is not None:  # whatever padding holds, even NaN, reaches no real token
            k, v = (jnp.where(span.valid[:, :, None, None], y, jnp.zeros((), y.dtype)) for y in (k, v))
        positions = span.positions(num_tokens)
        rotate = functools.partial(apply_rope, positions=positions, dim=config.rotary_dim, theta=config.rope_theta)
        q, k = rotate(self.q_norm(q)), rotate(self.k_norm(k))

        new_cache = _write(cache, k, v, positions, span, window)
        if step:
            # In a full ring every slot is within the window, so one rule serves both kinds of cache.
            slots = jnp.arange(cache.keys.shape[2], dtype=jnp.int32)
            visible = slots[None, None] <= positions[:, :, None]
            out = attend(q, new_cache.keys, new_cache.values, visible, precision)
        elif window is None:
            out = _attend_cache(q, new_cache, positions, precision)
        else:
            out = _attend_window(q, k, v, cache, span.lengths, window, precision)
        y = out * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(x.dtype)
        return self.o_proj(y.reshape(batch, num_tokens, -1)), new_cache


def apply_rope(x: Array, *, positions: Array, dim: int, theta: float) -> Array:
    """Rotates the first `dim` channels of each head by their position, half-split; angles in float32.

    Args:
      x: [B, T, heads, D].
      positions: int32 [B, T].
      dim: Even number of rotated channels; the rest pass through.
      theta: Base of the frequencies theta**(-2 j / dim).
    """
    frequencies = jnp.float32(theta) ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angles = (positions.astype(jnp.float32)[..., None] * frequencies[None, None])[:, :, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x[..., :dim].astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., dim:]], axis=-1)


def attend(q: Array, keys: Array, values: Array, visible: Array, precision: str) -> Array:
    """Softmax attention with grouped heads; scores, mask and softmax in float32.

    Args:
      q: [B, T, HQ, D].
      keys, values: [B, HKV, N, D]; query head h reads head h // (HQ // HKV).
      visible: bool [B, T, N].
      precision: Of both matrix products.

    Returns:
      [B, T, HQ, D] in the dtype of `values`. A query that sees nothing gets a finite value.
    """
    batch, num_tokens, heads, dim = q.shape
    grouped = q.reshape(batch, num_tokens, keys.shape[1], -1, dim)
    scores = jnp.einsum("btgrd,bgnd->bgrtn", grouped, keys, precision=precision, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None], scores * dim**-0.5, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    out = jnp.einsum("bgrtn,bgnd->btgrd", weights, values, precision=precision)
    return out.reshape(batch, num_tokens, heads, dim)


def _write(
    cache: AttentionCache, k: Array, v: Array, positions: Array, span: Span, window: int | None
) -> AttentionCache:
    """Scatters k, v [B, T, HKV, D] into their slots; padding, and what a ring would overwrite at once, is dropped."""
    slots = cache.keys.shape[2]
    keep = positions < (span.lengths + span.counts)[:, None]
    if window is not None:
        keep &= positions >= (span.lengths + span.counts)[:, None] - slots
        positions = positions % slots
    slot = jnp.where(keep, positions, slots)  # one past the end: dropped
    rows = jnp.arange(k.shape[0], dtype=jnp.int32)[:, None]
    keys = cache.keys.at[rows, :, slot].set(k.astype(cache.keys.dtype), mode="drop")
    values = cache.values.at[rows, :, slot].set(v.astype(cache.values.dtype), mode="drop")
    return AttentionCache(keys, values)


def _attend_cache(q: Array, cache: AttentionCache, positions: Array, precision: str) -> Array:
    """Causal attention of many queries to a plain cache that already holds their own keys."""
    slots = jnp.arange(cache.keys.shape[2], dtype=jnp.int32)

    def block(start: Array, q: Array, positions: Array) -> Array:
        del start
        return attend(q, cache.keys, cache.values, slots[None, None] <= positions[:, :, None], precision)

    return _map_blocks(block, q, positions)


def _attend_window(
    q: Array, k: Array, v: Array, ring: AttentionCache, lengths: Array, window: int, precision: str
) -> Array:
    """Sliding-window attention of many queries to the ring as it was, followed by their own keys.

    The ring is unrolled so that index e of the joined keys holds position `lengths - window + e`; query t then sees
    the indices t < e <= t + window, and a block of queries needs a contiguous slice of keys.
    """
    num_tokens = q.shape[1]
    past = lengths[:, None] - window + jnp.arange(window, dtype=jnp.int32)[None]
    order = (past % window)[:, None, :, None]
    size = min(QUERY_BLOCK, num_tokens)
    tail = -num_tokens % size

    def join(old: Array, new: Array) -> Array:
        new = jnp.pad(jnp.swapaxes(new, 1, 2).astype(old.dtype), ((0, 0), (0, 0), (0, tail), (0, 0)))
        return jnp.concatenate([jnp.take_along_axis(old, order, axis=2), new], axis=2)

    keys, values = join(ring.keys, k), join(ring.values, v)
    queries = jax.lax.broadcasted_iota(jnp.int32, (size, window + size), 0)
    indices = jax.lax.broadcasted_iota(jnp.int32, (size, window + size), 1)
    near = (queries < indices) & (indices <= queries + window)

    def block(start: Array, q: Array, _: Array) -> Array:
        local = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=window + size, axis=2)
        exists = (window - lengths)[:, None] <= start + jnp.arange(window + size, dtype=jnp.int32)[None]
        return attend(q, local(keys), local(values), near[None] & exists[:, None], precision)

    return _map_blocks(block, q, lengths[:, None] + jnp.zeros((1, num_tokens), jnp.int32))


def _map_blocks(block, q: Array, positions: Array) -> Array:
    """Applies `block(start, q, positions)` to blocks of queries, one after another when there are several.

    Each block is rematerialised in the backward pass: saved scores would be the T x T matrix again.
    """
    batch, num_tokens = positions.shape
    if num_tokens <= QUERY_BLOCK:
        return block(jnp.int32(0), q, positions)
    num_blocks = -(-num_tokens // QUERY_BLOCK)
    tail = num_blocks * QUERY_BLOCK - num_tokens

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, tail)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, num_blocks, QUERY_BLOCK, *x.shape[2:]), 1, 0)

    starts = jnp.arange(num_blocks, dtype=jnp.int32) * QUERY_BLOCK
    out = jax.lax.map(lambda xs: jax.checkpoint(block)(*xs), (starts, split(q), split(positions)))
    return jnp.moveaxis(out, 0, 1).reshape(batch, num_blocks * QUERY_BLOCK, *q.shape[2:])[:, :num_tokens]
