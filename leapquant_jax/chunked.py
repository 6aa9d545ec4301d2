"""The gated delta rule over many tokens as matrix products: prefill and training.

Inside a chunk of C tokens the corrections solve one unit lower triangular system. With Gamma_{a:b} the product of the
decays of tokens a..b,

    (I + A) U = Diag(beta) (V - rows(S_0^T Gamma_{1:i} k_i)),   A_ij = beta_i k_i^T Gamma_{j+1:i} k_j   (j < i)
    o_i = S_0^T Gamma_{1:i} q_i + sum_{j <= i} u_j (k_j^T Gamma_{j+1:i} q_i)                             (eq. 10)
    S_C = Gamma_{1:C} S_0 + sum_j Gamma_{j+1:C} k_j u_j^T                                                (eq. 4)

Every decay is formed as the exponential of a sum of log decays that are <= 0; nothing is ever divided by a decay, so a
strong gate can only underflow to zero.
"""

import jax
import jax.numpy as jnp
from jax import Array

from leapquant_jax import inputs
from leapquant_jax.numerics import HIGHEST, floor_log_decay, repeat_key_heads

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
      chunk_size: tokens per chunk (at most 16 are used with a channel gate).
      precision: of the large matrix products; decays and the triangular solve are always full fp32.

    Returns:
      (state after T tokens [B, H, K, V] fp32, outputs [B, T, H, V] fp32).

    Raises:
      ValueError: a shape or dtype does not fit, or chunk_size < 1.
    """
    batch, num_heads, key_dim, value_dim = inputs.dense_shape(dense)
    length = inputs.time_length(q)
    inputs.check_tokens(
        q, k, v, g, beta, batch=batch, num_heads=num_heads, num_key_heads=q.shape[2], key_dim=key_dim,
        value_dim=value_dim, active=mask, length=length,
    )  # fmt: skip
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    channel_gate = g.ndim == 4
    chunk = max(1, min(chunk_size, _CHANNEL_CHUNK if channel_gate else chunk_size, length))

    q, k, v, beta = (x.astype(jnp.float32) for x in (q, k, v, beta))
    g = floor_log_decay(g)
    if mask is not None:  # a padded token neither decays, writes nor reads; `where` also stops its NaNs
        q, k, v, g, beta = (
            jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - 2)), x, jnp.float32(0)) for x in (q, k, v, g, beta)
        )
    q, k = (repeat_key_heads(x, num_heads, axis=2) for x in (q, k))

    num_chunks = -(-length // chunk)
    padding = num_chunks * chunk - length

    def to_chunks(x: Array) -> Array:  # [B, T, H, ...] -> [N, B, H, C, ...]
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, num_chunks, chunk, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2))

    def body(dense: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        return _one_chunk(dense, *token, precision=precision)

    dense, outs = jax.lax.scan(body, dense, tuple(map(to_chunks, (q, k, v, g, beta))))
    outs = jnp.moveaxis(outs, (0, 2), (1, 3)).reshape(batch, num_chunks * chunk, num_heads, value_dim)
    return dense, outs[:, :length]


def _one_chunk(
    dense: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, *, precision: jax.lax.PrecisionLike
) -> tuple[Array, Array]:
    """One chunk for all heads; q, k [B, H, C, K], v [B, H, C, V], g [B, H, C] or [B, H, C, K], beta [B, H, C]."""
    chunk = q.shape[2]
    ones = jnp.ones((1, 1, chunk, chunk), jnp.float32)
    lower, strictly_lower = jnp.tril(ones), jnp.tril(ones, -1)

    # Sums of the log decays of tokens j+1..i as masked sums: exact even for a full erase followed by mild decays.
    if g.ndim == 3:
        log_between = jnp.einsum("il,bhlj->bhij", lower[0, 0], g[..., None] * strictly_lower, precision=HIGHEST)
        between = jnp.exp(jnp.where(lower > 0, log_between, -jnp.inf))  # Gamma_{j+1:i}
        from_start = jnp.exp(jnp.einsum("il,bhl->bhi", lower[0, 0], g, precision=HIGHEST))[..., None]  # Gamma_{1:i}
        kk = jnp.einsum("bhik,bhjk->bhij", k, k, precision=precision) * between
        qk = jnp.einsum("bhik,bhjk->bhij", q, k, precision=precision) * between
        to_end = between[:, :, -1, :, None]  # Gamma_{j+1:C}, [B, H, C, 1]
    else:
        later = g[..., None, :] * strictly_lower[..., None]
        log_between = jnp.einsum("il,bhljk->bhijk", lower[0, 0], later, precision=HIGHEST)
        between = jnp.exp(jnp.where(lower[..., None] > 0, log_between, -jnp.inf))
        from_start = jnp.exp(jnp.einsum("il,bhlk->bhik", lower[0, 0], g, precision=HIGHEST))
        weighted = between * k[:, :, None]
        kk = jnp.einsum("bhik,bhijk->bhij", k, weighted, precision=precision)
        qk = jnp.einsum("bhik,bhijk->bhij", q, weighted, precision=precision)
        to_end = between[:, :, -1]  # [B, H, C, K]

    old = jnp.einsum("bhik,bhkv->bhiv", from_start * k, dense, precision=precision)
    # solve_triangular with unit_diagonal reads only the strict lower part, so the diagonal needs no ones
    system = beta[..., None] * kk * strictly_lower
    u = jax.scipy.linalg.solve_triangular(system, beta[..., None] * (v - old), lower=True, unit_diagonal=True)
    out = jnp.einsum("bhik,bhkv->bhiv", from_start * q, dense, precision=precision)
    out += jnp.einsum("bhij,bhjv->bhiv", qk, u, precision=precision)
    end = from_start[:, :, -1, :, None]  # Gamma_{1:C}
    dense = end * dense + jnp.einsum("bhjk,bhjv->bhkv", to_end * k, u, precision=precision)
    return dense, out
