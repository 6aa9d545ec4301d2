"""What one head's fold reads, copied to shared memory while the head before it is being folded.

Rows of 16-bit tables are padded by 16 bytes and the chunks of a code row are rotated by the line of lanes that will read
it, so that the lanes of a warp find what they read together in different banks.
"""

import dataclasses
from typing import Any

from pallas_kernels.fold.operands import Place, row_bytes
from pallas_kernels.lanes.value import Lanes, Pointer, Value

CHUNK = 16  # bytes of one asynchronous copy


@dataclasses.dataclass(frozen=True)
class Table:
    """An array of the state: its rows per head, and how far apart they are in shared memory."""

    rows: int
    row_bytes: int
    stride: int

    @property
    def chunks(self) -> int:
        return self.rows * self.row_bytes // CHUNK


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The tables of one worker, from byte `start` of its shared memory on. Sizes as in `FoldSpec`."""

    key_dim: int
    value_dim: int
    window: int
    rank: int
    start: int

    def tables(self) -> dict[str, Table]:
        k, v, window, rank = self.key_dim, self.value_dim, self.window, self.rank
        return dict(
            codes=Table(v, k, k), ring_keys=Table(window, 2 * k, row_bytes(k)),
            ring_values=Table(window, 2 * v, row_bytes(v)), ring_scales=Table(1, 4 * window, 4 * window),
            ring_log_decays=Table(1, 4 * window, 4 * window), row_scales=Table(1, 4 * k, 4 * k),
            column_scales=Table(1, 4 * v, 4 * v), compensator_keys=Table(rank, 2 * k, row_bytes(k)),
            compensator_values=Table(rank, 2 * v, row_bytes(v)),
        )  # fmt: skip

    def places(self) -> dict[str, int]:
        """Byte offset of each table, and the end."""
        places, end = {}, self.start
        for name, table in self.tables().items():
            places[name], end = end, end + table.rows * table.stride
        return places | {"end": end}

    def fetch(self, lanes: Lanes, arrays: dict[str, Any], rows: dict[str, Value], thread: Value, wanted: Value) -> None:
        """Starts the copies of one head; `rows` are the heads (or key heads) to take from each array."""
        for name, table in self.tables().items():
            source = lanes.at(arrays[name], rows[name], table.rows * table.row_bytes)
            for first in range(0, table.chunks, lanes.threads):
                index = thread + first
                when = wanted
                if first + lanes.threads > table.chunks:
                    when = lanes.binary("and", wanted, index < table.chunks)
                    index = lanes.select(when, index, 0)
                lanes.copy_async(self._target(lanes, name, table, index), source + index * CHUNK, when=when)

    def _target(self, lanes: Lanes, name: str, table: Table, index: Value) -> Pointer:
        per_row = table.row_bytes // CHUNK
        row, chunk = index // per_row, index % per_row
        if name == "codes":
            chunk = (chunk + row // (self.value_dim // 8) * 2) % per_row
        return lanes.shared(row * table.stride + chunk * CHUNK) + self.places()[name]

    def table(self, lanes: Lanes, name: str) -> Pointer:
        return lanes.shared(self.places()[name])

    def codes_of(self, lanes: Lanes, place: Place) -> Pointer:
        """The lane's eight codes in its first value row; the next rows follow K bytes apart."""
        chunk = (place.warp * 2 + (place.quad >> 1) + place.line * 2) % (self.key_dim // CHUNK)
        row = place.line * (self.value_dim // 8 * self.key_dim)
        return lanes.shared(row + chunk * CHUNK + (place.quad & 1) * 8) + self.places()["codes"]
