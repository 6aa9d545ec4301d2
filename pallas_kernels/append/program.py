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
_EXTRA_ROWS = 9  # of the table of dot products, after the records: 8 compensators and k^ . q


@dataclasses.dataclass(frozen=True)
class AppendSpec:
    """Static sizes: B H value heads in all, heads H, key heads G, K, V, window P, rank R; whether there is an `active` mask;
    which inputs are bfloat16 (otherwise float32)."""

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

    @property
    def rows(self) -> int:
        return self.window + _EXTRA_ROWS

    @property
    def piece_stride(self) -> int:
        """Bytes between the byte planes of the fixed-point vectors; 64 more than a multiple of 128: no bank conflicts."""
        return 192 if self.key_dim == 128 else 64

    @property
    def codes_bytes(self) -> int:
        return self.value_dim * self.key_dim

    @property
    def shared_bytes(self) -> int:
        return self.codes_bytes + WARPS * (8 * self.piece_stride + 16 * self.rows + 2 * self.value_dim) + 4 * WARPS


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
        largest = lanes.select(other > largest, other, largest)  # bit patterns of non-negative floats sort like integers
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
    key_dim, value_dim, window, rank = spec.key_dim, spec.value_dim, spec.window, spec.rank
    value_rows = value_dim // WARPS
    tiles, chunks = value_rows // 16, key_dim // 64
    columns = value_rows // 4  # lanes side by side over the warp's columns, four columns each
    groups = 32 // columns  # of lanes, which share the records among themselves
    span = key_dim // 16  # entries of K per lane in the dot products
    qk_size, v_size = (2 if bfloat else 4 for bfloat in (spec.bfloat_qk, spec.bfloat_v))

    def prefetch(head: Value, wanted: Value) -> list[Value]:
        """Requests what the next item needs first: its codes, most of its bytes, into shared memory, each lane its own; and
        the position (-1: leave the row alone), which is carried in a register."""
        row = head // heads
        thread = lanes.thread_of(head)
        warp, lane = thread >> 5, thread & 31
        codes_of_lane = lanes.at(codes, head, value_dim * key_dim)
        codes_of_lane += (warp * value_rows + (lane >> 2)) * key_dim + (lane & 3) * 16
        slot = lanes.shared(thread * 16)
        for i in range(2 * tiles * chunks):
            m, j, half = i // (2 * chunks), i // 2 % chunks, i % 2
            source = codes_of_lane + ((16 * m + 8 * half) * key_dim + 64 * j)
            lanes.copy_async(slot + i * THREADS * 16, source, when=wanted)
        [live] = lanes.load(lanes.at(position, row, 4), when=wanted)
        if spec.masked:
            live = lanes.select(lanes.load_small(lanes.at(active, row, 1), 1, when=wanted).equals(0), -1, live)
        return [live]

    def append(head: Value, next_head: Value, prefetched: list[Value]) -> list[Value]:
        [live] = prefetched
        thread = lanes.thread_of(head)
        warp, lane = thread >> 5, thread & 31
        quad, line = lane & 3, lane >> 2
        column4, group = warp * value_rows + (lane & (columns - 1)) * 4, lane // columns
        column = column4 + (((lane >> 4) & 1) * 2 + ((lane >> 3) & 1))  # the one this lane finishes
        first = warp * (key_dim // 4) + quad * span
        inside = (lane < key_dim // 4) if key_dim < 128 else None
        usable = lanes.binary("and", live >= 0, live < window)
        live = lanes.select(usable, live, 0)
        key_head = head // repeats  # b G + h // (H/G), because H is a multiple of H/G

        # --- requests, in the order of their use; of the ring only live records
        k_row, q_row = lanes.at(k, key_head, key_dim * qk_size), lanes.at(q, key_head, key_dim * qk_size)
        k4 = _load_floats(lanes, k_row + lane * (4 * qk_size), 4, spec.bfloat_qk, inside)
        q4 = _load_floats(lanes, q_row + lane * (4 * qk_size), 4, spec.bfloat_qk, inside)
        c4 = lanes.floats(lanes.load(lanes.at(row_scales, head, 4 * key_dim) + lane * 16, 4, when=inside))
        key_ring = lanes.at(ring_keys, key_head, 2 * window * key_dim)
        records = [
            lanes.load(key_ring + ((line + 8 * i) * key_dim + first) * 2, span // 2, when=line + 8 * i < live)
            for i in range(window // 8)
        ]
        compensator_row = lanes.at(compensator_keys, head, 2 * rank * key_dim) + (line * key_dim + first) * 2
        compensator = lanes.load(compensator_row, span // 2, when=line < rank)
        decay_ring, scale_ring = lanes.at(ring_log_decays, head, 4 * window), lanes.at(ring_scales, head, 4 * window)
        [log_decay] = lanes.floats(lanes.load(decay_ring + lane * 4, when=lane < live))
        [record_scale] = lanes.floats(lanes.load(scale_ring + lane * 4, when=lane < live))
        value_ring = lanes.at(ring_values, head, 2 * window * value_dim)
        ring_row = value_ring + (group * value_dim + column4) * 2
        fixed_row = lanes.at(compensator_values, head, 2 * rank * value_dim) + (group * value_dim + column4) * 2
        value_terms = [  # (row of the coefficient table, two words holding four fp16)
            (group + i, lanes.load(ring_row + i * value_dim * 2, 2, when=group + i < live)) for i in range(0, window, groups)
        ] + [
            (group + (window + i), lanes.load(fixed_row + i * value_dim * 2, 2, when=group + i < rank))
            for i in range(0, rank, groups)
        ]
        [column_scale] = lanes.floats(lanes.load(lanes.at(column_scales, head, 4 * value_dim) + column * 4))
        v_pointer = lanes.at(v, head, value_dim * v_size) + column * v_size
        v_own = lanes.from_bits(lanes.load_small(v_pointer, 2) << 16 if spec.bfloat_v else lanes.load(v_pointer)[0])
        [g_new] = lanes.floats(lanes.load(lanes.at(g, head, 4)))
        [strength] = lanes.floats(lanes.load(lanes.at(beta, head, 4)))

        # --- fixed-point vectors, through a corner of shared memory private to the warp
        stride = spec.piece_stride
        corner = warp * (8 * stride) + spec.codes_bytes
        k_planes, k_unit = _fixed_point(lanes, [a * b for a, b in zip(c4, k4, strict=True)])
        q_planes, q_unit = _fixed_point(lanes, [a * b for a, b in zip(c4, q4, strict=True)])
        for index, plane in zip((0, 1, 2, 4, 5, 6), k_planes + q_planes, strict=True):
            lanes.store(lanes.shared(corner + lane * 4) + index * stride, [plane], when=inside)
        lanes.warp_barrier()
        vectors = [lanes.load(lanes.shared(corner + line * stride + quad * 16) + 64 * j, 4) for j in range(chunks)]

        # --- both reads of the codes. Columns 2t, 2t+1 of a product belong to the lane with quad t: (b2, b1), (b0, -) of k,
        # then the same of q; columns 3 and 7 hold nothing and get weight 0.
        first_weight = lanes.select((quad & 1).equals(0), lanes.constant(65536.0, "f32"), 1.0)
        second_weight = lanes.select((quad & 1).equals(0), lanes.constant(256.0, "f32"), 0.0)
        reads = spec.codes_bytes + WARPS * 8 * stride
        lanes.copies_done()
        slot = lanes.shared(thread * 16)
        for m in range(tiles):
            acc = [lanes.constant(0, "i32")] * 4
            for j in range(chunks):
                upper, lower = (lanes.load(slot + (2 * (m * chunks + j) + half) * THREADS * 16, 4) for half in range(2))
                for i in (0, 2):
                    acc = lanes.mma_s8(acc, [upper[i], lower[i], upper[i + 1], lower[i + 1]], vectors[j][i : i + 2])
            for half in range(2):
                low, high = lanes.to_float(acc[2 * half]), lanes.to_float(acc[2 * half + 1])
                total = lanes.all_sum(lanes.fma(low, first_weight, high * second_weight), (1,))
                place = (warp * value_rows + line + (16 * m + 8 * half)) * 8 + (quad >> 1) * 4
                lanes.store(lanes.shared(place) + reads, [total], when=(quad & 1).equals(0))

        # --- the registers of the codes are free: request the next head's
        prefetched = prefetch(next_head, next_head < spec.count)

        # --- dot products with the compensators' keys and the live records' keys
        k_span = _load_floats(lanes, k_row + first * qk_size, span, spec.bfloat_qk)
        q_span = _load_floats(lanes, q_row + first * qk_size, span, spec.bfloat_qk)
        table = reads + WARPS * value_rows * 8
        own_table = warp * (spec.rows * 8)
        for table_row, words in [(line + 8 * i, r) for i, r in enumerate(records)] + [(line + window, compensator)]:
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
        lanes.store(lanes.shared(own_table) + (table + (window + 8) * 8), [kq, kq], when=lane.equals(0))
        writes_key = lanes.binary("and", usable, lanes.binary("and", line.equals(0), (head % repeats).equals(0)))
        lanes.store(key_ring + (live * key_dim + first) * 2, rounded, when=writes_key)

        # --- decays, this token's included
        g_new = lanes.maximum(g_new, -128.0)
        total, after = suffix_sums(lanes, log_decay, window, lane)
        whole = lanes.exp(total + g_new)  # Gamma of eq. 10
        weight = lanes.exp(after + g_new) * record_scale

        # --- coefficients of every value row: weight of the record x its dot products, summed over the four warps
        lanes.barrier()
        coefficients = table + WARPS * spec.rows * 8
        for start in range(0, spec.rows, 32):
            table_row = lane + start
            inside_table = table_row < spec.rows
            sums = [lanes.constant(0.0, "f32")] * 2
            for w in range(WARPS):
                part = lanes.load(lanes.shared(table_row * 8) + (table + w * spec.rows * 8), 2, when=inside_table)
                sums = [s + x for s, x in zip(sums, lanes.floats(part), strict=True)]
            factor = lanes.select(table_row < window + 8, whole, 1.0)
            if start < window:
                factor = lanes.select(table_row < window, weight, factor)
            scaled = [s * factor for s in sums]
            lanes.store(lanes.shared(own_table + table_row * 8) + coefficients, scaled, when=inside_table)
        lanes.warp_barrier()

        # --- sum over records and compensators: four columns per lane, then one
        k_sums, q_sums = ([lanes.constant(0.0, "f32")] * 4 for _ in range(2))
        for table_row, words in value_terms:
            pair = lanes.load(lanes.shared(own_table + table_row * 8) + coefficients, 2)
            k_weight, q_weight = lanes.floats(pair)
            values = [x for w in words for x in lanes.unpack_half(w)]
            k_sums = [lanes.fma(x, k_weight, s) for x, s in zip(values, k_sums, strict=True)]
            q_sums = [lanes.fma(x, q_weight, s) for x, s in zip(values, q_sums, strict=True)]
        [k_sum], [q_sum] = lanes.scatter_sum(k_sums, (16, 8)), lanes.scatter_sum(q_sums, (16, 8))
        if groups == 8:
            k_sum, q_sum = lanes.all_sum(k_sum, (4,)), lanes.all_sum(q_sum, (4,))

        # --- correction
        k_code, q_code = lanes.floats(lanes.load(lanes.shared(column * 8) + reads, 2))
        _, kq = lanes.floats(lanes.load(lanes.shared(own_table) + (coefficients + (window + 8) * 8), 2))
        scale = whole * column_scale
        u = strength * (v_own - lanes.fma(k_code, scale * k_unit, k_sum))
        largest = lanes.warp_max(lanes.bits(lanes.abs(u)))
        maxima = coefficients + WARPS * spec.rows * 8
        lanes.store(lanes.shared(warp * 4) + maxima, [largest], when=lane.equals(0))
        lanes.barrier()
        for bits in lanes.load(lanes.shared(maxima), 4):
            largest = lanes.select(bits > largest, bits, largest)
        up, down = power_of_two_scale(lanes, largest)

        # --- output from the rounded record, and the record itself
        stored = lanes.pack_half(u * down, u * down)
        u_hat = lanes.unpack_half(stored)[0] * up
        result = lanes.fma(u_hat, kq, lanes.fma(q_code, scale * q_unit, q_sum))
        owner = (lane & 4).equals(0) if groups == 8 else None
        out_pointer = lanes.at(out, head, 4 * value_dim) + column * 4
        lanes.store(out_pointer, [lanes.select(usable, result, 0.0)], when=owner)
        writes = usable if owner is None else lanes.binary("and", owner, usable)
        lanes.store_half(value_ring + (live * value_dim + column) * 2, stored, when=writes)
        one = lanes.binary("and", thread.equals(0), usable)
        lanes.store(scale_ring + live * 4, [up], when=one)
        lanes.store(decay_ring + live * 4, [g_new], when=one)
        return prefetched

    lanes.for_items(spec.count, lambda head: prefetch(head, head < spec.count), append)
