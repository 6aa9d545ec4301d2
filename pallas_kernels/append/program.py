"""The append kernel's lane program: one worker of four warps per value head, one token.

    kread = S_{l-1}^T (e^g k),  qread = S_{l-1}^T (e^g q)          (eq. 10, both at once)
    u = beta (v - kread),       o = qread + u^ (k^ . q)            (^: rounded as the ring stores it)

How the work lies on the lanes (K = V = 128; lane = 8 words: t = lane % 4, row = lane / 4):

  codes     A warp owns V/4 value rows. A lane loads 16 consecutive codes of a row at once, straight into the operand of
            an int8 matrix product: the order of the key index inside a product is free, so the fragment's scattered
            order never has to exist in memory. No conversion, no shared memory, exact int32 sums.
  vectors   c * k and c * q become 24-bit fixed point, cut into three signed bytes: six of the eight columns of the
            product's other operand. Their sum is exact; the error is that of the fixed point, 2^-23 of the largest entry.
  dots      k~_r . x and k_j . x (one compensator and P/8 records per lane) in fp32, each warp over a quarter of K.
  values    Each lane sums a quarter of the records for four columns, then the partial sums are exchanged until every
            lane owns one column, finishes it and stores it.
"""

import dataclasses

from pallas_kernels.lanes.value import Lanes, Pointer, Value
from pallas_kernels.scales import power_of_two_scale, suffix_sums

WARPS = 4
THREADS = 32 * WARPS


@dataclasses.dataclass(frozen=True)
class AppendSpec:
    """Static sizes: B H value heads in all, heads H, key heads G, K, V, window P, rank R; whether there is an `active` mask;
    which inputs are bfloat16 (otherwise float32); how many value heads of one key head make an item (a divisor of H/G)."""

    count: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    window: int
    rank: int
    masked: bool = False
    bfloat_qk: bool = False
    bfloat_v: bool = False

    pair: int = 1

    @property
    def rows(self) -> int:
        """Of the table of dot products: records, up to 8 compensators of each value head, k^ . q."""
        return self.window + 8 * self.pair + 1

    @property
    def coefficient_rows(self) -> int:
        return self.rows + (self.pair - 1) * self.window

    @property
    def piece_stride(self) -> int:
        """Bytes between the byte planes of the fixed-point vectors; 64 more than a multiple of 128: no bank conflicts."""
        return 192 if self.key_dim == 128 else 64

    @property
    def codes_bytes(self) -> int:
        return self.pair * self.value_dim * self.key_dim

    @property
    def shared_bytes(self) -> int:
        """Codes, fixed-point vectors, reads of the codes, dot products, coefficients, maxima."""
        tables = WARPS * 8 * (self.rows + self.coefficient_rows)
        return self.codes_bytes + self.pair * (WARPS * 8 * self.piece_stride + 8 * self.value_dim + 16) + tables


def _load_floats(lanes: Lanes, pointer: Pointer, count: int, bfloat: bool, when: Value | None = None) -> list[Value]:
    """`count` (4 or 8) consecutive inputs as f32."""
    if bfloat:
        words = lanes.load(pointer, count // 2, when=when)
        return [x for w in words for x in lanes.unpack_bfloat(w)]
    return [x for i in range(0, count, 4) for x in lanes.floats(lanes.load(pointer + 4 * i, 4, when=when))]


def _fixed_point(lanes: Lanes, x: list[Value]) -> tuple[list[Value], Value]:
    """Four fp32 per lane -> (3 words, each holding one byte plane of the four, and the value of the lowest bit).

    x = (b2 2^16 + b1 2^8 + b0) unit with signed bytes. The unit is a power of two, common to the warp's 128 entries; it
    is NaN where an entry is not finite.
    """
    largest = lanes.bits(lanes.abs(x[0]))
    for value in x[1:]:
        other = lanes.bits(lanes.abs(value))
        largest = lanes.select(
            other > largest, other, largest
        )  # bit patterns of non-negative floats sort like integers
    largest = lanes.warp_max(largest)
    exponent = largest >> 23
    exponent = lanes.select(exponent < 22, 22, exponent)
    scale = lanes.from_bits((275 - exponent) << 23)  # brings the largest entry to [2^21, 2^22)
    unit = lanes.from_bits((exponent - 21) << 23)
    unit = lanes.fma(lanes.from_bits(largest), 0.0, unit)
    # Adding 0x80 to each byte and flipping its top bit turns unsigned digits into signed ones.
    words = [(lanes.round_to_int(value * scale) + 0x808080) ^ 0x808080 for value in x]
    low01 = lanes.permute_bytes(words[0], words[1], 0x5140)  # b0 b0' b1 b1'
    low23 = lanes.permute_bytes(words[2], words[3], 0x5140)
    high01 = lanes.permute_bytes(words[0], words[1], 0x0062)
    high23 = lanes.permute_bytes(words[2], words[3], 0x0062)
    planes = [
        lanes.permute_bytes(high01, high23, 0x5410),
        lanes.permute_bytes(low01, low23, 0x7632),
        lanes.permute_bytes(low01, low23, 0x5410),
    ]
    return planes, unit


def append_program(
    spec: AppendSpec, lanes: Lanes, codes, row_scales, column_scales, compensator_keys, compensator_values, position,
    active, q, k, v, g, beta, ring_keys, ring_values, ring_scales, ring_log_decays, out,
) -> None:  # fmt: skip
    """One token of every value head. Arrays as in `LeapState` and `lq.step`; `active` int8 [B] if `spec.masked`."""
    heads, repeats = spec.heads, spec.heads // spec.key_heads
    key_dim, value_dim, window, rank, pair = spec.key_dim, spec.value_dim, spec.window, spec.rank, spec.pair
    value_rows = value_dim // WARPS
    tiles, chunks = value_rows // 16, key_dim // 64
    columns = value_rows // 4  # lanes side by side over the warp's columns, four columns each
    groups = 32 // columns  # of lanes, which share the records among themselves
    span = key_dim // 16  # entries of K per lane in the dot products
    qk_size, v_size = (2 if bfloat else 4 for bfloat in (spec.bfloat_qk, spec.bfloat_v))

    items = spec.count // pair

    def position_of(item: Value) -> Value:
        """Records of the item's row; -1: leave the row alone."""
        row = item // (heads // pair)
        wanted = item < items
        [live] = lanes.load(lanes.at(position, row, 4), when=wanted)
        if spec.masked:
            live = lanes.select(lanes.load_small(lanes.at(active, row, 1), 1, when=wanted).equals(0), -1, live)
        return live

    def request_codes(item: Value) -> None:
        """Copies an item's codes, most of its bytes, into shared memory, each lane its own."""
        wanted = item < items
        thread = lanes.thread_of(item)
        warp, lane = thread >> 5, thread & 31
        codes_of_lane = lanes.at(codes, item, pair * value_dim * key_dim)
        codes_of_lane += (warp * value_rows + (lane >> 2)) * key_dim + (lane & 3) * 16
        slot = lanes.shared(thread * 16)
        for i in range(pair * 2 * tiles * chunks):
            n, m, j, half = i // (2 * chunks * tiles), i // (2 * chunks) % tiles, i // 2 % chunks, i % 2
            source = codes_of_lane + ((n * value_dim + 16 * m + 8 * half) * key_dim + 64 * j)
            lanes.copy_async(slot + i * THREADS * 16, source, when=wanted)

    def request_rest(item: Value, live: Value) -> None:
        """Brings what an item waits for first into the L2 cache."""
        wanted = item < items
        thread = lanes.thread_of(item)
        warp, lane = thread >> 5, thread & 31
        key_head, line_bytes = item // (repeats // pair), lane * 128
        for index, (array, row, row_bytes, used) in enumerate(
            [
                (row_scales, item, pair * 4 * key_dim, None),
                (compensator_keys, item, pair * 2 * rank * key_dim, None),
                (ring_keys, key_head, 2 * window * key_dim, live * (2 * key_dim)),
            ]
        ):
            with lanes.when(warp.equals(index + 1)):
                inside = lanes.binary("and", wanted, line_bytes < (row_bytes if used is None else used))
                lanes.prefetch(lanes.at(array, row, row_bytes) + line_bytes, when=inside)
        for index, array in enumerate((q, k)):
            with lanes.when(warp.equals(index)):
                inside = lanes.binary("and", wanted, line_bytes < key_dim * qk_size)
                lanes.prefetch(lanes.at(array, key_head, key_dim * qk_size) + line_bytes, when=inside)

    def append(item: Value, carried: list[Value]) -> list[Value]:
        live, next_live = carried
        next_item = item + lanes.workers
        later_live = position_of(next_item + lanes.workers)
        thread = lanes.thread_of(item)
        warp, lane = thread >> 5, thread & 31
        quad, line = lane & 3, lane >> 2
        column4, group = warp * value_rows + (lane & (columns - 1)) * 4, lane // columns
        column = column4 + (((lane >> 4) & 1) * 2 + ((lane >> 3) & 1))  # the one this lane finishes
        first = warp * (key_dim // 4) + quad * span
        inside = (lane < key_dim // 4) if key_dim < 128 else None
        usable = lanes.binary("and", live >= 0, live < window)
        live = lanes.select(usable, live, 0)
        every = range(pair)  # the item's value heads: pair item, pair item + 1, ...
        key_head = item // (repeats // pair)  # b G + h // (H/G), because H is a multiple of H/G

        def of_head(array, size: int) -> list[Pointer]:
            """Where the item's value heads begin in an array with `size` bytes for each."""
            return [lanes.at(array, item, pair * size) + n * size for n in every]

        # --- requests, in the order of their use; of the ring only live records
        k_row, q_row = lanes.at(k, key_head, key_dim * qk_size), lanes.at(q, key_head, key_dim * qk_size)
        key_ring = lanes.at(ring_keys, key_head, 2 * window * key_dim)
        k4 = _load_floats(lanes, k_row + lane * (4 * qk_size), 4, spec.bfloat_qk, inside)
        q4 = _load_floats(lanes, q_row + lane * (4 * qk_size), 4, spec.bfloat_qk, inside)
        c4 = [lanes.floats(lanes.load(x + lane * 16, 4, when=inside)) for x in of_head(row_scales, 4 * key_dim)]
        records = [
            lanes.load(key_ring + ((line + 8 * i) * key_dim + first) * 2, span // 2, when=line + 8 * i < live)
            for i in range(window // 8)
        ]
        compensator = [
            lanes.load(x + (line * key_dim + first) * 2, span // 2, when=line < rank)
            for x in of_head(compensator_keys, 2 * rank * key_dim)
        ]
        decay_ring, scale_ring = of_head(ring_log_decays, 4 * window), of_head(ring_scales, 4 * window)
        log_decay = [lanes.floats(lanes.load(x + lane * 4, when=lane < live))[0] for x in decay_ring]
        record_scale = [lanes.floats(lanes.load(x + lane * 4, when=lane < live))[0] for x in scale_ring]
        value_ring = of_head(ring_values, 2 * window * value_dim)
        fixed_values = of_head(compensator_values, 2 * rank * value_dim)
        in_row = (group * value_dim + column4) * 2
        value_terms = [  # (row of the coefficient table, two words holding four fp16)
            [
                (group + i, lanes.load(value_ring[n] + in_row + i * value_dim * 2, 2, when=group + i < live))
                for i in range(0, window, groups)
            ]
            + [
                (
                    group + (window + i),
                    lanes.load(fixed_values[n] + in_row + i * value_dim * 2, 2, when=group + i < rank),
                )
                for i in range(0, rank, groups)
            ]
            for n in every
        ]
        column_scale = [lanes.floats(lanes.load(x + column * 4))[0] for x in of_head(column_scales, 4 * value_dim)]
        v_places = [x + column * v_size for x in of_head(v, value_dim * v_size)]
        v_words = [lanes.load_small(x, 2) << 16 if spec.bfloat_v else lanes.load(x)[0] for x in v_places]
        v_own = lanes.floats(v_words)
        g_new = [lanes.floats(lanes.load(x))[0] for x in of_head(g, 4)]
        strength = [lanes.floats(lanes.load(x))[0] for x in of_head(beta, 4)]

        # --- fixed-point vectors, through a corner of shared memory private to the warp
        stride = spec.piece_stride
        corner = warp * (8 * stride) + spec.codes_bytes
        k_unit, q_unit, vectors = [], [], []
        for n in every:
            planes = []
            for x4, units in ((k4, k_unit), (q4, q_unit)):
                x_planes, unit = _fixed_point(lanes, [a * b for a, b in zip(c4[n], x4, strict=True)])
                planes += x_planes
                units.append(unit)
            table = WARPS * 8 * stride * n
            for index, plane in zip((0, 1, 2, 4, 5, 6), planes, strict=True):
                lanes.store(lanes.shared(corner + lane * 4) + (table + index * stride), [plane], when=inside)
        lanes.warp_barrier()
        for n in every:
            place = lanes.shared(corner + line * stride + quad * 16) + WARPS * 8 * stride * n
            vectors.append([lanes.load(place + 64 * j, 4) for j in range(chunks)])

        # --- both reads of the codes. Columns 2t, 2t+1 of a product belong to the lane with quad t: (b2, b1), (b0, -) of k,
        # then the same of q; columns 3 and 7 hold nothing and get weight 0.
        first_weight = lanes.select((quad & 1).equals(0), lanes.constant(65536.0, "f32"), 1.0)
        second_weight = lanes.select((quad & 1).equals(0), lanes.constant(256.0, "f32"), 0.0)
        reads = spec.codes_bytes + pair * WARPS * 8 * stride
        lanes.copies_done()
        slot = lanes.shared(thread * 16)
        for n in every:
            for m in range(tiles):
                acc = [lanes.constant(0, "i32")] * 4
                for j in range(chunks):
                    i = 2 * ((n * tiles + m) * chunks + j)
                    upper, lower = (lanes.load(slot + (i + half) * THREADS * 16, 4) for half in range(2))
                    for i in (0, 2):
                        acc = lanes.mma_s8(
                            acc, [upper[i], lower[i], upper[i + 1], lower[i + 1]], vectors[n][j][i : i + 2]
                        )
                for half in range(2):
                    low, high = lanes.to_float(acc[2 * half]), lanes.to_float(acc[2 * half + 1])
                    total = lanes.all_sum(lanes.fma(low, first_weight, high * second_weight), (1,))
                    place = (warp * value_rows + line + (n * value_dim + 16 * m + 8 * half)) * 8 + (quad >> 1) * 4
                    lanes.store(lanes.shared(place) + reads, [total], when=(quad & 1).equals(0))

        # --- the slots of the codes are free: request the next item's
        request_codes(next_item)
        request_rest(next_item, next_live)
        k_span = _load_floats(lanes, k_row + first * qk_size, span, spec.bfloat_qk)
        q_span = _load_floats(lanes, q_row + first * qk_size, span, spec.bfloat_qk)

        # --- dot products with the compensators' keys and the live records' keys
        table = reads + pair * value_dim * 8
        own_table = warp * (spec.rows * 8)
        key_rows = [(line + 8 * i, r) for i, r in enumerate(records)]
        key_rows += [(line + (window + 8 * n), words) for n, words in enumerate(compensator)]
        for table_row, words in key_rows:
            entries = [x for w in words for x in lanes.unpack_half(w)]
            k_dot, q_dot = entries[0] * k_span[0], entries[0] * q_span[0]
            for entry, k_entry, q_entry in zip(entries[1:], k_span[1:], q_span[1:], strict=True):
                k_dot, q_dot = lanes.fma(entry, k_entry, k_dot), lanes.fma(entry, q_entry, q_dot)
            k_dot, q_dot = lanes.all_sum(k_dot, (1, 2)), lanes.all_sum(q_dot, (1, 2))
            lanes.store(lanes.shared(own_table + table_row * 8) + table, [k_dot, q_dot], when=quad.equals(0))
        rounded = [lanes.pack_half(k_span[i], k_span[i + 1]) for i in range(0, span, 2)]
        k_hat = [x for w in rounded for x in lanes.unpack_half(w)]
        kq = k_hat[0] * q_span[0]
        for k_entry, q_entry in zip(k_hat[1:], q_span[1:], strict=True):
            kq = lanes.fma(k_entry, q_entry, kq)
        kq = lanes.all_sum(kq, (1, 2))
        own_row = window + 8 * pair  # of the table: k^ . q
        lanes.store(lanes.shared(own_table) + (table + own_row * 8), [kq, kq], when=lane.equals(0))
        writes_key = lanes.binary("and", usable, line.equals(0))
        if repeats > pair:
            writes_key = lanes.binary("and", writes_key, (item % (repeats // pair)).equals(0))
        lanes.store(key_ring + (live * key_dim + first) * 2, rounded, when=writes_key)

        # --- decays, this token's included
        g_new = [lanes.maximum(x, -128.0) for x in g_new]
        whole, weight = [], []
        for n in every:
            total, after = suffix_sums(lanes, log_decay[n], window, lane)
            whole.append(lanes.exp(total + g_new[n]))  # Gamma of eq. 10
            weight.append(lanes.exp(after + g_new[n]) * record_scale[n])

        # --- coefficients of every value row: weight of the record x its dot products, summed over the four warps
        lanes.barrier()
        coefficients = table + WARPS * spec.rows * 8
        own_coefficients = warp * (spec.coefficient_rows * 8)
        for start in range(0, spec.rows, 32):
            table_row = lane + start
            inside_table = table_row < spec.rows
            sums = [lanes.constant(0.0, "f32")] * 2
            for w in range(WARPS):
                part = lanes.load(lanes.shared(table_row * 8) + (table + w * spec.rows * 8), 2, when=inside_table)
                sums = [s + x for s, x in zip(sums, lanes.floats(part), strict=True)]
            place = lanes.shared(own_coefficients + table_row * 8) + coefficients
            factor = lanes.constant(1.0, "f32")
            for n in reversed(every):
                factor = lanes.select(table_row < window + 8 * (n + 1), whole[n], factor)
            for n in every:  # a record has one row of dot products and one of coefficients per value head
                if n == 0:
                    own = lanes.select(table_row < window, weight[0], factor) if start < window else factor
                    lanes.store(place, [s * own for s in sums], when=inside_table)
                elif start < window:
                    extra = (
                        lanes.shared(own_coefficients + (table_row + (spec.rows + window * (n - 1))) * 8) + coefficients
                    )
                    lanes.store(extra, [s * weight[n] for s in sums], when=table_row < window)
        lanes.warp_barrier()

        # --- sum over records and compensators: four columns per lane, then one
        k_sums, q_sums = [], []
        for n in every:
            k_four, q_four = ([lanes.constant(0.0, "f32")] * 4 for _ in range(2))
            for i, (table_row, words) in enumerate(value_terms[n]):
                shift = 8 * n if i >= window // groups else 0 if n == 0 else spec.rows + window * (n - 1)
                pair_of = lanes.load(lanes.shared(own_coefficients + table_row * 8) + (coefficients + 8 * shift), 2)
                k_weight, q_weight = lanes.floats(pair_of)
                values = [x for w in words for x in lanes.unpack_half(w)]
                k_four = [lanes.fma(x, k_weight, s) for x, s in zip(values, k_four, strict=True)]
                q_four = [lanes.fma(x, q_weight, s) for x, s in zip(values, q_four, strict=True)]
            for four, sums in ((k_four, k_sums), (q_four, q_sums)):
                [one] = lanes.scatter_sum(four, (16, 8))
                sums.append(lanes.all_sum(one, (4,)) if groups == 8 else one)

        # --- correction
        _, kq = lanes.floats(lanes.load(lanes.shared(own_coefficients) + (coefficients + own_row * 8), 2))
        maxima = coefficients + WARPS * spec.coefficient_rows * 8
        u, before = [], []
        for n in every:
            k_code, q_code = lanes.floats(lanes.load(lanes.shared(column * 8) + (reads + n * value_dim * 8), 2))
            scale = whole[n] * column_scale[n]
            u.append(strength[n] * (v_own[n] - lanes.fma(k_code, scale * k_unit[n], k_sums[n])))
            before.append(lanes.fma(q_code, scale * q_unit[n], q_sums[n]))
            largest = lanes.warp_max(lanes.bits(lanes.abs(u[n])))
            lanes.store(lanes.shared(warp * 4) + (maxima + 16 * n), [largest], when=lane.equals(0))
        lanes.barrier()

        # --- output from the rounded record, and the record itself
        owner = (lane & 4).equals(0) if groups == 8 else None
        writes = usable if owner is None else lanes.binary("and", owner, usable)
        first_thread = lanes.binary("and", thread.equals(0), usable)
        for n, out_pointer in zip(every, of_head(out, 4 * value_dim), strict=True):
            largest, *others = lanes.load(lanes.shared() + (maxima + 16 * n), 4)
            for bits in others:
                largest = lanes.select(bits > largest, bits, largest)
            up, down = power_of_two_scale(lanes, largest)
            stored = lanes.pack_half(u[n] * down, u[n] * down)
            u_hat = lanes.unpack_half(stored)[0] * up
            result = lanes.select(usable, lanes.fma(u_hat, kq, before[n]), 0.0)
            lanes.store(out_pointer + column * 4, [result], when=owner)
            lanes.store_half(value_ring[n] + (live * value_dim + column) * 2, stored, when=writes)
            lanes.store(scale_ring[n] + live * 4, [up], when=first_thread)
            lanes.store(decay_ring[n] + live * 4, [g_new[n]], when=first_thread)
        return [next_live, later_live]

    def start(item: Value) -> list[Value]:
        request_codes(item)
        return [position_of(item), position_of(item + lanes.workers)]

    lanes.for_items(items, start, append)
