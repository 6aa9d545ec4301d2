"""Orthonormal rows by Cholesky: `leapquant_jax.fit.orthonormal_rows` when every thread holds one entry of each row.

A worker's threads hold R values each, the entries of R rows at one index. Sums of products over all indices are formed
per warp, exchanged through shared memory once, and finished by every warp for itself, as is the R x R factorisation.
"""

import dataclasses

from pallas_kernels.lanes.value import Lanes, Value
from pallas_kernels.scales import power_of_two_scale

_SMALLEST_PIVOT = 1e-5  # coarser than leapquant_jax.fit: the passes of the fit round to fp16
_TINY = 1e-37  # squares below count as zero


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A corner of shared memory where the warps of a worker add up a few numbers; `lane` and `warp` of this thread."""

    lanes: Lanes
    place: int
    rank: int
    warps: int
    warp: Value
    lane: Value

    @staticmethod
    def floats(rank: int) -> int:
        """Per warp: a scale, and up to R (R + 1) / 2 sums, in whole vectors of 4."""
        return -(-(1 + rank * (rank + 1) // 2) // 4) * 4

    @staticmethod
    def bytes(rank: int, warps: int) -> int:
        return 4 * warps * Exchange.floats(rank)

    def sums(self, rows: list[Value], pairs: list[tuple[int, int]]) -> tuple[list[Value], Value, Value]:
        """(sum over all threads of rows[i] rows[j] / scale^2 for each pair, scale, 1 / scale); one barrier.

        The scale is the power of two above the largest magnitude, so that no square leaves fp32: each warp sums in
        units of its own, and the sums are brought to the largest unit when they meet.
        """
        lanes = self.lanes
        largest = lanes.abs(rows[0])
        for x in rows[1:]:
            largest = lanes.maximum(largest, lanes.abs(x))
        up, down = power_of_two_scale(lanes, lanes.warp_max(lanes.bits(largest)))
        rows = [x * down for x in rows]
        mine = lanes.shared(self.warp * (4 * self.floats(self.rank))) + self.place
        lanes.store(mine, [up], when=self.lane.equals(0))
        products = [rows[i] * rows[j] for i, j in pairs]
        for start in range(0, len(products), 16):
            self._add_up(products[start : start + 16], mine, 1 + start)
        lanes.barrier()

        parts = []
        for w in range(self.warps):
            place = lanes.shared(self.place + 4 * w * self.floats(self.rank))
            words = [lanes.floats(lanes.load(place + 4 * i, 4)) for i in range(0, 1 + len(pairs), 4)]
            parts.append([x for four in words for x in four])
        up = parts[0][0]
        for part in parts[1:]:
            up = lanes.maximum(up, part[0])
        _, down = power_of_two_scale(lanes, lanes.bits(up * 0.75))  # the scale of three quarters of 2^n is 2^n
        totals = [lanes.constant(0.0, "f32")] * len(pairs)
        for scale, *part in parts:
            ratio = scale * down
            ratio = ratio * ratio
            totals = [lanes.fma(x, ratio, total) for x, total in zip(part, totals, strict=False)]
        return totals, up, down

    def _add_up(self, values: list[Value], target, offset: int) -> None:
        """Sums up to 16 values over the warp and stores them from float `offset` on."""
        lanes = self.lanes
        levels = (len(values) - 1).bit_length()
        masks = (16, 8, 4, 2, 1)
        padded = values + [lanes.constant(0.0, "f32")] * (2**levels - len(values))
        [total] = lanes.scatter_sum(padded, masks[:levels])
        total = lanes.all_sum(total, masks[levels:])
        index = lanes.constant(0, "i32")
        for mask in masks[:levels]:
            index = index + index + lanes.select((self.lane & mask).equals(0), lanes.constant(0, "i32"), 1)
        writer = lanes.binary("and", (self.lane & (2 ** (5 - levels) - 1)).equals(0), index < len(values))
        lanes.store(target + index * 4 + 4 * offset, [total], when=writer)


def orthonormalise(exchange: Exchange, rows: list[Value]) -> list[Value]:
    """R orthonormal rows that span the given ones; a row that depends on the earlier ones becomes zero."""
    lanes, rank = exchange.lanes, len(rows)
    pairs = [(i, j) for i in range(rank) for j in range(i + 1)]
    totals, _, down = exchange.sums(rows, pairs)
    gram = dict(zip(pairs, totals, strict=True))
    length = [gram[i, i] for i in range(rank)]  # rows are taken at unit length, so that pivots are relative
    length = [lanes.select(x > _TINY, lanes.reciprocal_sqrt(x), 0.0) for x in length]
    lower: list[list[Value]] = []  # rows of the Cholesky factor, the diagonal inverted
    done: list[Value] = []
    for i in range(rank):
        entries: list[Value] = []
        for j in range(i):
            part = gram[i, j] * (length[i] * length[j])
            for m in range(j):
                part = part - entries[m] * lower[j][m]
            entries.append(part * lower[j][j])
        pivot = gram[i, i] * (length[i] * length[i])
        for e in entries:
            pivot = pivot - e * e
        usable = pivot > _SMALLEST_PIVOT
        inverse = lanes.select(usable, lanes.reciprocal_sqrt(lanes.select(usable, pivot, 1.0)), 0.0)
        row = rows[i] * down * length[i]
        for e, d in zip(entries, done, strict=True):
            row = row - e * d
        done.append(row * inverse)
        lower.append([*entries, inverse])
    return done


def row_norms(exchange: Exchange, rows: list[Value]) -> tuple[list[Value], Value, Value]:
    """(norm / scale of each row, scale, 1 / scale)."""
    squares, up, down = exchange.sums(rows, [(i, i) for i in range(len(rows))])
    return [exchange.lanes.sqrt(x) for x in squares], up, down
