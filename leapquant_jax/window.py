"""Reading a state in the middle of its window (eq. 10), and dropping the window's last records.

    S_l^T x = S^_0^T (Gamma_{1:l} x) + sum_{j<=l} u_j (k_j . Gamma_{j+1:l} x)

Gamma_{a:b} is the product of the decays of tokens a..b, formed as exp of a *suffix sum* of log decays: only exponents
<= 0 appear, there is nothing to divide by, and a full erase (-128 after flooring) does not blur the decays after it as
a difference of cumulative sums would.
"""

import jax.numpy as jnp
from jax import Array

from leapquant_jax.config import LeapConfig
from leapquant_jax.numerics import HIGHEST, repeat_key_heads
from leapquant_jax.quantize import Quantized, dequantize, read_quantized
from leapquant_jax.state import LeapState


def live_records(state: LeapState, count: Array | None = None) -> Array:
    """bool [B, P]: which ring entries hold records (the first `count`, by default `position`)."""
    number = state.position if count is None else count
    return jnp.arange(state.window, dtype=jnp.int32)[None, :] < number[:, None]


def decays(ring_log_decays: Array, live: Array) -> tuple[Array, Array]:
    """Decays up to the last live token.

    Args:
      ring_log_decays: [B, H, P] or [B, H, P, K], one log decay per token.
      live: bool [B, P].

    Returns:
      (Gamma_{1:l} of the boundary state [B, H, 1] or [B, H, K], Gamma_{j+1:l} of each record [B, H, P] or
      [B, H, P, K]); entries of dead records are meaningless and must be masked by the caller.
    """
    log_decays = ring_log_decays.astype(jnp.float32)
    live = live.reshape(live.shape[0], 1, live.shape[1], *(1,) * (log_decays.ndim - 3))
    log_decays = jnp.where(live, log_decays, jnp.float32(0))
    suffix = jnp.flip(jnp.cumsum(jnp.flip(log_decays, axis=2), axis=2), axis=2)  # sum of tokens j..l
    later = jnp.concatenate([suffix[:, :, 1:], jnp.zeros_like(suffix[:, :, :1])], axis=2)  # tokens j+1..l
    total = jnp.exp(suffix[:, :, 0])
    return (total[..., None] if total.ndim == 2 else total), jnp.exp(later)


def read_boundary(config: LeapConfig, state: LeapState, x: Array) -> Array:
    """S^_0^T x, residual codes and compensators.

    Args:
      x: [B, H, N, K] fp32.

    Returns:
      [B, H, N, V] fp32.
    """
    if state.column_scales is None:
        return jnp.sum(state.codes[:, :, None].astype(jnp.float32) * x[:, :, :, None], axis=-1)
    out = read_quantized(config, Quantized(state.codes, state.row_scales, state.column_scales), x)
    if state.compensator_keys is not None and state.compensator_values is not None:
        dots = jnp.einsum("bhnk,bhrk->bhnr", x, state.compensator_keys.astype(jnp.float32), precision=HIGHEST)
        out += jnp.einsum("bhnr,bhrv->bhnv", dots, state.compensator_values.astype(jnp.float32), precision=HIGHEST)
    return out


def read_records(state: LeapState, record_decay: Array, live: Array, x: Array) -> Array:
    """sum_j u_j (k_j . Gamma_{j+1:l} x) over the live records.

    Args:
      record_decay: Gamma_{j+1:l}, [B, H, P] or [B, H, P, K].
      live: bool [B, P].
      x: [B, G, N, K] fp32, N vectors per key head.

    Returns:
      [B, H, N, V] fp32.
    """
    keys = jnp.where(live[:, None, :, None], state.ring_keys.astype(jnp.float32), jnp.float32(0))
    values = jnp.where(live[:, None, :, None], state.ring_values.astype(jnp.float32), jnp.float32(0))
    scales = jnp.where(live[:, None, :], state.ring_scales, jnp.float32(0))
    if record_decay.ndim == 3:  # a scalar decay leaves the dot product to the key head
        dots = jnp.einsum("bgnk,bgpk->bgnp", x, keys, precision=HIGHEST)
        dots = repeat_key_heads(dots, state.num_heads, axis=1)
        weights = (record_decay * scales)[:, :, None]
        dots = dots * jnp.where(live[:, None, None, :], weights, jnp.float32(0))
    else:
        x, keys = (repeat_key_heads(a, state.num_heads, axis=1) for a in (x, keys))
        dots = jnp.einsum("bhnk,bhpk->bhnp", x, keys * record_decay, precision=HIGHEST) * scales[:, :, None]
    return jnp.einsum("bhnp,bhpv->bhnv", dots, values, precision=HIGHEST)


def read_window(config: LeapConfig, state: LeapState, x: Array) -> Array:
    """S_l^T x at the state's current position (eq. 10).

    Args:
      x: [B, G, N, K] fp32, N vectors per key head.

    Returns:
      [B, H, N, V] fp32.
    """
    live = live_records(state)
    boundary_decay, record_decay = decays(state.ring_log_decays, live)
    expanded = repeat_key_heads(x, state.num_heads, axis=1)
    out = read_boundary(config, state, expanded * boundary_decay[:, :, None])
    return out + read_records(state, record_decay, live, x)


def materialise(config: LeapConfig, state: LeapState) -> Array:
    """S_l itself, [B, H, K, V] fp32 (eq. 4): the boundary state decayed, plus the live records decayed."""
    if state.column_scales is None:
        dense = jnp.swapaxes(state.codes, -1, -2).astype(jnp.float32)
    else:
        dense = dequantize(config, Quantized(state.codes, state.row_scales, state.column_scales), state.key_dim)
    if state.compensator_keys is not None and state.compensator_values is not None:
        keys, values = (x.astype(jnp.float32) for x in (state.compensator_keys, state.compensator_values))
        dense += jnp.einsum("bhrk,bhrv->bhkv", keys, values, precision=HIGHEST)

    live = live_records(state)
    boundary_decay, record_decay = decays(state.ring_log_decays, live)
    record_decay = record_decay[..., None] if record_decay.ndim == 3 else record_decay
    mask = live[:, None, :, None]
    keys = repeat_key_heads(state.ring_keys.astype(jnp.float32), state.num_heads, axis=1)
    keys = jnp.where(mask, keys * record_decay, jnp.float32(0))
    values = jnp.where(mask, state.ring_values.astype(jnp.float32) * state.ring_scales[..., None], jnp.float32(0))
    return boundary_decay[..., None] * dense + jnp.einsum("bhpk,bhpv->bhkv", keys, values, precision=HIGHEST)
