"""What the ablation varies: the axes of the paper's Tables 2 and 3, and those beyond it. One point is one way to store a state."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import leapquant_jax as lq

BITS = (8, 6, 4)
RANKS = {8: 4, 6: 6, 4: 6}  # the paper's compensators at each width
BEYOND: dict[str, Any] = dict(rotation="hadamard", clip="mse")
# What the named methods of the library add to the paper's.
NAMED: dict[int, dict[str, Any]] = {
    8: dict(smoothing=1), 6: dict(smoothing=1, clip="mse"), 4: dict(smoothing=1, **BEYOND)
}  # fmt: skip


class Point(NamedTuple):
    """A method at a place of an axis.

    Attributes:
      axis: Name of the axis.
      labels: Where on it, as shown in a row of its table.
      method: What is measured.
      against: What its errors are compared with, head by head; None for nothing.
    """

    axis: str
    labels: tuple[str, ...]
    method: lq.Method
    against: lq.Method | None = None


def leap(bits: int = 8, **options: Any) -> lq.LeapMethod:
    """LeapQuant at a width with the paper's rank, and what differs from it; named by what differs."""
    config = lq.LeapConfig(**{"bits": bits, "rank": RANKS[bits], **options})
    return lq.LeapMethod(config, describe(config))


def describe(config: lq.LeapConfig) -> str:
    """A short name that tells configurations apart."""
    default = lq.LeapConfig(bits=config.bits or 8, rank=config.rank)
    changes = [
        f"{field.name}={getattr(config, field.name)}"
        for field in dataclasses.fields(config)
        if field.name not in ("bits", "rank") and getattr(config, field.name) != getattr(default, field.name)
    ]
    return ", ".join([f"int{config.bits}", f"rank={config.rank}", *changes])


def window_by_rank() -> list[Point]:
    """Table 3: how often to round, and how many compensators."""
    return [
        Point("window_by_rank", (str(window), str(rank)), leap(window=window, rank=rank), leap())
        for window in (1, 4, 8, 16, 32)
        for rank in (0, 1, 2, 4, 8, 16)
    ]


def parts() -> list[Point]:
    """Table 2: the parts one by one, at each width; each against the one before it."""
    result = []
    for bits in BITS:
        # The library has no 6-bit format that is rounded every token; a window of one is the same.
        step = leap(6, window=1, rank=0, smoothing=0) if bits == 6 else lq.get_method(f"step-int{bits}")
        chain = {
            "each token": step,
            "window": leap(bits, rank=0, smoothing=0),
            "+ compensators": leap(bits, smoothing=0),
            "+ smoothing": leap(bits),
            "+ exponent 1": leap(bits, smoothing=1),
            "+ clip": leap(bits, smoothing=1, clip="mse"),
            "+ rotation": leap(bits, smoothing=1, **BEYOND),
        }
        methods = [None, *chain.values()]
        result += [
            Point("parts", (str(bits), name), method, before)
            for (name, method), before in zip(chain.items(), methods, strict=False)
        ]
    return result


def records() -> list[Point]:
    """The number format of the ring, and of the compensators with it."""
    result = []
    for bits in BITS:
        for dtype in ("float32", "float16", "bfloat16"):
            result.append(Point("records", (str(bits), dtype, "float16"), leap(bits, record_dtype=dtype), leap(bits)))
        both = leap(bits, record_dtype="bfloat16", compensator_dtype="bfloat16")
        result.append(Point("records", (str(bits), "bfloat16", "bfloat16"), both, leap(bits)))
    return result


def fits() -> list[Point]:
    """Where the fit of the compensators starts, and how long it goes on; each fold refits, so that the fit is all."""
    free = functools.partial(leap, refit_gain=0)
    svd = free(fit="svd")
    grid = [
        Point("fits", (start, str(count)), free(fit=fit, fit_iterations=count), svd)
        for start, fit in (("warm", "subspace"), ("cold", "cold"))
        for count in (1, 2, 4)
    ]
    return [*grid, Point("fits", ("svd", ""), svd, svd)]


def smoothing() -> list[Point]:
    """The exponent of the key rows' mean magnitude, alone and under a rotation."""
    return [
        Point("smoothing", (str(bits), how, str(exponent)), leap(bits, smoothing=exponent, **more), leap(bits, **more))
        for bits, how, more in ((8, "plain", {}), (8, "rotation + clip", BEYOND), (4, "rotation + clip", BEYOND))
        for exponent in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]


def rotation_and_clip() -> list[Point]:
    """At which widths a rotation of the key rows and a clipped scale help."""
    return [
        Point(
            "rotation_and_clip", (str(bits), rotation or "none", clip or "none"),
            leap(bits, rotation=rotation, clip=clip), leap(bits),
        )
        for bits in BITS
        for rotation in (None, "hadamard")
        for clip in (None, "mse")
    ]  # fmt: skip


def refit_gain() -> list[Point]:
    """How much better new compensators have to be before they replace the old ones."""
    return [
        Point("refit_gain", (str(bits), str(gain)), leap(bits, refit_gain=gain, **more), leap(bits, **more))
        for bits, more in ((8, NAMED[8]), (4, NAMED[4]))
        for gain in (0.0, 0.005, 0.02, 0.05, 0.1, 0.2)
    ]


def equal_bytes() -> list[Point]:
    """Ways to spend the bytes of each of the paper's three methods (128 x 128, at rest)."""
    budgets = {
        "12,288": {
            "4 bits, rank 6": leap(4),
            "with clip": leap(4, clip="mse"),
            "with rotation + clip": leap(4, **BEYOND),
            "with rotation + clip, exponent 1": leap(4, **NAMED[4]),
            "with rotation + clip, rank 7, no smoothing": leap(4, rank=7, smoothing=0, **BEYOND),
        },
        "16,384": {
            "6 bits, rank 6": leap(6),
            "with clip, exponent 1": leap(6, **NAMED[6]),
            "with rotation + clip": leap(6, **BEYOND),
            "4 bits, rank 14, rotation + clip": leap(4, rank=14, **BEYOND),
        },
        "19,456": {
            "8 bits, rank 4": leap(8),
            "with exponent 1": leap(8, **NAMED[8]),
            "with rotation + clip": leap(8, **BEYOND),
            "6 bits, rank 12, rotation + clip": leap(6, rank=12, **BEYOND),
        },
    }
    return [
        Point("equal_bytes", (budget, name), method, next(iter(ways.values())))
        for budget, ways in budgets.items()
        for name, method in ways.items()
    ]


AXES: dict[str, Callable[[], list[Point]]] = {
    axis.__name__: axis
    for axis in (
        parts, window_by_rank, rotation_and_clip, equal_bytes, records, fits, smoothing, refit_gain,
    )
}  # fmt: skip


def long_methods() -> list[lq.Method]:
    """Those whose stability over very many folds is in question."""
    return [
        lq.get_method("window-bf16"), leap(8), leap(8, **NAMED[8]), leap(8, **BEYOND), leap(6), leap(6, **NAMED[6]),
        leap(4), leap(4, clip="mse"), leap(4, rotation="hadamard"), leap(4, **BEYOND), leap(4, **NAMED[4]),
        leap(4, refit_gain=0, **BEYOND), leap(4, refit_gain=0.1, **BEYOND),
    ]  # fmt: skip
