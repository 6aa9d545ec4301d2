"""Fragments of 16 x 8 x 16 products whose accumulators are a lane's part of the state.

A warp holds all V value rows of 32 keys, a lane V/8 x 8 entries: the value rows `line * V/8 + i` and the keys
`32 warp + 8 quad + kk`. Accumulator tile [m][n] is the rows 2m, 2m+1 and the keys 2n, 2n+1 of that part: row `line` of
the product is value row 2m, row `line + 8` is 2m+1, column 2 quad (+ 1) is key 2n (2n+1). The numbering of rows, columns
and of the summation index inside a product is free, so nothing ever has to be moved between lanes to fit.

An operand over values is, per m, two registers for 8 summation indices (compensators or records); one over keys is, per
n, one register for 8 indices. A product sums over 8 indices, or over 16 with two such operands side by side.
"""

import dataclasses

from pallas_kernels.lanes.value import Lanes, Pointer, Value

OverKeys = list[list[Value]]  # [n][half of the summation index, or all of it]
OverValues = list[list[Value]]  # [m][row in the tile, half of the summation index]
Tiles = list[list[list[Value]]]  # [m][n][accumulator register]

_SIGNS = -0x7FFF8000  # 0x80008000: the signs of two fp16


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a thread stands in its worker: warp, lane, and the lane's `line` (0-7) and `quad` (0-3)."""

    thread: Value
    warp: Value
    lane: Value
    line: Value
    quad: Value

    @staticmethod
    def of(thread: Value) -> "Place":
        lane = thread & 31
        return Place(thread, thread >> 5, lane, lane >> 2, lane & 3)


def row_bytes(size: int) -> int:
    """Distance of two rows of fp16 in shared memory, chosen so that neighbouring rows start in different banks."""
    return 2 * size + 16


class Operands:
    """Loads operands for one head size from tables in shared memory; `rank` compensators, `window` records."""

    def __init__(self, lanes: Lanes, place: Place, *, key_dim: int, value_dim: int, rank: int, window: int):
        self.lanes, self.place = lanes, place
        self.key_dim, self.value_dim, self.rank, self.window = key_dim, value_dim, rank, window
        self.none = lanes.constant(0, "i32")
        # As a column of an operand over keys, the lane is key 8 (line / 2) + 2n + line % 2 of its warp.
        self.first_key = place.warp * 32 + (place.line >> 1) * 8
        self.half = lanes.select((place.line & 1).equals(0), lanes.constant(0x5410, "i32"), 0x7632)

    # -- over keys
    def key_rows(self, keys: Pointer, j: int, count: Value | int) -> list[list[Value]]:
        """Words of rows j + 2 quad and the next of a table of keys; rows from `count` on are zero."""
        index = [self.place.quad * 2 + (j + i) for i in range(2)]
        place = [keys + (i * row_bytes(self.key_dim) + self.first_key * 2) for i in index]
        return [self.lanes.load(p, 4, when=i < count) for p, i in zip(place, index, strict=True)]

    def pairs(self, rows: list[list[Value]]) -> list[Value]:
        """The operand made of two rows, one register per n."""
        return [self.lanes.permute_bytes(rows[0][n], rows[1][n], self.half) for n in range(4)]

    def factor_keys(self, keys: Pointer) -> OverKeys:
        """The R key factors, as one half."""
        return [[word] for word in self.pairs(self.key_rows(keys, 0, self.rank))]

    def weighted(self, rows: list[list[list[Value]]], weight: Value) -> tuple[list[OverKeys], list[OverKeys]]:
        """Keys of records times their weights (lane j holds that of record j), as a sum of two operands."""
        lanes = self.lanes
        high, low = ([[[] for _ in range(4)] for _ in range(-(-len(rows) // 2))] for _ in range(2))
        for index, two_rows in enumerate(rows):
            weights = [lanes.shuffle(weight, self.place.quad * 2 + (8 * index + i)) for i in range(2)]
            for n, word in enumerate(self.pairs(two_rows)):
                pair = [x * w for x, w in zip(lanes.unpack_half(word), weights, strict=True)]
                top, rest = split(lanes, *pair)
                high[index // 2][n].append(top)
                low[index // 2][n].append(rest)
        if len(rows) % 2:
            for n in range(4):
                high[-1][n].append(self.none)
                low[-1][n].append(self.none)
        return high, low

    def diagonal(self, entries: list[Value]) -> OverKeys:
        """Diag of one fp32 entry per key of the lane, as a sum of two operands of 8 summation indices each."""
        lanes, zero = self.lanes, self.lanes.constant(0.0, "f32")
        mine = self.place.quad.equals(self.place.line >> 1)  # column `line` is the key of this quad
        odd = (self.place.line & 1).differs(0)
        result = []
        for n in range(4):
            pair = lanes.select(odd, zero, entries[2 * n]), lanes.select(odd, entries[2 * n + 1], zero)
            result.append([lanes.select(mine, word, 0) for word in split(lanes, *pair)])
        return result

    # -- over values
    def _values(self, values: Pointer, start: int, j: int, count: Value | int) -> OverValues:
        index = [self.place.quad * 2 + (j + i) for i in range(2)]
        row = self.place.line * (self.value_dim // 8) + start
        place = [values + (i * row_bytes(self.value_dim) + row * 2) for i in index]
        a, b = (self.lanes.load(p, 4, when=i < count) for p, i in zip(place, index, strict=True))
        return [[self.lanes.permute_bytes(a[m], b[m], picks) for picks in (0x5410, 0x7632)] for m in range(4)]

    def factor_values(self, values: Pointer, start: int) -> OverValues:
        """Value factors at eight value rows of the lane, from row `start` on."""
        return self._values(values, start, 0, self.rank)

    def record_values(self, ring: Pointer, start: int, j: int, live: Value) -> OverValues:
        """Records j to j + 15 at eight value rows of the lane."""
        first = self._values(ring, start, j, live)
        if j + 8 >= self.window:
            return [[*pair, self.none, self.none] for pair in first]
        return [a + b for a, b in zip(first, self._values(ring, start, j + 8, live), strict=True)]

    def code_values(self, word: Value) -> list[Value]:
        """Four codes of a value row as two words of fp16: 1024 + (code + 128), then exact subtraction."""
        flipped = word ^ -0x7F7F7F80  # 0x80808080: signed bytes to offset binary
        bias = self.lanes.constant(0x64806480, "i32")  # 1152
        return [
            self.lanes.binary(
                "sub_half", self.lanes.permute_bytes(flipped, self.lanes.constant(0x64646464, "i32"), s), bias
            )
            for s in (0x4140, 0x4342)
        ]

    def add_row(self, fours: list[list[Value]], over_values: list[Value], over_keys: OverKeys) -> None:
        """Adds the products of two value rows of the lane with its keys to a row of tiles, in place."""
        for n, keys in enumerate(over_keys):
            fours[n] = self.lanes.mma_f16(fours[n], over_values, keys)

    def add(self, tiles: Tiles, over_values: OverValues, over_keys: OverKeys) -> None:
        """`add_row` for every row of `tiles`."""
        for fours, values in zip(tiles, over_values, strict=True):
            self.add_row(fours, values, over_keys)


def split(lanes: Lanes, a: Value, b: Value) -> tuple[Value, Value]:
    """Two f32 as a sum of two words of fp16, 22 bits of each."""
    high = lanes.pack_half(a, b)
    rest = [x - h for x, h in zip((a, b), lanes.unpack_half(high), strict=True)]
    return high, lanes.pack_half(rest[0], rest[1])


def negative(operand: list[list[Value]]) -> list[list[Value]]:
    """The operand with all signs turned."""
    return [[word ^ _SIGNS for word in words] for words in operand]
