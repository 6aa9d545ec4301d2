"""One token inside a window: read, correct, record. Nothing is rounded but the record, and no state is written.

u_l = beta_l (v_l - S_{l-1}^T (exp(g_l) * k_l)),    o_l = S_l^T q_l                            (eq. 3, read by eq. 10)
"""

import dataclasses

import jax.numpy as jnp
from jax import Array

from leapquant_jax.config import LeapConfig
from leapquant_jax.numerics import floor_log_decay, power_of_two_scale, repeat_key_heads, round_and_store
from leapquant_jax.state import LeapState
from leapquant_jax.window import decays, live_records, read_boundary, read_records


def append(
    config: LeapConfig,
    state: LeapState,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    active: Array | None = None,
) -> tuple[LeapState, Array]:
    """Appends one record to every active row and reads the output after the write.

    The output uses the record as stored (rounded), so that reading the window again later gives the same value.

    Args:
      config, state: position < P in every row.
      q, k: [B, G, K]; v: [B, H, V]; g: [B, H] or [B, H, K]; beta: [B, H].
      active: bool [B] or None for all.

    Returns:
      (state with one more record in each active row, output [B, H, V] fp32, zero in inactive rows).
    """
    batch, num_heads = state.batch, state.num_heads
    q, k, v, beta = (x.astype(jnp.float32) for x in (q, k, v, beta))
    rows = jnp.arange(batch, dtype=jnp.int32)
    # An inactive row writes to entry P, which does not exist, so its write is dropped.
    entry = state.position if active is None else jnp.where(active, state.position, jnp.int32(state.window))

    def put(ring: Array, record: Array) -> Array:  # ring [B, heads, P, ...], record [B, heads, ...]
        return ring.at[rows, :, entry].set(record.astype(ring.dtype), mode="drop", unique_indices=True)

    # Decays now include this token's, for the old records and the boundary state alike.
    log_decays = put(state.ring_log_decays, floor_log_decay(g))
    boundary_decay, record_decay = decays(log_decays, live_records(state, state.position + 1))
    vectors = jnp.stack([k, q], axis=2)  # [B, G, 2, K]: both reads in one pass over the codes
    decayed = repeat_key_heads(vectors, num_heads, axis=1) * boundary_decay[:, :, None]
    read = read_boundary(config, state, decayed) + read_records(state, record_decay, live_records(state), vectors)

    stored_k, rounded_k = round_and_store(k, config.record_dtype)
    u = beta[..., None] * (v - read[:, :, 0])
    scale = power_of_two_scale(jnp.max(jnp.abs(u), axis=-1))
    stored_u, rounded_u = round_and_store(u / scale[..., None], config.record_dtype)
    own = repeat_key_heads(jnp.sum(rounded_k * q, axis=-1), num_heads, axis=1) * scale
    out = read[:, :, 1] + rounded_u * own[..., None]

    if active is not None:
        out = jnp.where(active[:, None, None], out, jnp.float32(0))
    advanced = jnp.ones((batch,), jnp.int32) if active is None else active.astype(jnp.int32)
    state = dataclasses.replace(
        state,
        ring_keys=put(state.ring_keys, stored_k),
        ring_values=put(state.ring_values, stored_u),
        ring_scales=put(state.ring_scales, scale),
        ring_log_decays=log_decays,
        position=state.position + advanced,
    )
    return state, out
