"""The baselines: a dense state rounded after *every* token (eq. 2), in the formats serving engines offer.

S_t = Diag(exp g_t) S^_{t-1} + k_t u_t^T,    S^_t = quant(S_t)
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from leapquant_jax.exact import exact_step
from leapquant_jax.numerics import round_to_grid
from leapquant_jax.packing import pack, packed_dtype, packed_size, unpack

Format = Literal["bfloat16", "float16", "float8_e4m3fn", "int8", "int4"]

# Largest magnitude of the formats that need a scale (one per value column); the 16-bit floats are stored as they are.
_LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0, "int4": 7.0}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundedState:
    """A dense state in a narrow format.

    Attributes:
      values: [B, H, V, K] in the format; uint8 [B, H, V, ceil(K / 2)] for int4, packed. Value-major, as LeapState.
      column_scales: fp32 [B, H, V], or None for the formats stored without a scale.
    """

    values: Array
    column_scales: Array | None


def round_dense(dense: Array, format: Format) -> RoundedState:
    """Rounds [B, H, K, V] fp32 to nearest, ties to even."""
    value_major = jnp.swapaxes(dense, -1, -2)
    if format not in _LARGEST:
        return RoundedState(round_to_grid(value_major, format).astype(format), None)
    largest = jnp.float32(_LARGEST[format])
    scales = jnp.max(jnp.abs(value_major), axis=-1) / largest
    usable = scales > jnp.float32(1e-37)
    scaled = value_major / jnp.where(usable, scales, jnp.float32(1))[..., None]
    scaled = jnp.where(usable[..., None], scaled, jnp.float32(0))
    if format == "float8_e4m3fn":
        return RoundedState(round_to_grid(scaled, format).astype(format), scales)
    codes = jnp.clip(jnp.round(scaled), -largest, largest)
    codes = jnp.where(jnp.isnan(codes), jnp.float32(0), codes).astype(jnp.int8)
    return RoundedState(pack(codes, 8 if format == "int8" else 4), scales)


def dense_values(state: RoundedState, format: Format, key_dim: int) -> Array:
    """[B, H, K, V] fp32."""
    values = unpack(state.values, 4, key_dim) if format == "int4" else state.values
    values = values.astype(jnp.float32)
    if state.column_scales is not None:
        values = values * state.column_scales[..., None]
    return jnp.swapaxes(values, -1, -2)


def zeros(format: Format, *, batch: int, num_heads: int, key_dim: int, value_dim: int) -> RoundedState:
    """The empty memory."""
    size, dtype = (packed_size(key_dim, 4), packed_dtype(4)) if format == "int4" else (key_dim, jnp.dtype(format))
    scales = jnp.zeros((batch, num_heads, value_dim), jnp.float32) if format in _LARGEST else None
    return RoundedState(jnp.zeros((batch, num_heads, value_dim, size), dtype), scales)


def rounded_step(
    format: Format,
    state: RoundedState,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    active: Array | None = None,
) -> tuple[RoundedState, Array]:
    """One token of `exact_step` on the stored state, then one rounding; the output is read before it.

    Shapes as `exact_step`. An inactive row keeps every bit.
    """
    dense, out = exact_step(dense_values(state, format, q.shape[-1]), q, k, v, g, beta, active=active)
    new = round_dense(dense, format)
    if active is not None:
        new = jax.tree.map(lambda a, b: jnp.where(active.reshape(-1, *(1,) * (a.ndim - 1)), a, b), new, state)
    return new, out
