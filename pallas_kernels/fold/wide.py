"""The fold kernel, wide layout: eight warps per 128 x 128 head, one of which finishes the factors. Run on the card.

    S = Gamma (Diag(c) (Z * B) + sum_r k~_r u~_r^T) + sum_j w_j k_j u_j^T                                    (eq. 4)
    S ~ sum_r k~_r u~_r^T + R,    R ~ Diag(c) (Z * B)                                                       (eqs. 5, 7)

The fp32 state lies in a worker's registers: a warp holds V/2 value rows x 32 keys, a lane V/16 x 8 consecutive entries.
That is exactly an accumulator of 16 x 8 matrix products once their rows and columns are numbered to suit (the numbering
inside a product is free), so rank-R parts are added and subtracted by the tensor cores, the codes arrive and leave as 8
consecutive bytes, and a pass of the fit is multiply-adds over registers and a few shuffles. Only factors (R x K and
R x V) and row statistics cross warps, through shared memory.

Sums of products are fp32-accurate throughout: fp16 factors are exact operands of the tensor cores, and a record's weight
is folded into its key as a sum of two fp16.
"""

import dataclasses
from typing import NamedTuple

from pallas_kernels.lanes.value import Lanes, Pointer, Value
from pallas_kernels.scales import power_of_two_scale, suffix_sums

_SMALLEST_PIVOT = 1e-5  # as leapquant_jax.fit
_EXPLORE = 0.05
_LARGEST_HALF = 65504.0
_SMALLEST_ROW, _SMALLEST_COLUMN = 1e-18, 1e-37  # as leapquant_jax.quantize
_TINY = 1e-37  # squares and magnitudes below count as zero
_ROUND = 12582912.0  # 1.5 2^23: adding it leaves the rounded integer in the low bits


@dataclasses.dataclass(frozen=True)
class WideSpec:
    """Static sizes: heads H, key heads G, K, V, window P, rank R; subspace iterations."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    window: int
    rank: int
    iterations: int = 1
    over_values: int = 2  # warps side by side over the value rows
    unroll: int = 4  # compensators per turn of the fit's loops

    @property
    def warps_over_keys(self) -> int:
        return self.key_dim // 32

    @property
    def threads(self) -> int:
        return 32 * self.over_values * self.warps_over_keys

    @property
    def partial_bytes(self) -> int:
        parts = max(self.over_values * self.key_dim, self.warps_over_keys * self.value_dim)
        return 4 * parts * max(self.rank, 2)

    @property
    def shared_bytes(self) -> int:
        """Unfinished sums; key and value factors in fp32; the same in fp16."""
        return self.partial_bytes + 6 * self.rank * (self.key_dim + self.value_dim)


class _Records(NamedTuple):
    """Two neighbouring records as operands: their indices, the words of their keys and values."""

    indices: list[Value]
    keys: list[list[Value]]
    values: list[list[Value]]


def wide_program(
    spec: WideSpec, lanes: Lanes, rows, row_count, directions, position, ring_keys, ring_values, ring_scales,
    ring_log_decays, codes, row_scales, column_scales, compensator_keys, compensator_values,
) -> None:  # fmt: skip
    """Folds the batch rows `rows[:row_count[0]]` (int32); `directions` is `fit.start_directions`, the rest a `LeapState`."""
    heads, repeats, rank = spec.heads, spec.heads // spec.key_heads, spec.rank
    key_dim, value_dim, window = spec.key_dim, spec.value_dim, spec.window
    over_keys, over_values = spec.warps_over_keys, spec.over_values
    warps = over_values * over_keys
    tile = value_dim // (8 * over_values)  # value rows per lane
    value_words = tile // 2
    factor_keys = spec.partial_bytes
    factor_values = factor_keys + 4 * rank * key_dim
    half_keys = factor_values + 4 * rank * value_dim
    half_values = half_keys + 2 * rank * key_dim

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
            inside = lanes.binary("and", wanted, thread * 128 < size)
            lanes.prefetch(lanes.at(array, index, size) + thread * 128, when=inside)

    def fold(item: Value, carried: list[Value]) -> list[Value]:
        row, live = carried
        next_item = item + lanes.workers
        next_row, next_live = look_up(next_item)
        thread = lanes.thread_of(item)
        warp, lane = thread >> 5, thread & 31
        quad, line = lane & 3, lane >> 2
        value_warp, key_warp = warp // over_keys, warp & (over_keys - 1)
        first_value = value_warp * (value_dim // over_values) + line * tile  # of the lane's tile
        first_key = key_warp * 32 + quad * 8
        # In a product's operand over keys the lane stands for column `line`, which is key 8 (line / 2) + 2n + line % 2.
        operand_key = key_warp * 32 + (line >> 1) * 8
        # After `scatter_sum` over the lanes with the same keys (values), the entry this lane is left with, and its last ones.
        own_key = first_key + (((lane >> 4) & 1) * 4 + ((lane >> 3) & 1) * 2 + ((lane >> 2) & 1))
        own_value = first_value + (((lane >> 1) & 1) * 2 + (lane & 1)) * (tile // 4)
        own_half = lanes.select((line & 1).equals(0), lanes.constant(0x5410, "i32"), 0x7632)

        head = row * heads + item % heads
        key_head = head // repeats

        def value_operand(row_a: list[Value], row_b: list[Value], m: int) -> list[Value]:
            """Rows 2m, 2m+1 of the tile at two neighbouring summation indices."""
            return [lanes.permute_bytes(row_a[m], row_b[m], picks) for picks in (0x5410, 0x7632)]

        def factors(keys: Pointer, values: Pointer) -> tuple[list[Value], list[list[Value]]]:
            """Operands of one product with all R compensators: per n over keys, per m over values."""
            pair = [quad * 2 + i for i in range(2)]
            k_rows = [lanes.load(keys + (r * key_dim + operand_key) * 2, 4, when=r < rank) for r in pair]
            v_rows = [_load(lanes, values + (r * value_dim + first_value) * 2, value_words, r < rank) for r in pair]
            over_k = [lanes.permute_bytes(k_rows[0][n], k_rows[1][n], own_half) for n in range(4)]
            return over_k, [value_operand(v_rows[0], v_rows[1], m) for m in range(value_words)]

        zero, none = lanes.constant(0.0, "f32"), lanes.constant(0, "i32")

        def add_factors(tiles: list[list[list[Value]]], over_k: list[Value], over_v: list[list[Value]]) -> None:
            for m in range(value_words):
                for n in range(4):
                    tiles[m][n] = lanes.mma_f16(tiles[m][n], [*over_v[m], none, none], [over_k[n], none])

        def start_basis() -> None:
            """`leapquant_jax.fit._start`: a row per warp."""
            per_lane = value_dim // 32
            for r0 in range(0, rank, warps):
                r = warp + r0
                with lanes.when(r < rank):
                    place = (r * value_dim + lane * per_lane) * 4
                    words = lanes.load(value_factors + (r * value_dim + lane * per_lane) * 2, per_lane // 2)
                    old = [x for w in words for x in lanes.unpack_half(w)]
                    largest = lanes.abs(old[0])
                    for x in old[1:]:
                        largest = lanes.maximum(largest, lanes.abs(x))
                    largest = lanes.all_max(largest, (1, 2, 4, 8, 16))
                    inverse = lanes.reciprocal(lanes.select(largest > _TINY, largest, 1.0))
                    old = [x * inverse for x in old]
                    squared = old[0] * old[0]
                    for x in old[1:]:
                        squared = lanes.fma(x, x, squared)
                    squared = lanes.all_sum(squared, (1, 2, 4, 8, 16))
                    inverse = lanes.select(squared > _TINY, lanes.reciprocal_sqrt(squared), 0.0)
                    fixed = lanes.floats(lanes.load(lanes.at(directions) + place, per_lane))
                    new = [lanes.fma(f, _EXPLORE, x * inverse) for f, x in zip(fixed, old, strict=True)]
                    lanes.store(lanes.shared(place) + factor_values, new)

        # --- rebuild: compensators, codes, decay ------------------------------------------------------------- eq. 4
        code_row = lanes.at(codes, head, value_dim * key_dim) + (first_value * key_dim + first_key)
        code_words = [lanes.load(code_row + i * key_dim, 2, once=True) for i in range(tile)]
        lane_live = lane < live
        [log_decay] = lanes.floats(lanes.load(lanes.at(ring_log_decays, head, 4 * window) + lane * 4, when=lane_live))
        [record_scale] = lanes.floats(lanes.load(lanes.at(ring_scales, head, 4 * window) + lane * 4, when=lane_live))
        key_factors = lanes.at(compensator_keys, head, 2 * rank * key_dim)
        value_factors = lanes.at(compensator_values, head, 2 * rank * value_dim)
        row_pointer = lanes.at(row_scales, head, 4 * key_dim) + first_key * 4
        column_pointer = lanes.at(column_scales, head, 4 * value_dim) + first_value * 4
        row_scale = [x for i in range(2) for x in lanes.floats(lanes.load(row_pointer + 16 * i, 4))]
        column_scale = [x for i in range(0, tile, 4) for x in lanes.floats(lanes.load(column_pointer + 4 * i, 4))]
        over_k, over_v = factors(key_factors, value_factors)
        key_ring = lanes.at(ring_keys, key_head, 2 * window * key_dim)
        value_ring = lanes.at(ring_values, head, 2 * window * value_dim)

        def record_pair(j: int) -> _Records | None:
            """Records j + 2 quad and the next: a half of a product's 16 summation indices, or None beyond the window."""
            if j >= window:
                return None
            indices = [quad * 2 + (j + i) for i in range(2)]
            keys = [lanes.load(key_ring + (i * key_dim + operand_key) * 2, 4, when=i < live) for i in indices]
            places = [(value_ring + (i * value_dim + first_value) * 2, i < live) for i in indices]
            return _Records(indices, keys, [_load(lanes, place, value_words, there) for place, there in places])

        records = [[record_pair(j), record_pair(j + 8)] for j in range(0, window, 16)]
        start_basis()
        tiles = [[[zero] * 4 for _ in range(4)] for _ in range(value_words)]

        total, after = suffix_sums(lanes, log_decay, window, lane)
        whole = lanes.exp(total)
        weight = lanes.exp(after) * record_scale
        unit, per_unit = power_of_two_scale(lanes, lanes.warp_max(lanes.bits(weight)))
        weight, whole = weight * per_unit, whole * per_unit  # the state in units of the heaviest record

        for i in range(tile):
            flipped = [w ^ -0x7F7F7F80 for w in code_words[i]]  # 0x80808080: signed bytes to offset binary
            for kk in range(8):
                code = lanes.from_bits(
                    lanes.permute_bytes(flipped[kk // 4], lanes.constant(0x4B000000, "i32"), 0x7440 + kk % 4)
                )
                code = (code - 8388736.0) * column_scale[i]
                tiles[i // 2][kk // 2][2 * (i % 2) + kk % 2] = code * row_scale[kk]
        add_factors(tiles, over_k, over_v)
        tiles = [[[x * whole for x in place] for place in places] for places in tiles]

        # --- rebuild: records ---------------------------------------------------------------------------------
        for chunk in records:
            values_operand: list[list[Value]] = [[] for _ in range(value_words)]
            high: list[list[Value]] = [[] for _ in range(4)]
            low: list[list[Value]] = [[] for _ in range(4)]
            for half in chunk:
                for m in range(value_words):
                    values_operand[m] += value_operand(half.values[0], half.values[1], m) if half else [none] * 2
                weights = [lanes.shuffle(weight, j) for j in half.indices] if half else []
                for n in range(4):
                    if not half:
                        high[n].append(none)
                        low[n].append(none)
                        continue
                    pair = lanes.unpack_half(lanes.permute_bytes(half.keys[0][n], half.keys[1][n], own_half))
                    pair = [x * w for x, w in zip(pair, weights, strict=True)]
                    high[n].append(lanes.pack_half(pair[0], pair[1]))
                    rest = [x - h for x, h in zip(pair, lanes.unpack_half(high[n][-1]), strict=True)]
                    low[n].append(lanes.pack_half(rest[0], rest[1]))
            for m in range(value_words):
                for n in range(4):
                    tiles[m][n] = lanes.mma_f16(tiles[m][n], values_operand[m], high[n])
                    tiles[m][n] = lanes.mma_f16(tiles[m][n], values_operand[m], low[n])

        # state[i][kk]: value row first_value + i, key column first_key + kk
        state = [[tiles[i // 2][kk // 2][2 * (i % 2) + kk % 2] * unit for kk in range(8)] for i in range(tile)]

        # --- fit: subspace iteration from the previous value factors ------------------------------------------- eq. 5
        def sum_over_values(source: int) -> None:
            """X_r = S y_r: a partial sum per warp over values, into the scratch."""

            def one(r: Value) -> None:
                y = _read(lanes, lanes.shared((r * value_dim + first_value) * 4) + source, tile)
                sums = [state[0][kk] * y[0] for kk in range(8)]
                for i in range(1, tile):
                    sums = [lanes.fma(state[i][kk], y[i], sums[kk]) for kk in range(8)]
                [x] = lanes.scatter_sum(sums, (16, 8, 4))
                place = ((value_warp * rank + r) * key_dim + own_key) * 4
                lanes.store(lanes.shared(place), [x])

            lanes.repeat(rank, one, unroll=spec.unroll)

        def sum_over_keys(source: int) -> None:
            """Y_r = S^T x_r: a partial sum per warp over keys, into the scratch."""

            def one(r: Value) -> None:
                x = _read(lanes, lanes.shared((r * key_dim + first_key) * 4) + source, 8)
                sums = [state[i][0] * x[0] for i in range(tile)]
                for kk in range(1, 8):
                    sums = [lanes.fma(state[i][kk], x[kk], sums[i]) for i in range(tile)]
                sums = lanes.scatter_sum(sums, (2, 1))
                place = ((key_warp * rank + r) * value_dim + own_value) * 4
                lanes.store(lanes.shared(place), sums)

            lanes.repeat(rank, one, unroll=spec.unroll)

        def finished(parts: int, size: int) -> tuple[list[list[Value]], Value]:
            """[R][size / 32] entries of this lane, summed over the partial sums; and the largest magnitude's bits."""
            per_lane = size // 32
            x = []
            for r in range(rank):
                sums = _read(lanes, lanes.shared(lane * (4 * per_lane)) + 4 * r * size, per_lane)
                for part in range(1, parts):
                    more = _read(lanes, lanes.shared(lane * (4 * per_lane)) + 4 * (part * rank + r) * size, per_lane)
                    sums = [a + b for a, b in zip(sums, more, strict=True)]
                x.append(sums)
            return x, lanes.warp_max(_largest_bits(lanes, [v for sums in x for v in sums]))

        def orthonormalise(parts: int, size: int, target: int) -> None:
            """`leapquant_jax.fit.orthonormal_rows` of the finished sums, by the first warp."""
            with lanes.when(warp.equals(0)):
                x, largest = finished(parts, size)
                _, down = power_of_two_scale(lanes, largest)
                x = [[v * down for v in sums] for sums in x]
                gram = [[_dot(lanes, x[i], x[j]) for j in range(i + 1)] for i in range(rank)]
                gram = [[lanes.all_sum(e, (1, 2, 4, 8, 16)) for e in entries] for entries in gram]
                squared = [gram[i][i] for i in range(rank)]
                length = [lanes.select(s > _TINY, lanes.reciprocal_sqrt(s), 0.0) for s in squared]
                lower: list[list[Value]] = []
                done: list[list[Value]] = []
                for i in range(rank):
                    entries: list[Value] = []
                    for j in range(i):
                        part = gram[i][j] * (length[i] * length[j])
                        for m in range(j):
                            part = part - entries[m] * lower[j][m]
                        entries.append(part * lower[j][j])
                    pivot = gram[i][i] * (length[i] * length[i])
                    for e in entries:
                        pivot = pivot - e * e
                    usable = pivot > _SMALLEST_PIVOT
                    inverse = lanes.reciprocal_sqrt(lanes.select(usable, pivot, 1.0))
                    inverse = lanes.select(usable, inverse, 0.0)
                    new = [v * length[i] for v in x[i]]
                    for j in range(i):
                        new = [v - entries[j] * d for v, d in zip(new, done[j], strict=True)]
                    done.append([v * inverse for v in new])
                    lower.append([*entries, inverse])
                    lanes.store(lanes.shared(lane * (size // 8)) + (target + 4 * i * size), done[i])

        def split_evenly() -> None:
            """`leapquant_jax.fit._split_evenly`: norms of the finished key factors, both factors rounded and stored; a row
            per warp."""
            per_key, per_value = key_dim // 32, value_dim // 32
            for r0 in range(0, rank, warps):
                r = warp + r0
                with lanes.when(r < rank):
                    place = (r * key_dim + lane * per_key) * 4
                    keys = [lanes.constant(0.0, "f32")] * per_key
                    for part in range(over_values):
                        more = _read(lanes, lanes.shared(place) + 4 * part * rank * key_dim, per_key)
                        keys = [a + b for a, b in zip(keys, more, strict=True)]
                    up, down = power_of_two_scale(lanes, lanes.warp_max(_largest_bits(lanes, keys)))
                    keys = [x * down for x in keys]
                    norm = lanes.sqrt(lanes.all_sum(_dot(lanes, keys, keys), (1, 2, 4, 8, 16)))
                    inverse = lanes.reciprocal(lanes.select(norm > _TINY, norm, 1.0))
                    factor = lanes.minimum(lanes.sqrt(norm) * lanes.sqrt(up), _LARGEST_HALF)
                    keys = [x * inverse * factor for x in keys]
                    place = (r * value_dim + lane * per_value) * 4
                    values = [x * factor for x in _read(lanes, lanes.shared(place) + factor_values, per_value)]
                    for new, size, per_lane, offset, pointer in (
                        (keys, key_dim, per_key, half_keys, key_factors),
                        (values, value_dim, per_value, half_values, value_factors),
                    ):
                        words = [lanes.pack_half(new[i], new[i + 1]) for i in range(0, per_lane, 2)]
                        place = (r * size + lane * per_lane) * 2
                        lanes.store(lanes.shared(place) + offset, words)
                        lanes.store(pointer + place, words)

        lanes.barrier()
        prefetch(next_item, next_row)
        for _ in range(spec.iterations):
            sum_over_values(factor_values)
            lanes.barrier()
            orthonormalise(over_values, key_dim, factor_keys)
            lanes.barrier()
            sum_over_keys(factor_keys)
            lanes.barrier()
            orthonormalise(over_keys, value_dim, factor_values)
            lanes.barrier()
        sum_over_values(factor_values)
        lanes.barrier()
        split_evenly()
        lanes.barrier()

        # --- residual against the rounded compensators -------------------------------------------------------------
        tiles = [
            [[state[2 * m + c // 2][2 * n + c % 2] for c in range(4)] for n in range(4)] for m in range(value_words)
        ]
        over_k, over_v = factors(lanes.shared() + half_keys, lanes.shared() + half_values)
        add_factors(tiles, over_k, [[w ^ -0x7FFF8000 for w in words] for words in over_v])  # 0x80008000: the signs
        residual = [[tiles[i // 2][kk // 2][2 * (i % 2) + kk % 2] for kk in range(8)] for i in range(tile)]

        # --- row scales: c_k = sqrt(mean_v |R|) --------------------------------------------------------------- eq. 7
        sums = [lanes.abs(residual[0][kk]) for kk in range(8)]
        for i in range(1, tile):
            sums = [s + lanes.abs(residual[i][kk]) for kk, s in enumerate(sums)]
        [x] = lanes.scatter_sum(sums, (16, 8, 4))
        lanes.store(lanes.shared((value_warp * key_dim + own_key) * 4), [x])
        lanes.barrier()
        sums = _read(lanes, lanes.shared(first_key * 4), 8)
        for part in range(1, over_values):
            more = _read(lanes, lanes.shared(first_key * 4) + 4 * part * key_dim, 8)
            sums = [a + b for a, b in zip(sums, more, strict=True)]
        new_rows = [lanes.sqrt(s * (1.0 / value_dim)) for s in sums]
        new_rows = [lanes.select(c < _SMALLEST_ROW, 1.0, c) for c in new_rows]
        inverse = [lanes.reciprocal(c) for c in new_rows]
        residual = [[x * y for x, y in zip(xs, inverse, strict=True)] for xs in residual]

        # --- column scales: B_v = max_k |R / c| / 127 --------------------------------------------------------------
        largest = []
        for xs in residual:
            top = lanes.abs(xs[0])
            for x in xs[1:]:
                top = lanes.maximum(top, lanes.abs(x))
            largest.append(top)
        largest = lanes.scatter_max(largest, (2, 1))
        maxima = 4 * over_values * key_dim
        lanes.store(lanes.shared((key_warp * value_dim + own_value) * 4) + maxima, largest)
        lanes.barrier()
        largest = _read(lanes, lanes.shared(first_value * 4) + maxima, tile)
        for part in range(1, over_keys):
            more = _read(lanes, lanes.shared(first_value * 4) + (maxima + 4 * part * value_dim), tile)
            largest = [lanes.maximum(a, b) for a, b in zip(largest, more, strict=True)]
        new_columns = [_divide_by_127(lanes, x) for x in largest]

        # --- codes ---------------------------------------------------------------------------------------------------
        for i in range(tile):
            usable = new_columns[i] > _SMALLEST_COLUMN
            per_code = lanes.select(usable, lanes.reciprocal(new_columns[i]), 0.0)
            bits = [lanes.bits(lanes.fma(x, per_code, _ROUND)) for x in residual[i]]
            pairs = [lanes.permute_bytes(bits[kk], bits[kk + 1], 0x0040) for kk in range(0, 8, 2)]
            words = [lanes.permute_bytes(pairs[0], pairs[1], 0x5410), lanes.permute_bytes(pairs[2], pairs[3], 0x5410)]
            lanes.store(code_row + i * key_dim, words)
        row_owner = lanes.binary("or", value_warp, line).equals(0)
        for half in range(2):
            lanes.store(row_pointer + 16 * half, new_rows[4 * half : 4 * half + 4], when=row_owner)
        column_owner = lanes.binary("or", key_warp, quad).equals(0)
        for i in range(0, tile, 4):
            lanes.store(column_pointer + 4 * i, new_columns[i : i + 4], when=column_owner)
        lanes.barrier()  # the scratch may be written again
        return [next_row, next_live]

    lanes.for_items(items, look_up, fold)


def _load(lanes: Lanes, pointer: Pointer, words: int, when: Value) -> list[Value]:
    """2, 4 or 8 consecutive words."""
    step = min(words, 4)
    return [x for i in range(0, words, step) for x in lanes.load(pointer + 4 * i, step, when=when)]


def _read(lanes: Lanes, pointer: Pointer, count: int) -> list[Value]:
    """`count` (2, or a multiple of 4) consecutive f32."""
    step = min(count, 4)
    return [x for i in range(0, count, step) for x in lanes.floats(lanes.load(pointer + 4 * i, step))]


def _dot(lanes: Lanes, a: list[Value], b: list[Value]) -> Value:
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = lanes.fma(x, y, total)
    return total


def _largest_bits(lanes: Lanes, x: list[Value]) -> Value:
    """Bits of the largest magnitude; NaN is the largest."""
    largest = lanes.abs(x[0])
    for value in x[1:]:
        largest = lanes.maximum(largest, lanes.abs(value))
    return lanes.bits(largest)


def _divide_by_127(lanes: Lanes, x: Value) -> Value:
    """x / 127, correctly rounded, without a division: one Newton step on the quotient."""
    quotient = x * (1.0 / 127.0)
    return lanes.fma(lanes.fma(quotient, -127.0, x), 1.0 / 127.0, quotient)
