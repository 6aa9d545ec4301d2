"""The gated delta rule over many tokens as matrix products: prefill and training.

Inside a chunk of C tokens the corrections solve one unit lower triangular system. With Gamma_{a:b} the product of the
decays of tokens a..b,

    (I + A) U = Diag(beta) (V - rows(S_0^T Gamma_{1:i} k_i)),   A_ij = beta_i k_i^T Gamma_{j+1:i} k_j   (j < i)
    o_i = S_0^T Gamma_{1:i} q_i + sum_{j <= i} u_j (k_j^T Gamma_{j+1:i} q_i)                             (eq. 10)
    S_C = Gamma_{1:C} S_0 + sum_j Gamma_{j+1:C} k_j u_j^T                                                (eq. 4)

The system does not depend on S_0, so it is inverted for all chunks at once, U = W - E S_0 (the WY form), and only two
products per chunk remain in the scan over chunks.

Every decay is formed as the exponential of a sum of log decays that are <= 0; nothing is ever divided by a decay, so a
strong gate can only underflow to zero.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from leapquant_jax import inputs
from leapquant_jax.numerics import HIGHEST, floor_log_decay, repeat_key_heads
from leapquant_jax.triangular import unit_lower_inverse

# The channel gate keeps a [C, C, K] decay tensor per head, so its chunks are shorter.
_CHANNEL_CHUNK = 16


def chunked_delta_rule(
    dense: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, *, mask: Array | None = None,
    chunk_size: int = 64, precision: jax.lax.PrecisionLike = HIGHEST,
) -> tuple[Array, Array]:  # fmt: skip
    """T tokens of the exact recurrence in chunks; equals `exact_decode` up to fp32 rounding. Differentiable.

    Args:
      dense: [B, H, K, V] fp32 state to continue from.
      q, k: [B, T, G, K]; L2-normalised, q scaled by K**-0.5.
      v: [B, T, H, V].
      g: log decay <= 0, [B, T, H] or [B, T, H, K]; -inf erases.
      beta: write strength, [B, T, H].
      mask: bool [B, T]; a False token changes nothing and outputs 0.
      chunk_size: tokens per chunk, 4 times a power of two (at most 16 are used with a channel gate).
      precision: of the large matrix products; decays and the triangular inverse are always full fp32.

    Returns:
      (state after T tokens [B, H, K, V] fp32, outputs [B, T, H, V] fp32).

    Raises:
      ValueError: a shape, a dtype or the chunk size does not fit.
    """
    batch, num_heads, key_dim, value_dim = inputs.dense_shape(dense)
    length = inputs.time_length(q)
    inputs.check_tokens(
        q, k, v, g, beta, batch=batch, num_heads=num_heads, num_key_heads=q.shape[2], key_dim=key_dim,
        value_dim=value_dim, active=mask, length=length,
    )  # fmt: skip
    if chunk_size < 4 or chunk_size % 4 or (chunk_size // 4) & (chunk_size // 4 - 1):
        raise ValueError(f"chunk_size must be 4 times a power of two, got {chunk_size}")
    if length == 0:
        return dense, jnp.zeros((batch, 0, num_heads, value_dim), jnp.float32)
    channel_gate = g.ndim == 4
    chunk = min(chunk_size, _CHANNEL_CHUNK) if channel_gate else chunk_size
    while chunk > 4 and chunk // 2 >= length:  # a short prompt needs no long chunk
        chunk //= 2

    q, k, v, beta = (x.astype(jnp.float32) for x in (q, k, v, beta))
    g = floor_log_decay(g)
    if mask is not None:  # a padded token neither decays, writes nor reads; `where` also stops its NaNs
        q, k, v, g, beta = (jnp.where(_like(mask, x), x, jnp.float32(0)) for x in (q, k, v, g, beta))
    q, k = (repeat_key_heads(x, num_heads, axis=2) for x in (q, k))

    num_chunks = -(-length // chunk)
    padding = num_chunks * chunk - length

    def to_chunks(x: Array) -> Array:  # [B, T, H, ...] -> [N, B, H, C, ...]
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, num_chunks, chunk, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2))

    def product(pattern: str, a: Array, b: Array) -> Array:
        return jnp.einsum(pattern, a, b, precision=precision)

    q, k, v, g, beta = map(to_chunks, (q, k, v, g, beta))
    beta = beta[..., None]
    from_start, to_end, kk, qk = _channel_decays(q, k, g, product) if channel_gate else _scalar_decays(q, k, g, product)
    inverse = unit_lower_inverse(beta * kk)
    writes = product("nbhij,nbhjv->nbhiv", inverse, beta * v)  # U for an empty state
    erases = product("nbhij,nbhjk->nbhik", inverse, beta * (from_start * k))  # what the state adds: U = W - E S_0

    def one_chunk(dense: Array, terms: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        writes, erases, kept_keys, end = terms
        u = writes - product("bhik,bhkv->bhiv", erases, dense)
        return end * dense + product("bhik,bhiv->bhkv", kept_keys, u), (dense, u)

    end = jnp.swapaxes(from_start[..., -1:, :], -1, -2)  # Gamma_{1:C} as a column over the keys
    dense, (starts, u) = jax.lax.scan(one_chunk, dense, (writes, erases, to_end * k, end))
    outs = product("nbhik,nbhkv->nbhiv", from_start * q, starts) + product("nbhij,nbhjv->nbhiv", qk, u)
    outs = jnp.moveaxis(outs, (0, 2), (1, 3)).reshape(batch, num_chunks * chunk, num_heads, value_dim)[:, :length]
    return dense, outs if mask is None else jnp.where(_like(mask, outs), outs, jnp.float32(0))


Product = Callable[[str, Array, Array], Array]


def _scalar_decays(q: Array, k: Array, g: Array, product: Product) -> tuple[Array, Array, Array, Array]:
    """Decays within every chunk, and the key and query products weighted by them.

    Args:
      q, k: [N, B, H, C, K].
      g: [N, B, H, C].
      product: einsum at the caller's precision.

    Returns:
      Gamma_{1:i} [N, B, H, C, 1 or K], Gamma_{j+1:C} likewise, and for j <= i (0 above the diagonal)
      k_i^T Gamma_{j+1:i} k_j and q_i^T Gamma_{j+1:i} k_j, [N, B, H, C, C].
    """
    lower, strictly_lower = _triangles(g.shape[-1], g.ndim + 1)
    # sums of the log decays of tokens j+1..i as masked sums: exact even for a full erase followed by mild decays
    log_between = jnp.matmul(
        jnp.broadcast_to(lower, (*g.shape, g.shape[-1])), g[..., None] * strictly_lower, precision=HIGHEST
    )
    between = jnp.exp(jnp.where(lower > 0, log_between, -jnp.inf))
    from_start = jnp.exp(jnp.cumsum(g, axis=-1))[..., None]
    kk = product("nbhik,nbhjk->nbhij", k, k) * between
    qk = product("nbhik,nbhjk->nbhij", q, k) * between
    return from_start, between[..., -1, :, None], kk, qk


def _channel_decays(q: Array, k: Array, g: Array, product: Product) -> tuple[Array, Array, Array, Array]:
    """As `_scalar_decays` for one decay per key channel, g [N, B, H, C, K]; chunk by chunk to bound the memory."""
    lower, strictly_lower = _triangles(g.shape[-2], g.ndim - 1)

    def one_chunk(arrays: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        q, k, g = arrays
        log_between = jnp.einsum(
            "il,bhljk->bhijk", lower[0, 0], g[..., None, :] * strictly_lower[..., None], precision=HIGHEST
        )
        between = jnp.exp(jnp.where(lower[..., None] > 0, log_between, -jnp.inf))
        weighted = between * k[:, :, None]
        kk = product("bhik,bhijk->bhij", k, weighted)
        qk = product("bhik,bhijk->bhij", q, weighted)
        return between[:, :, -1], kk, qk

    to_end, kk, qk = jax.lax.map(one_chunk, (q, k, g))
    return jnp.exp(jnp.cumsum(g, axis=-2)), to_end, kk, qk


def _triangles(size: int, ndim: int) -> tuple[Array, Array]:
    """Lower and strictly lower triangles of ones, [1, ..., 1, size, size]."""
    ones = jnp.ones((1,) * (ndim - 2) + (size, size), jnp.float32)
    return jnp.tril(ones), jnp.tril(ones, -1)


def _like(mask: Array, x: Array) -> Array:
    """The mask [B, T] with trailing axes to match x [B, T, ...]."""
    return mask.reshape(*mask.shape, *(1,) * (x.ndim - 2))
