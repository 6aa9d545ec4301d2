"""Small pure functions for judging one run against another."""

import math
import warnings
from collections.abc import Iterator

import numpy as np


def octave(values: np.ndarray) -> np.ndarray:
    """floor(log2(x)) of positive integers; 0 for anything below 2."""
    return np.floor(np.log2(np.maximum(values, 1))).astype(np.int64)


def bootstrap_interval(per_stream: np.ndarray, *, confidence: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """A bootstrap interval of the mean over streams (percentile method).

    Tokens of one stream depend on each other, so whole streams are drawn again.

    Args:
      per_stream: [N], one number per stream; for a difference of two methods, the paired differences.
      confidence: Probability that the interval is to hold.
      seed: Of the resampling.

    Returns:
      (low, high); (nan, nan) for fewer than two streams or non-finite numbers.
    """
    from scipy import stats  # here, because its import takes longer than anything else at the start of a run

    per_stream = np.asarray(per_stream, np.float64)
    if len(per_stream) < 2 or not np.isfinite(per_stream).all():
        return math.nan, math.nan
    if np.ptp(per_stream) == 0:
        return float(per_stream[0]), float(per_stream[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about few streams; the interval is then wide, which says it
        result = stats.bootstrap(
            (per_stream,), np.mean, confidence_level=confidence, n_resamples=9999, method="percentile", rng=seed
        )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def bad_heads(errors: np.ndarray, *, factor: float = 5.0, floor: float = 0.01) -> Iterator[tuple[int, int, float]]:
    """Heads that an average would hide.

    Args:
      errors: [L, H], the relative state error of every head.
      factor: How many times the median head a bad one is.
      floor: Errors below this are never bad.

    Yields:
      (layer index, head, error over the median head's), worst first. A NaN or infinite error always counts.
    """
    finite = errors[np.isfinite(errors)]
    median = float(np.median(finite)) if len(finite) else math.nan
    with np.errstate(divide="ignore", invalid="ignore"):
        times = errors / median
    bad = ~np.isfinite(errors) | ((errors > floor) & ~(times < factor))
    order = sorted(zip(*np.nonzero(bad), strict=True), key=lambda at: -np.nan_to_num(errors[at], nan=np.inf))
    for layer, head in order:
        yield int(layer), int(head), float(times[layer, head])


def measuring_positions(num_tokens: int, segment: int) -> list[int]:
    """Ends of segments at which states are compared: the first eight, four per octave, powers of two, and the last.

    So the number of points grows with the logarithm of the stream's length.
    """
    ends = range(segment, num_tokens + 1, segment)
    named = {1 << i for i in range(10, 40)} | {num_tokens}
    quarter = [math.floor(4 * math.log2(end)) for end in (segment, *ends)]
    return [end for i, end in enumerate(ends) if end <= 8 * segment or end in named or quarter[i + 1] > quarter[i]]
