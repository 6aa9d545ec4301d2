"""Small pure functions for judging one run against another."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike


def octave(values: np.ndarray) -> np.ndarray:
    """floor(log2(x)) of positive integers; 0 for anything below 2."""
    return np.floor(np.log2(np.maximum(values, 1))).astype(np.int64)


_RESAMPLES = 9999


def bootstrap_interval(per_stream: ArrayLike) -> tuple[float, float]:
    """A 95 % bootstrap interval of the mean over streams (percentile method).

    Tokens of one stream depend on each other, so whole streams are drawn again. With few streams it is too narrow.

    Args:
      per_stream: [N], one number per stream; for a difference of two methods, the paired differences.

    Returns:
      (low, high); (nan, nan) for fewer than two streams or non-finite numbers.
    """
    return ratio_interval(per_stream, np.ones(len(np.asarray(per_stream))))


def ratio_interval(sums: ArrayLike, counts: ArrayLike) -> tuple[float, float]:
    """A 95 % bootstrap interval of sum(sums) / sum(counts) over streams, which are drawn again as a whole.

    Args:
      sums: [N], the sum over a stream; for a difference of two methods, of the paired differences.
      counts: [N], what it is a sum over; streams without any do not count.

    Returns:
      (low, high); (nan, nan) for fewer than two streams or non-finite numbers.
    """
    sums, counts = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    sums, counts = sums[counts > 0], counts[counts > 0]
    if len(sums) < 2 or not np.isfinite(sums).all():
        return math.nan, math.nan
    drawn = _resamples(len(sums))
    return _middle(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))


def median_interval(per_stream: ArrayLike) -> tuple[float, float]:
    """A 95 % bootstrap interval of the median over streams, [N]; infinity is allowed. (nan, nan) for fewer than two."""
    values = np.asarray(per_stream, np.float64)
    if len(values) < 2 or np.isnan(values).any():
        return math.nan, math.nan
    return _middle(np.median(values[_resamples(len(values))], axis=1))


def _resamples(num_streams: int) -> np.ndarray:
    """int [R, N]: the streams of each resample, the same ones for every method."""
    return np.random.default_rng(0).integers(num_streams, size=(_RESAMPLES, num_streams))


def _middle(values: np.ndarray) -> tuple[float, float]:
    """The middle 95 %, without interpolation, which infinities would not survive."""
    ordered = np.sort(values)
    cut = round(0.025 * (len(ordered) - 1))
    return float(ordered[cut]), float(ordered[-1 - cut])


def bad_heads(errors: np.ndarray, *, factor: float = 5.0, floor: float = 0.01) -> Iterator[tuple[int, int, float]]:
    """Heads that stand far above the rest of their layer, so that an average would hide them.

    Args:
      errors: [L, H], the relative state error of every head.
      factor: How many times its layer's median head a bad one is.
      floor: Errors below this are never bad.

    Yields:
      (layer index, head, error over the layer's median), worst error first. A NaN or infinite error always counts.
    """
    finite = np.where(np.isfinite(errors), errors, np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        times = errors / np.median(finite, axis=1, keepdims=True)
    bad = ~np.isfinite(errors) | ((errors > floor) & (times >= factor))
    for layer, head in sorted(zip(*np.nonzero(bad), strict=True), key=lambda at: -finite[at]):
        yield int(layer), int(head), float(times[layer, head])


def measuring_positions(num_tokens: int, segment: int) -> list[int]:
    """Ends of segments at which states are compared: the first eight, four per octave, powers of two, and the last.

    So the number of points grows with the logarithm of the stream's length.
    """
    ends = range(segment, num_tokens + 1, segment)
    named = {1 << i for i in range(10, 40)} | {num_tokens}
    quarter = [math.floor(4 * math.log2(end)) for end in (segment, *ends)]
    return [end for i, end in enumerate(ends) if end <= 8 * segment or end in named or quarter[i + 1] > quarter[i]]
