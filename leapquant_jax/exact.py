"""The exact gated delta rule in fp32: what every quantized state is judged against (eq. 1 and 3 of the paper).

    S_t = Diag(exp g_t) S_{t-1} + k_t u_t^T,    u_t = beta_t (v_t - S_{t-1}^T (exp(g_t) * k_t)),    o_t = S_t^T q_t

`g` is one log decay per head (Gated DeltaNet) or one per key channel (Kimi delta attention).
"""

import jax.numpy as jnp
from jax import Array

from leapquant_jax import inputs
from leapquant_jax.numerics import floor_log_decay, repeat_key_heads


def read(dense: Array, x: Array) -> Array:
    """`S^T x` for every head, summed in fp32 whatever the default matmul precision.

    Args:
      dense: [..., K, V] fp32.
      x: [..., K] fp32.

    Returns:
      [..., V] fp32.
    """
    return jnp.sum(dense * x[..., :, None], axis=-2)


def exact_step(
    dense: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, *, active: Array | None = None
) -> tuple[Array, Array]:
    """One token of the recurrence on a dense state.

    Args:
      dense: [B, H, K, V] fp32 state.
      q, k: [B, G, K]; L2-normalised, q scaled by K**-0.5. H is a multiple of G.
      v: [B, H, V].
      g: log decay <= 0, [B, H] or [B, H, K]; -inf erases.
      beta: write strength, [B, H].
      active: bool [B]; an inactive row keeps its state and outputs 0.

    Returns:
      (new state [B, H, K, V] fp32, output [B, H, V] fp32).

    Raises:
      ValueError: a shape or dtype does not fit.
    """
    batch, num_heads, key_dim, value_dim = inputs.dense_shape(dense)
    inputs.check_tokens(
        q, k, v, g, beta, batch=batch, num_heads=num_heads, num_key_heads=q.shape[1] if q.ndim > 1 else 0,
        key_dim=key_dim, value_dim=value_dim, active=active,
    )  # fmt: skip
    q, k = (repeat_key_heads(x.astype(jnp.float32), num_heads, axis=1) for x in (q, k))
    v, beta = v.astype(jnp.float32), beta.astype(jnp.float32)
    decay = jnp.exp(floor_log_decay(g))
    decay = decay[..., None] if decay.ndim == 2 else decay  # [B, H, 1] or [B, H, K]

    decayed = decay[..., None] * dense
    u = beta[..., None] * (v - read(decayed, k))
    new = decayed + k[..., :, None] * u[..., None, :]
    out = read(new, q)
    if active is not None:
        new = jnp.where(active[:, None, None, None], new, dense)
        out = jnp.where(active[:, None, None], out, jnp.float32(0))
    return new, out


def exact_decode(
    dense: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, *, active: Array | None = None
) -> tuple[Array, Array]:
    """`exact_step` over T tokens as one `lax.scan`; arrays are [B, T, ...], `active` is [B, T].

    Returns:
      (new state [B, H, K, V] fp32, outputs [B, T, H, V] fp32).
    """
    return inputs.scan_tokens(exact_step, dense, (q, k, v, g, beta), active)


def zeros(batch: int, num_heads: int, key_dim: int, value_dim: int) -> Array:
    """The empty memory, [B, H, K, V] fp32."""
    return jnp.zeros((batch, num_heads, key_dim, value_dim), jnp.float32)
