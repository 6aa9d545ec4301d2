"""The fold kernel: the end of a window, four warps per 128 x 128 head.

    S = Gamma (Diag(c) (Z * B) + sum_r k~_r u~_r^T) + sum_j w_j k_j u_j^T                                    (eq. 4)
    S ~ sum_r k~_r u~_r^T + R,    R ~ Diag(c) (Z * B)                                                       (eqs. 5, 7)

The fp32 state lies in a worker's registers as accumulators of 16 x 8 x 16 products (see `operands`); nothing but the
compressed state is ever in memory. The tensor cores do everything that multiplies:

- Rebuilding and the residual are exact to fp32: codes and fp16 factors are exact operands, row scales and record weights
  enter as sums of two fp16.
- The passes of the fit round the state to fp16 on the way in. Each entry of S y sums over 128 roundings, so it is 11
  times more accurate than the fp16 factor it becomes; what the factors miss, the residual carries.
- S^T x contracts over keys and takes the accumulators as they lie. S y contracts over values and needs 8 x 8 blocks
  transposed (`movmatrix`).

The state is kept in units of a power of four, chosen from a bound of its entries so that they come near the end of fp16
(the bound is usually far too large); both factors then scale by its root. Only factors (R x K, R x V), column maxima and
two energies cross warps, through shared memory, where every warp finishes them for itself.
"""

from pallas_kernels.fold.factors import Factors, keep_previous
from pallas_kernels.fold.fit import Fit
from pallas_kernels.fold.gram import Exchange, orthonormalise, row_norms
from pallas_kernels.fold.operands import Operands, Place, Tiles, row_bytes
from pallas_kernels.fold.spec import FoldSpec
from pallas_kernels.lanes.value import Lanes, Pointer, Value
from pallas_kernels.scales import power_of_two_scale, suffix_sums

_LARGEST_HALF = 65504.0
_SMALLEST_MEAN, _SMALLEST_COLUMN = 1e-36, 1e-37  # as leapquant_jax.quantize
_TINY = 1e-37  # squares and magnitudes below count as zero
_ROUND = 12582912.0  # 1.5 2^23: adding it leaves the rounded integer in the low bits


def fold_program(
    spec: FoldSpec, lanes: Lanes, counted, directions, position, ring_keys, ring_values, ring_scales,
    ring_log_decays, codes, row_scales, column_scales, compensator_keys, compensator_values,
) -> None:  # fmt: skip
    """Folds the rows at which `counted` (int32 [B], a running count) rises; `directions` is `fit.start_directions`, the rest
    a `LeapState`."""
    heads, repeats, rank, warps = spec.heads, spec.heads // spec.key_heads, spec.rank, spec.warps
    key_dim, value_dim, window, tile = spec.key_dim, spec.value_dim, spec.window, spec.tile
    places = spec.places()
    [row_total] = lanes.load(lanes.at(counted) + 4 * (spec.batch - 1))
    items = row_total * heads

    arrays = dict(
        codes=codes, ring_keys=ring_keys, ring_values=ring_values, ring_scales=ring_scales,
        ring_log_decays=ring_log_decays, row_scales=row_scales, column_scales=column_scales,
        compensator_keys=compensator_keys, compensator_values=compensator_values,
    )  # fmt: skip

    def look_up(item: Value) -> list[Value]:
        """Batch row of an item, and how many records it holds."""
        # How many rows the running count keeps at or below the item's rank: 32 of them are asked at a time.
        rank_of_row, row, lane = item // heads, lanes.constant(0, "i32"), lanes.thread & 31
        levels = 1
        while 32**levels < spec.batch:
            levels += 1
        for stride in (32**i for i in reversed(range(levels))):
            last = row + (lane * stride + (stride - 1))
            there = lanes.binary("and", item < items, last < spec.batch)
            [count] = lanes.load(lanes.at(counted, lanes.select(there, last, 0), 4), when=there)
            before = lanes.select(lanes.binary("and", there, count <= rank_of_row), lane + 1, 0)
            row = row + lanes.warp_max(before) * stride
        [live] = lanes.load(lanes.at(position, row, 4), when=item < items)
        return [row, lanes.select(live < window, live, window)]

    def fetch(item: Value, row: Value) -> None:
        head = row * heads + item % heads
        wanted = dict.fromkeys(arrays, head) | {"ring_keys": head // repeats}
        spec.inputs.fetch(lanes, arrays, wanted, lanes.thread_of(item), item < items)

    def start(item: Value) -> list[Value]:
        carried = look_up(item)
        fetch(item, carried[0])
        return carried

    def fold(item: Value, carried: list[Value]) -> list[Value]:
        row, live = carried
        next_item = item + lanes.workers
        next_row, next_live = look_up(next_item)
        head = row * heads + item % heads

        place = Place.of(lanes.thread_of(item))
        thread, warp, lane, line, quad = place.thread, place.warp, place.lane, place.line, place.quad
        first_value, first_key = line * tile, warp * 32 + quad * 8  # of the lane's part of the state
        exchange = Exchange(lanes, places["exchange"], rank, warps, warp, lane)
        operands = Operands(lanes, place, key_dim=key_dim, value_dim=value_dim, rank=rank, window=window)
        fit = Fit(lanes, spec, place)
        factors = Factors(lanes, spec, place)
        read = {name: spec.inputs.table(lanes, name) for name in arrays}
        lanes.copies_done()
        lanes.barrier()

        # --- decays, and the unit of the state -------------------------------------------------------------------
        lane_live = lane < live
        [log_decay] = lanes.floats(lanes.load(read["ring_log_decays"] + lane * 4, when=lane_live))
        [record_scale] = lanes.floats(lanes.load(read["ring_scales"] + lane * 4, when=lane_live))
        largest = [
            _largest(lanes, _strided(lanes, read["row_scales"], lane, key_dim)),
            _largest(lanes, _strided(lanes, read["column_scales"], lane, value_dim)),
            _largest(lanes, _strided_halves(lanes, read["compensator_keys"], lane, rank, key_dim)),
            _largest(lanes, _strided_halves(lanes, read["compensator_values"], lane, rank, value_dim)),
        ]
        fit.start(directions, read["compensator_values"])

        total, after = suffix_sums(lanes, log_decay, window, lane)
        decay = lanes.exp(total)
        weight = lanes.exp(after) * record_scale
        # |S| <= decay (127 c B + R k~ u~) + P w |k| |u|: keys have unit length, and the records' u are below 1.
        bound = decay * (largest[0] * largest[1] * 127.0 + largest[2] * largest[3] * float(rank))
        bound = bound + lanes.from_bits(lanes.warp_max(lanes.bits(weight))) * float(window)
        root, per_root = _power_of_four_root(lanes, lanes.bits(lanes.abs(bound)))
        # Entries up to 2^13: the bound is often far too large, and the second halves of sums of two fp16 must not underflow.
        # A previous factor can be twice an entry (its unit is a power of two), and 2^15 still fits.
        root, per_root = root * 2.0**-6, per_root * 2.0**6
        weight = weight * per_root * per_root
        unit_decay = decay * per_root * per_root

        # --- rebuild ---------------------------------------------------------------------------------------- eq. 4
        high, low = operands.weighted(
            [operands.key_rows(read["ring_keys"], j, live) for j in range(0, window, 8)], weight
        )
        row_unit, per_row_unit = power_of_two_scale(lanes, lanes.bits(largest[0]))
        row_unit, per_row_unit = row_unit * 2.0**-12, per_row_unit * 2.0**12
        row_scale = _read(lanes, read["row_scales"] + first_key * 4, 8)
        diagonal = operands.diagonal([c * per_row_unit for c in row_scale])
        factor_keys = operands.factor_keys(read["compensator_keys"])
        code_row = spec.inputs.codes_of(lanes, place)
        zero = lanes.constant(0.0, "f32")
        tiles: Tiles = []
        for start in range(0, tile, 8):  # eight value rows at a time, so that few operands wait in registers
            columns = [b * row_unit for b in _read(lanes, read["column_scales"] + (first_value + start) * 4, 8)]
            values = operands.factor_values(read["compensator_values"], start)
            records = [operands.record_values(read["ring_values"], start, j, live) for j in range(0, window, 16)]
            for m in range(4):
                words = [lanes.load(code_row + (start + 2 * m + i) * key_dim, 2) for i in range(2)]
                z = [[x for word in words[i] for x in operands.code_values(word)] for i in range(2)]
                fours, written = ([[zero] * 4 for _ in range(4)] for _ in range(2))
                for n, half in ((n, half) for half in range(2) for n in range(4)):
                    fours[n] = lanes.mma_f16(fours[n], [z[0][n], z[1][n]], [diagonal[n][half]])
                for chunk, over_values in enumerate(records):
                    operands.add_row(written, over_values[m], high[chunk])
                    operands.add_row(written, over_values[m], low[chunk])
                fours = [[x * columns[2 * m + c // 2] for c, x in enumerate(four)] for four in fours]
                operands.add_row(fours, values[m], factor_keys)
                fours = [
                    [lanes.fma(x, unit_decay, y) for x, y in zip(*two, strict=True)]
                    for two in zip(fours, written, strict=True)
                ]
                tiles.append(fours)

        # --- fit: subspace iteration from the previous value factors ----------------------------------------- eq. 5
        previous = factors.load(read["compensator_keys"], read["compensator_values"], decay) if spec.refit_gain else []
        lanes.barrier()
        fetch(next_item, next_row)
        basis: list[Value] = []
        for _ in range(spec.iterations):
            x = orthonormalise(exchange, fit.sum_over_values(tiles))
            basis = orthonormalise(exchange, fit.sum_over_keys(tiles, x))
            fit.store_basis(basis)
            lanes.barrier()
        x = fit.sum_over_values(tiles, swapped=True)

        # both factors take the root of the norm, and are rounded (`leapquant_jax.fit._split_evenly`)
        norms, up, down = row_norms(exchange, x)
        new = []
        for r, norm in enumerate(norms):
            factor = lanes.minimum(lanes.sqrt(norm) * lanes.sqrt(up) * root, _LARGEST_HALF)
            key = x[r] * down * lanes.reciprocal(lanes.select(norm > _TINY, norm, 1.0)) * factor
            new.append(lanes.pack_half(key, basis[r] * factor))
        factors.share("new", new, per_root, per_root * -1.0)
        if spec.refit_gain:
            # Kept for long, the two factors drift apart in size: the value factor gets a unit of its own.
            up, down = power_of_two_scale(lanes, lanes.bits(largest[3]))
            factors.share("previous", previous, up * per_root * per_root, down * -1.0)
        lanes.barrier()

        # --- residual against the rounded compensators --------------------------------------------------------------
        new_over_keys, new_over_values = factors.operands(operands, "new")
        for start in range(0, tile, 8):
            operands.add(tiles[start // 2 : start // 2 + 4], new_over_values(start), new_over_keys)
        if spec.refit_gain:
            keep = keep_previous(lanes, spec, place, operands, tiles, factors)
            new = [lanes.select(keep, a, b) for a, b in zip(previous, new, strict=True)]

        # --- row scales: c_k = (mean_v |R|)^s -------------------------------------------------------------------- eq. 7
        residual = [[tiles[i // 2][kk // 2][2 * (i % 2) + kk % 2] for kk in range(8)] for i in range(tile)]
        sums = [lanes.abs(residual[0][kk]) for kk in range(8)]
        for i in range(1, tile):
            sums = [s + lanes.abs(residual[i][kk]) for kk, s in enumerate(sums)]
        # Which key a lane is left with after `scatter_sum` over the lanes with the same keys; below, which tile / 4 values.
        own_key = first_key + (((lane >> 4) & 1) * 4 + ((lane >> 3) & 1) * 2 + ((lane >> 2) & 1))
        own_value = first_value + (((lane >> 1) & 1) * 2 + (lane & 1)) * (tile // 4)
        [total] = lanes.scatter_sum(sums, (16, 8, 4))
        new_row = total * (1.0 / value_dim)
        new_row = lanes.sqrt(new_row) * root if spec.smoothing == 0.5 else new_row * root * root
        new_row = lanes.select(new_row < _SMALLEST_MEAN**spec.smoothing, 1.0, new_row)
        lanes.store(lanes.at(row_scales, head, 4 * key_dim) + own_key * 4, [new_row])
        lanes.store(lanes.shared(own_key * 4) + places["keys"], [lanes.reciprocal(new_row) * root * root])
        lanes.warp_barrier()
        inverse = _read(lanes, lanes.shared(first_key * 4) + places["keys"], 8)
        residual = [[x * y for x, y in zip(xs, inverse, strict=True)] for xs in residual]

        # --- column scales: B_v = max_k |R / c| / 127 -----------------------------------------------------------------
        tops = []
        for xs in residual:
            top = lanes.abs(xs[0])
            for other in xs[1:]:
                top = lanes.maximum(top, lanes.abs(other))
            tops.append(top)
        tops = lanes.scatter_max(tops, (2, 1))
        lanes.store(lanes.shared((warp * value_dim + own_value) * 4) + places["sums"], tops)
        lanes.barrier()
        parts = [lanes.load(lanes.shared(thread * 4) + (places["sums"] + 4 * w * value_dim)) for w in range(warps)]
        top, *others = (lanes.floats(part)[0] for part in parts)
        for other in others:
            top = lanes.maximum(top, other)
        new_column = _divide_by_127(lanes, top)
        per_code = lanes.select(new_column > _SMALLEST_COLUMN, lanes.reciprocal(new_column), 0.0)
        lanes.store(lanes.at(column_scales, head, 4 * value_dim) + thread * 4, [new_column])
        lanes.store(lanes.shared(thread * 4) + places["columns"], [per_code])

        key_factors = lanes.at(compensator_keys, head, 2 * rank * key_dim)
        factors.store(key_factors, lanes.at(compensator_values, head, 2 * rank * value_dim), new)
        lanes.barrier()

        # --- codes -------------------------------------------------------------------------------------------------------
        code_row = lanes.at(codes, head, value_dim * key_dim) + (first_value * key_dim + first_key)
        for i in range(0, tile, 4):
            per_codes = _read(lanes, lanes.shared(first_value * 4) + (places["columns"] + 4 * i), 4)
            for ii, per_code in enumerate(per_codes, start=i):
                bits = [lanes.bits(lanes.fma(x_entry, per_code, _ROUND)) for x_entry in residual[ii]]
                pairs = [lanes.permute_bytes(bits[kk], bits[kk + 1], 0x0040) for kk in range(0, 8, 2)]
                words = [lanes.permute_bytes(pairs[i], pairs[i + 1], 0x5410) for i in (0, 2)]
                lanes.store(code_row + ii * key_dim, words)
        return [next_row, next_live]

    lanes.for_items(items, start, fold)


def _largest(lanes: Lanes, values: list[Value]) -> Value:
    """Largest magnitude in the warp (NaN if there is one)."""
    largest = lanes.abs(values[0])
    for x in values[1:]:
        largest = lanes.maximum(largest, lanes.abs(x))
    return lanes.from_bits(lanes.warp_max(lanes.bits(largest)))


def _strided(lanes: Lanes, pointer: Pointer, lane: Value, count: int) -> list[Value]:
    """`count` f32, spread over the lanes of a warp."""
    return [lanes.floats(lanes.load(pointer + lane * 4 + 4 * i))[0] for i in range(0, count, 32)]


def _strided_halves(lanes: Lanes, pointer: Pointer, lane: Value, rows: int, size: int) -> list[Value]:
    """`rows` rows of `size` fp16 in shared memory, spread over the lanes of a warp."""
    offsets = [r * row_bytes(size) + 2 * i for r in range(rows) for i in range(0, size, 64)]
    words = [lanes.load(pointer + lane * 4 + offset)[0] for offset in offsets]
    return [x for word in words for x in lanes.unpack_half(word)]


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
