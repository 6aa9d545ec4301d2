"""Small pieces both kernels share; each equals a function of `leapquant_jax` named in it."""

from pallas_kernels.lanes.value import Lanes, Value


def power_of_two_scale(lanes: Lanes, largest: Value) -> tuple[Value, Value]:
    """(s, 1 / s) of `leapquant_jax.numerics.power_of_two_scale`, from the bits of a non-negative f32."""
    exponent = largest >> 23
    plain = lanes.binary("or", largest.equals(0), exponent.equals(255))
    up = lanes.select(exponent < 253, exponent + 1, 254) << 23
    down = lanes.select(exponent < 253, (253 - exponent) << 23, 0x400000)
    up, down = (lanes.from_bits(lanes.select(plain, 0x3F800000, x)) for x in (up, down))
    return up, down


def suffix_sums(lanes: Lanes, log_decay: Value, window: int, lane: Value) -> tuple[Value, Value]:
    """`leapquant_jax.window.decays` before the exponential: (sum of all, sum of the records after the lane's own).

    Lane l holds the log decay of record l, 0 where there is none; a tree over the lanes adds them up.
    """
    suffix = log_decay
    for distance in (1, 2, 4, 8, 16)[: (window - 1).bit_length()]:
        later = lanes.shuffle(suffix, lane + distance)
        suffix = suffix + lanes.select(lane < 32 - distance, later, 0.0)
    after = lanes.select(lane < window - 1, lanes.shuffle(suffix, lane + 1), 0.0)
    return lanes.shuffle(suffix, 0), after
