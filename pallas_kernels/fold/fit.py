"""The passes of the subspace iteration on the tensor cores (`leapquant_jax.fit`)."""

from pallas_kernels.fold.operands import Place, Tiles, row_bytes
from pallas_kernels.fold.spec import FoldSpec
from pallas_kernels.lanes.value import Lanes, Pointer, Value

_EXPLORE = 0.05  # as leapquant_jax.fit
_TINY = 1e-37  # squares below count as zero
_ALL_LANES = (1, 2, 4, 8, 16)


class Fit:
    """The passes of the subspace iteration, and where their bases lie in shared memory (fp16).

    A basis over keys or over values is the second operand of a product, its column r; columns from R on hold anything.

    Each pass rounds the state in a way of its own: to nearest, towards zero (which scales a basis, no more), to nearest
    with neighbours swapped. Were two alike, the compiler would keep the 64 packed words of one for the other, and spill.
    """

    def __init__(self, lanes: Lanes, spec: FoldSpec, place: Place):
        self.lanes, self.spec, self.place = lanes, spec, place
        self.places = spec.places()

    def start(self, directions, value_factors: Pointer) -> None:
        """`leapquant_jax.fit._start`, a row per warp (any basis of the same span does; squares of fp16 fit fp32)."""
        lanes, spec, place = self.lanes, self.spec, self.place
        per_lane = spec.value_dim // 32
        for r0 in range(0, spec.rank, spec.warps):
            r = place.warp + r0
            with lanes.when(r < spec.rank):
                entry = place.lane * per_lane
                mine = value_factors + (r * row_bytes(spec.value_dim) + entry * 2)
                old = [x for w in lanes.load(mine, per_lane // 2) for x in lanes.unpack_half(w)]
                fixed = lanes.floats(lanes.load(lanes.at(directions) + (r * spec.value_dim + entry) * 4, per_lane))
                squared = old[0] * old[0]
                for x in old[1:]:
                    squared = lanes.fma(x, x, squared)
                squared = lanes.all_sum(squared, _ALL_LANES)
                inverse = lanes.select(squared > _TINY, lanes.reciprocal_sqrt(squared), 0.0)
                for i, (f, x) in enumerate(zip(fixed, old, strict=True)):
                    y = lanes.fma(f, _EXPLORE, x * inverse)
                    target = self._value_place(place.line, (place.lane & 3) * per_lane + i)
                    lanes.store_half(target + r * (4 * spec.basis_words), lanes.pack_half(y, y))

    def store_basis(self, rows: list[Value]) -> None:
        """Makes y_r, an entry per thread, the basis of `sum_over_values`."""
        thread, tile = self.place.thread, self.spec.tile
        target = self._value_place(thread // tile, thread % tile)
        for r, y in enumerate(rows):
            self.lanes.store_half(target + 4 * r * self.spec.basis_words, self.lanes.pack_half(y, y))

    def _value_place(self, line: Value, i: Value) -> Pointer:
        """Of value row i of a line: word i of lane line / 2 holds it and that of the next line, as a product wants them."""
        byte = (line >> 1) * (4 * (self.spec.tile + 4)) + i * 4 + (line & 1) * 2
        return self.lanes.shared(byte) + self.places["value_basis"]

    def sum_over_values(self, tiles: Tiles, swapped: bool = False) -> list[Value]:
        """S y_r at key `thread`, for each r."""
        lanes, spec, place = self.lanes, self.spec, self.place
        column = lanes.shared(place.line * (4 * spec.basis_words) + place.quad * (4 * (spec.tile + 4)))
        # [q][m % 2]: rows are the keys of n = 2q, then those of n = 2q + 1; two sums each, so that products overlap
        sums = [[[lanes.constant(0.0, "f32")] * 4 for _ in range(2)] for _ in range(2)]
        for start in range(0, spec.tile // 2, 2):
            y = lanes.load(column + (self.places["value_basis"] + 8 * start), 4)
            for m in (start, start + 1):
                y_pair = y[2 * (m - start) : 2 * (m - start) + 2]
                for q in range(2):
                    fours = tiles[m][2 * q : 2 * q + 2]
                    halves = [(four[2 * i + swapped], four[2 * i + 1 - swapped]) for i in range(2) for four in fours]
                    halves = [lanes.pack_half(*pair) for pair in halves]
                    turned = [lanes.transpose_halves(word) for word in halves]
                    sums[q][m % 2] = lanes.mma_f16(sums[q][m % 2], turned, y_pair)
        key = place.warp * 32 + (place.line >> 1) * 8 + ((place.line & 1) ^ int(swapped))
        stride = 4 * (spec.key_dim + 1)
        for n in range(4):
            for c in range(2):
                r = place.quad * 2 + c
                target = lanes.shared(r * stride + key * 4) + (self.places["keys"] + 8 * n)
                even, odd = (part[2 * (n % 2) + c] for part in sums[n // 2])
                lanes.store(target, [even + odd], when=r < spec.rank)
        lanes.warp_barrier()
        mine = lanes.shared(place.thread * 4) + self.places["keys"]
        return [lanes.floats(lanes.load(mine + r * stride))[0] for r in range(spec.rank)]

    def sum_over_keys(self, tiles: Tiles, x: list[Value]) -> list[Value]:
        """S^T x_r at value `thread`, for each r, from x_r at key `thread`; one barrier."""
        lanes, spec, place = self.lanes, self.spec, self.place
        basis = self.places["key_basis"]
        for r in range(spec.rank):
            target = lanes.shared(place.warp * 512 + place.lane * 2) + (basis + 64 * r)
            lanes.store_half(target, lanes.pack_half(x[r], x[r]))
        lanes.warp_barrier()
        words = lanes.load(lanes.shared(place.warp * 512 + place.line * 64 + place.quad * 16) + basis, 4)
        stride = 4 * (spec.value_dim + 4)
        for start in range(0, spec.tile // 2, 2):
            entries: list[list[Value]] = [[], []]  # of r = 2 quad and the next, at four value rows
            for fours in tiles[start : start + 2]:
                sums = [lanes.constant(0.0, "f32")] * 4
                for p in range(2):
                    pair = fours[2 * p : 2 * p + 2]
                    a, b = ([lanes.pack_half_down(*four[2 * i : 2 * i + 2]) for i in range(2)] for four in pair)
                    sums = lanes.mma_f16(sums, [*a, *b], words[2 * p : 2 * p + 2])
                for c in range(2):
                    entries[c] += [sums[c], sums[2 + c]]
            for c in range(2):
                r = place.quad * 2 + c
                first = (place.warp * spec.rank + r) * stride + place.line * (4 * spec.tile)
                lanes.store(lanes.shared(first) + (self.places["sums"] + 8 * start), entries[c], when=r < spec.rank)
        lanes.barrier()
        result = []
        for r in range(spec.rank):
            mine = lanes.shared(place.thread * 4) + self.places["sums"]
            parts = [lanes.floats(lanes.load(mine + (w * spec.rank + r) * stride))[0] for w in range(spec.warps)]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            result.append(total)
        return result
