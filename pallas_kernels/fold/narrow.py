"""The fold kernel, narrow layout: four warps per 128 x 128 head, all of which finish the factors. Not yet run on a card.

The same mathematics and the same numbering trick as the wide layout (see there). Here a warp holds *all* value rows of 32
keys, a lane V/8 x 8 entries, so three heads fit a multiprocessor instead of two, sums over values stay inside a warp, and
nobody waits for a single warp's serial work: sums over keys, Gram matrices and column maxima meet in shared memory, where
every warp finishes them for itself. The state is kept in units of a power of four, which saves a pass of multiplications.
Emulated, checked for races and compiled for sm_90a; the wide layout stays the default until this one has been timed.
"""

import dataclasses

from pallas_kernels.fold.gram import Exchange, orthonormalise, row_norms
from pallas_kernels.lanes.value import Lanes, Pointer, Value
from pallas_kernels.scales import suffix_sums

_EXPLORE = 0.05  # as leapquant_jax.fit
_LARGEST_HALF = 65504.0
_SMALLEST_ROW, _SMALLEST_COLUMN = 1e-18, 1e-37  # as leapquant_jax.quantize
_TINY = 1e-37  # squares and magnitudes below count as zero
_ROUND = 12582912.0  # 1.5 2^23: adding it leaves the rounded integer in the low bits


@dataclasses.dataclass(frozen=True)
class NarrowSpec:
    """Static sizes: heads H, key heads G, K, V, window P, rank R; subspace iterations."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    window: int
    rank: int
    iterations: int = 1

    @property
    def warps(self) -> int:
        return self.key_dim // 32

    @property
    def threads(self) -> int:
        """Also V: where one thread finishes one value column."""
        return 32 * self.warps

    def places(self) -> dict[str, int]:
        """Byte offsets in shared memory, and the end."""
        k, v, r = self.key_dim, self.value_dim, self.rank
        sizes = dict(
            sums=4 * self.warps * r * v, keys=4 * r * k, values=4 * r * v, half_keys=2 * r * k, half_values=2 * r * v,
            columns=4 * v, exchange=Exchange.bytes(r, self.warps),
        )  # fmt: skip
        places, end = {}, 0
        for name, size in sizes.items():
            places[name], end = end, end + -(-size // 16) * 16
        return places | {"end": end}

    @property
    def shared_bytes(self) -> int:
        return self.places()["end"]


def narrow_program(
    spec: NarrowSpec, lanes: Lanes, rows, row_count, directions, position, ring_keys, ring_values, ring_scales,
    ring_log_decays, codes, row_scales, column_scales, compensator_keys, compensator_values,
) -> None:  # fmt: skip
    """Folds the batch rows `rows[:row_count[0]]` (int32); `directions` is `fit.start_directions`, the rest a `LeapState`."""
    heads, repeats, rank, warps = spec.heads, spec.heads // spec.key_heads, spec.rank, spec.warps
    key_dim, value_dim, window = spec.key_dim, spec.value_dim, spec.window
    tile = value_dim // 8  # value rows per lane
    places = spec.places()
    [row_total] = lanes.load(lanes.at(row_count))
    items = row_total * heads

    def look_up(item: Value) -> list[Value]:
        """Batch row of an item, and how many records it holds."""
        [row] = lanes.load(lanes.at(rows, item // heads, 4), when=item < items)
        [live] = lanes.load(lanes.at(position, row, 4))
        return [row, lanes.select(live < window, live, window)]

    def prefetch(item: Value, row: Value) -> None:
        """Brings most of an item into the L2 cache, a line of 128 bytes per thread."""
        head = row * heads + item % heads
        thread, wanted = lanes.thread_of(item), item < items
        for array, index, size in (
            (codes, head, value_dim * key_dim),
            (ring_values, head, 2 * window * value_dim),
            (ring_keys, head // repeats, 2 * window * key_dim),
            (compensator_keys, head, 2 * rank * key_dim),
            (compensator_values, head, 2 * rank * value_dim),
            (row_scales, head, 4 * key_dim),
        ):
            for start in range(0, size, spec.threads * 128):
                inside = lanes.binary("and", wanted, thread * 128 < size - start)
                lanes.prefetch(lanes.at(array, index, size) + (thread * 128 + start), when=inside)

    def fold(item: Value, carried: list[Value]) -> list[Value]:
        row, live = carried
        next_item = item + lanes.workers
        next_row, next_live = look_up(next_item)
        head = row * heads + item % heads
        key_head = head // repeats

        thread = lanes.thread_of(item)
        warp, lane = thread >> 5, thread & 31
        quad, line = lane & 3, lane >> 2
        first_value, first_key = line * tile, warp * 32 + quad * 8  # of the lane's part of the state
        # Which key a lane is left with after `scatter_sum` over the lanes with the same keys; likewise tile / 4 values.
        own_key = first_key + (((lane >> 4) & 1) * 4 + ((lane >> 3) & 1) * 2 + ((lane >> 2) & 1))
        own_value = first_value + (((lane >> 1) & 1) * 2 + (lane & 1)) * (tile // 4)
        exchange = Exchange(lanes, places["exchange"], rank, warps, warp, lane)

        key_factors = lanes.at(compensator_keys, head, 2 * rank * key_dim)
        value_factors = lanes.at(compensator_values, head, 2 * rank * value_dim)
        operands = _Operands(lanes, spec, warp, quad, line)

        # --- rebuild ---------------------------------------------------------------------------------------- eq. 4
        lane_live = lane < live
        [log_decay] = lanes.floats(lanes.load(lanes.at(ring_log_decays, head, 4 * window) + lane * 4, when=lane_live))
        [record_scale] = lanes.floats(lanes.load(lanes.at(ring_scales, head, 4 * window) + lane * 4, when=lane_live))
        row_scale = _read(lanes, lanes.at(row_scales, head, 4 * key_dim) + first_key * 4, 8)
        factor_keys = operands.factor_keys(key_factors)
        key_ring = lanes.at(ring_keys, key_head, 2 * window * key_dim)
        record_keys = [operands.rows(key_ring, j, live) for j in range(0, window, 8)]
        _start_basis(spec, lanes, directions, value_factors, places["values"], warp, lane)

        total, after = suffix_sums(lanes, log_decay, window, lane)
        whole = lanes.exp(total)
        weight = lanes.exp(after) * record_scale
        # The state is kept in units of a power of four near the heaviest record's weight: its fp16 key then loses nothing.
        root, per_root = _power_of_four_root(lanes, lanes.warp_max(lanes.bits(weight)))
        weight, whole = weight * per_root * per_root, whole * per_root * per_root
        high, low = operands.weighted(record_keys, weight)

        code_row = lanes.at(codes, head, value_dim * key_dim) + (first_value * key_dim + first_key)
        column_pointer = lanes.at(column_scales, head, 4 * value_dim)
        value_ring = lanes.at(ring_values, head, 2 * window * value_dim)
        tiles: list[list[list[Value]]] = []  # [m][n]: value rows 2m, 2m+1 and keys 2n, 2n+1 of the lane's part
        for start in range(0, tile, 8):  # eight value rows at a time, so that few operands wait in registers
            words = [lanes.load(code_row + (start + i) * key_dim, 2, once=True) for i in range(8)]
            scales = _read(lanes, column_pointer + (first_value + start) * 4, 8)
            part = [[[scales[0]] * 4 for _ in range(4)] for _ in range(4)]
            for i in range(8):
                flipped = [w ^ -0x7F7F7F80 for w in words[i]]  # 0x80808080: signed bytes to offset binary
                for kk in range(8):
                    magic = lanes.permute_bytes(flipped[kk // 4], lanes.constant(0x4B000000, "i32"), 0x7440 + kk % 4)
                    code = (lanes.from_bits(magic) - 8388736.0) * scales[i]
                    part[i // 2][kk // 2][2 * (i % 2) + kk % 2] = code * row_scale[kk]
            operands.add(part, operands.factor_values(value_factors, start), [factor_keys])
            part = [[[x * whole for x in four] for four in fours] for fours in part]
            for j in range(0, window, 16):
                over_v = operands.record_values(value_ring, start, j, live)
                operands.add(part, over_v, [high[j // 16], low[j // 16]])
            tiles += part
        # state[i][kk]: value row first_value + i, key first_key + kk
        state = [[tiles[i // 2][kk // 2][2 * (i % 2) + kk % 2] for kk in range(8)] for i in range(tile)]

        # --- fit: subspace iteration from the previous value factors ----------------------------------------- eq. 5
        def sum_over_values() -> list[Value]:
            """S y_r at the lane's own key, for each r; the basis y lies in shared memory."""
            result = []
            for r in range(rank):
                y = _read(lanes, lanes.shared(first_value * 4) + (places["values"] + 4 * r * value_dim), tile)
                sums = [state[0][kk] * y[0] for kk in range(8)]
                for i in range(1, tile):
                    sums = [lanes.fma(state[i][kk], y[i], sums[kk]) for kk in range(8)]
                result += lanes.scatter_sum(sums, (16, 8, 4))
            return result

        def sum_over_keys(x: list[Value]) -> list[Value]:
            """S^T x_r at the thread's own value, for each r, from x_r at the lanes' own keys."""
            for r in range(rank):
                lanes.store(lanes.shared(own_key * 4) + (places["keys"] + 4 * r * key_dim), [x[r]])
            lanes.warp_barrier()
            for r in range(rank):
                mine = _read(lanes, lanes.shared(first_key * 4) + (places["keys"] + 4 * r * key_dim), 8)
                sums = [state[i][0] * mine[0] for i in range(tile)]
                for kk in range(1, 8):
                    sums = [lanes.fma(state[i][kk], mine[kk], sums[i]) for i in range(tile)]
                place = lanes.shared((warp * (rank * value_dim) + own_value) * 4) + (places["sums"] + 4 * r * value_dim)
                lanes.store(place, lanes.scatter_sum(sums, (2, 1)))
            lanes.barrier()
            result = []
            for r in range(rank):
                parts = [(w * rank + r) * value_dim * 4 for w in range(warps)]
                parts = [lanes.floats(lanes.load(lanes.shared(thread * 4) + (places["sums"] + p)))[0] for p in parts]
                total = parts[0]
                for x_part in parts[1:]:
                    total = total + x_part
                result.append(total)
            return result

        lanes.barrier()
        prefetch(next_item, next_row)
        basis: list[Value] = []
        for _ in range(spec.iterations):
            x = orthonormalise(exchange, sum_over_values())
            basis = orthonormalise(exchange, sum_over_keys(x))
            for r, y in enumerate(basis):
                lanes.store(lanes.shared(thread * 4) + (places["values"] + 4 * r * value_dim), [y])
            lanes.barrier()
        x = sum_over_values()

        # --- both factors take the root of the norm, and are rounded (`leapquant_jax.fit._split_evenly`) ------------
        norms, up, down = row_norms(exchange, x)
        for r, norm in enumerate(norms):
            factor = lanes.minimum(lanes.sqrt(norm) * lanes.sqrt(up) * root, _LARGEST_HALF)
            key = x[r] * down * lanes.reciprocal(lanes.select(norm > _TINY, norm, 1.0)) * factor
            for new, index, size, pointer, place in (
                (key, own_key, key_dim, key_factors, "half_keys"),
                (basis[r] * factor, thread, value_dim, value_factors, "half_values"),
            ):
                word = lanes.pack_half(new, new)
                lanes.store_half(pointer + index * 2 + 2 * r * size, word)
                rounded = lanes.unpack_half(word)[0] * per_root
                lanes.store_half(
                    lanes.shared(index * 2) + (places[place] + 2 * r * size), lanes.pack_half(rounded, rounded)
                )
        lanes.barrier()

        # --- residual against the rounded compensators --------------------------------------------------------------
        tiles = [[[state[2 * m + c // 2][2 * n + c % 2] for c in range(4)] for n in range(4)] for m in range(tile // 2)]
        factor_keys = operands.factor_keys(lanes.shared(places["half_keys"]))
        for start in range(0, tile, 8):
            over_v = operands.factor_values(lanes.shared(places["half_values"]), start)
            over_v = [[w ^ -0x7FFF8000 for w in words] for words in over_v]  # 0x80008000: the signs
            operands.add(tiles[start // 2 : start // 2 + 4], over_v, [factor_keys])
        residual = [[tiles[i // 2][kk // 2][2 * (i % 2) + kk % 2] for kk in range(8)] for i in range(tile)]

        # --- row scales: c_k = sqrt(mean_v |R|) ---------------------------------------------------------------- eq. 7
        sums = [lanes.abs(residual[0][kk]) for kk in range(8)]
        for i in range(1, tile):
            sums = [s + lanes.abs(residual[i][kk]) for kk, s in enumerate(sums)]
        [total] = lanes.scatter_sum(sums, (16, 8, 4))
        new_row = lanes.sqrt(total * (1.0 / value_dim)) * root
        new_row = lanes.select(new_row < _SMALLEST_ROW, 1.0, new_row)
        lanes.store(lanes.at(row_scales, head, 4 * key_dim) + own_key * 4, [new_row])
        lanes.store(lanes.shared(own_key * 4) + places["keys"], [lanes.reciprocal(new_row) * root * root])
        lanes.warp_barrier()
        inverse = _read(lanes, lanes.shared(first_key * 4) + places["keys"], 8)
        residual = [[x * y for x, y in zip(xs, inverse, strict=True)] for xs in residual]

        # --- column scales: B_v = max_k |R / c| / 127 -----------------------------------------------------------------
        largest = []
        for xs in residual:
            top = lanes.abs(xs[0])
            for x_other in xs[1:]:
                top = lanes.maximum(top, lanes.abs(x_other))
            largest.append(top)
        largest = lanes.scatter_max(largest, (2, 1))
        lanes.store(lanes.shared((warp * value_dim + own_value) * 4) + places["sums"], largest)
        lanes.barrier()
        parts = [lanes.load(lanes.shared(thread * 4) + (places["sums"] + 4 * w * value_dim)) for w in range(warps)]
        top, *others = (lanes.floats(part)[0] for part in parts)
        for other in others:
            top = lanes.maximum(top, other)
        new_column = _divide_by_127(lanes, top)
        per_code = lanes.select(new_column > _SMALLEST_COLUMN, lanes.reciprocal(new_column), 0.0)
        lanes.store(column_pointer + thread * 4, [new_column])
        lanes.store(lanes.shared(thread * 4) + places["columns"], [per_code])
        lanes.barrier()

        # --- codes -------------------------------------------------------------------------------------------------------
        for i in range(0, tile, 4):
            per_codes = _read(lanes, lanes.shared(first_value * 4) + (places["columns"] + 4 * i), 4)
            for ii, per_code in enumerate(per_codes, start=i):
                bits = [lanes.bits(lanes.fma(x_entry, per_code, _ROUND)) for x_entry in residual[ii]]
                pairs = [lanes.permute_bytes(bits[kk], bits[kk + 1], 0x0040) for kk in range(0, 8, 2)]
                words = [
                    lanes.permute_bytes(pairs[0], pairs[1], 0x5410),
                    lanes.permute_bytes(pairs[2], pairs[3], 0x5410),
                ]
                lanes.store(code_row + ii * key_dim, words)
        return [next_row, next_live]

    lanes.for_items(items, look_up, fold)


class _Operands:
    """Fragments of 16 x 8 x 16 products whose accumulators are the lane's part of the state.

    Row `line` (+ 8) of a product is value row 2m (2m + 1) of the lane's part, column 2 quad (+ 1) its key 2n (2n + 1); a
    summation index is a compensator or a record. An operand over values is a list of register pairs per m, one over keys
    a list of registers per n; each pair or register stands for 8 summation indices.
    """

    def __init__(self, lanes: Lanes, spec: NarrowSpec, warp: Value, quad: Value, line: Value):
        self.lanes, self.spec, self.quad, self.line = lanes, spec, quad, line
        self.none = lanes.constant(0, "i32")
        # As a column of an operand over keys, the lane is key 8 (line / 2) + 2n + line % 2 of its warp.
        self.first_key = warp * 32 + (line >> 1) * 8
        self.half = lanes.select((line & 1).equals(0), lanes.constant(0x5410, "i32"), 0x7632)

    def rows(self, keys: Pointer, j: int, count: Value | int) -> list[list[Value]]:
        """Words of rows j + 2 quad and the next of a table of keys; rows from `count` on are zero."""
        index = [self.quad * 2 + (j + i) for i in range(2)]
        place = [keys + (i * self.spec.key_dim + self.first_key) * 2 for i in index]
        return [self.lanes.load(p, 4, when=i < count) for p, i in zip(place, index, strict=True)]

    def pairs(self, rows: list[list[Value]]) -> list[Value]:
        return [self.lanes.permute_bytes(rows[0][n], rows[1][n], self.half) for n in range(4)]

    def factor_keys(self, keys: Pointer) -> list[list[Value]]:
        return [[pair, self.none] for pair in self.pairs(self.rows(keys, 0, self.spec.rank))]

    def weighted(self, rows: list[list[list[Value]]], weight: Value) -> tuple[list[list[list[Value]]], ...]:
        """Keys of records times their weights (lane j holds that of record j), as a sum of two operands."""
        lanes = self.lanes
        high, low = ([[[] for _ in range(4)] for _ in range(-(-len(rows) // 2))] for _ in range(2))
        for index, two_rows in enumerate(rows):
            weights = [lanes.shuffle(weight, self.quad * 2 + (8 * index + i)) for i in range(2)]
            for n, word in enumerate(self.pairs(two_rows)):
                pair = [x * w for x, w in zip(lanes.unpack_half(word), weights, strict=True)]
                top = lanes.pack_half(pair[0], pair[1])
                rest = [x - h for x, h in zip(pair, lanes.unpack_half(top), strict=True)]
                high[index // 2][n].append(top)
                low[index // 2][n].append(lanes.pack_half(rest[0], rest[1]))
        if len(rows) % 2:
            for n in range(4):
                high[-1][n].append(self.none)
                low[-1][n].append(self.none)
        return high, low

    def _over_values(self, values: Pointer, start: int, j: int, count: Value | int) -> list[list[Value]]:
        index = [self.quad * 2 + (j + i) for i in range(2)]
        row = self.line * (self.spec.value_dim // 8) + start
        place = [values + (i * self.spec.value_dim + row) * 2 for i in index]
        a, b = (self.lanes.load(p, 4, when=i < count) for p, i in zip(place, index, strict=True))
        return [[self.lanes.permute_bytes(a[m], b[m], picks) for picks in (0x5410, 0x7632)] for m in range(4)]

    def factor_values(self, values: Pointer, start: int) -> list[list[Value]]:
        return [[*pair, self.none, self.none] for pair in self._over_values(values, start, 0, self.spec.rank)]

    def record_values(self, ring: Pointer, start: int, j: int, live: Value) -> list[list[Value]]:
        first = self._over_values(ring, start, j, live)
        if j + 8 >= self.spec.window:
            return [[*pair, self.none, self.none] for pair in first]
        return [a + b for a, b in zip(first, self._over_values(ring, start, j + 8, live), strict=True)]

    def add(
        self, tiles: list[list[list[Value]]], over_values: list[list[Value]], over_keys: list[list[list[Value]]]
    ) -> None:
        """Adds the products of one operand over values with each of those over keys to four rows of tiles, in place."""
        for m in range(4):
            for n in range(4):
                for operand in over_keys:
                    tiles[m][n] = self.lanes.mma_f16(tiles[m][n], over_values[m], operand[n])


def _start_basis(
    spec: NarrowSpec, lanes: Lanes, directions, value_factors: Pointer, target: int, warp: Value, lane: Value
) -> None:
    """`leapquant_jax.fit._start`, a row per warp, into shared memory."""
    value_dim, per_lane = spec.value_dim, spec.value_dim // 32
    every = (1, 2, 4, 8, 16)
    for r0 in range(0, spec.rank, spec.warps):
        r = warp + r0
        with lanes.when(r < spec.rank):
            entry = r * value_dim + lane * per_lane
            old = [x for w in lanes.load(value_factors + entry * 2, per_lane // 2) for x in lanes.unpack_half(w)]
            fixed = lanes.floats(lanes.load(lanes.at(directions) + entry * 4, per_lane))
            largest = lanes.abs(old[0])
            for x in old[1:]:
                largest = lanes.maximum(largest, lanes.abs(x))
            largest = lanes.all_max(largest, every)
            inverse = lanes.reciprocal(lanes.select(largest > _TINY, largest, 1.0))
            old = [x * inverse for x in old]
            squared = old[0] * old[0]
            for x in old[1:]:
                squared = lanes.fma(x, x, squared)
            squared = lanes.all_sum(squared, every)
            inverse = lanes.select(squared > _TINY, lanes.reciprocal_sqrt(squared), 0.0)
            new = [lanes.fma(f, _EXPLORE, x * inverse) for f, x in zip(fixed, old, strict=True)]
            lanes.store(lanes.shared(entry * 4) + target, new)


def _power_of_four_root(lanes: Lanes, bits: Value) -> tuple[Value, Value]:
    """(2^n, 2^-n) with 4^n at most twice, and at least half, the non-negative f32 with these bits; 1 if that is 0 or NaN."""
    n = ((bits >> 23) + 1) >> 1  # biased exponent e + 127, halved: n - 64 is about e / 2
    plain = lanes.binary("or", bits.equals(0), bits >= 0x7F800000)
    n = lanes.select(plain, 64, n)
    return lanes.from_bits((n + 63) << 23), lanes.from_bits((191 - n) << 23)


def _read(lanes: Lanes, pointer: Pointer, count: int) -> list[Value]:
    """`count` (a multiple of 4) consecutive f32."""
    return [x for i in range(0, count, 4) for x in lanes.floats(lanes.load(pointer + 4 * i, 4))]


def _divide_by_127(lanes: Lanes, x: Value) -> Value:
    """x / 127, correctly rounded, without a division: one Newton step on the quotient."""
    quotient = x * (1.0 / 127.0)
    return lanes.fma(lanes.fma(quotient, -127.0, x), 1.0 / 127.0, quotient)
