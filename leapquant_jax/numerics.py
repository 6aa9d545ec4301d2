"""Number formats and the few numerical rules that every other module relies on.

Rounding is done *arithmetically*, not by a pair of casts: inside `jit` XLA may remove a bf16 round trip as excess
precision, and a "bf16 state" would silently be an fp32 one. A value that already lies on the grid of the narrow format
survives such an optimisation unchanged.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

# exp(-128) is exactly 0 in fp32: flooring a log decay here changes no result and keeps a full erase (-inf) finite.
LOG_DECAY_FLOOR = -128.0

# Sums over the state are fp32 whatever jax_default_matmul_precision says: TF32 would cost three decimal digits.
HIGHEST = jax.lax.Precision.HIGHEST


def l2norm(x: Array, eps: float = 1e-6) -> Array:
    """Normalises the last axis: `x / sqrt(sum(x^2) + eps)`, computed and returned in fp32.

    `eps` is added to the *sum* of squares, as the kernels of Qwen3.5 and Kimi Linear do; a zero vector gives zeros.

    Args:
      x: [..., K], any float dtype.
      eps: added under the root.

    Returns:
      [..., K] fp32.
    """
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + jnp.float32(eps))


def floor_log_decay(g: Array) -> Array:
    """fp32 log decay with `-inf` (full erase) and anything below `LOG_DECAY_FLOOR` replaced by the floor."""
    return jnp.maximum(g.astype(jnp.float32), jnp.float32(LOG_DECAY_FLOOR))


def round_to_grid(x: Array, dtype: DTypeLike) -> Array:
    """Rounds fp32 values to the nearest (ties to even) value of a narrower float format, still held in fp32.

    Subnormals are kept (where the backend does not flush fp32's own, below 1.2e-38, to zero); values beyond the largest
    finite one become inf, or saturate where the format has no inf.

    Args:
      x: any shape, fp32.
      dtype: float16, bfloat16, float8_e4m3fn or float32.
    """
    dtype = jnp.dtype(dtype)
    x = x.astype(jnp.float32)
    if dtype == jnp.dtype(jnp.float32):
        return x
    info = jnp.finfo(dtype)
    _, exponent = jnp.frexp(x)  # x = m 2^exponent, 0.5 <= |m| < 1
    step_exponent = jnp.maximum(exponent - 1, int(info.minexp)) - int(info.nmant)
    # Two factors keep 2^-step_exponent inside fp32's range. They are multiplied in, one after the other: XLA turns
    # x / a / b into x / (a b), which overflows for bfloat16 values below 1e-36.
    half = step_exponent // 2
    other = step_exponent - half
    units = jnp.round(x * _power_of_two(-half) * _power_of_two(-other))
    rounded = units * _power_of_two(half) * _power_of_two(other)
    largest = jnp.float32(float(info.max))
    if dtype == jnp.dtype(jnp.float8_e4m3fn):
        rounded = jnp.clip(rounded, -largest, largest)
    else:
        rounded = jnp.where(jnp.abs(rounded) > largest, jnp.sign(rounded) * jnp.float32(jnp.inf), rounded)
    return jnp.where(jnp.isfinite(x), rounded, x)


def round_and_store(x: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """Rounds once and returns both views of the result: `(stored in dtype, the same values in fp32)`."""
    value = round_to_grid(x, dtype)
    return value.astype(dtype), value


def power_of_two_scale(magnitude: Array) -> Array:
    """Smallest power of two s with `magnitude / s < 1` (1 where the magnitude is 0 or not finite).

    Args:
      magnitude: non-negative fp32, any shape.

    Returns:
      fp32 of the same shape. Dividing by it is exact, so a record of any size fits fp16 without losing a bit.
    """
    _, exponent = jnp.frexp(magnitude)
    usable = (magnitude > jnp.float32(0)) & jnp.isfinite(magnitude)
    return jnp.where(usable, _power_of_two(jnp.clip(exponent, -126, 127)), jnp.float32(1))


def _power_of_two(exponent: Array) -> Array:
    """Exact 2^exponent for integer exponents in [-126, 127], built from the bits (ldexp may round through exp2)."""
    bits = (jnp.clip(exponent, -126, 127).astype(jnp.int32) + 127) << 23
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def repeat_key_heads(x: Array, num_heads: int, axis: int) -> Array:
    """Repeats each key head for its `num_heads // num_key_heads` *consecutive* value heads (repeat, not tile)."""
    repeats = num_heads // x.shape[axis]
    return x if repeats == 1 else jnp.repeat(x, repeats, axis=axis)
