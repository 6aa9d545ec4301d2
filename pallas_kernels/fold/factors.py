"""Compensators on their way to and from memory, and whether a fold keeps the previous ones (`LeapConfig.refit_gain`)."""

import dataclasses
from collections.abc import Callable

from pallas_kernels.fold.operands import Operands, OverKeys, OverValues, Place, Tiles, negative, row_bytes
from pallas_kernels.fold.spec import FoldSpec
from pallas_kernels.lanes.value import Lanes, Pointer, Value


@dataclasses.dataclass(frozen=True)
class Factors:
    """Compensators as threads hold them: for each r one word, the fp16 key factor at key `thread` and, above it, the value
    factor at value `thread`."""

    lanes: Lanes
    spec: FoldSpec
    place: Place

    def load(self, keys: Pointer, values: Pointer, decay: Value) -> list[Value]:
        """The compensators of two tables in shared memory, decayed."""
        result = []
        for r in range(self.spec.rank):
            key, value = (
                self.lanes.unpack_half(self.lanes.load_small(table + self.place.thread * 2 + r * row_bytes(size), 2))[0]
                for table, size in ((keys, self.spec.key_dim), (values, self.spec.value_dim))
            )
            result.append(self.lanes.pack_half(key * decay, value))
        return result

    def store(self, keys: Pointer, values: Pointer, words: list[Value]) -> None:
        """Writes them to memory."""
        keys, values = (pointer + self.place.thread * 2 for pointer in (keys, values))
        for r, word in enumerate(words):
            self.lanes.store_half(keys + 2 * r * self.spec.key_dim, word)
            self.lanes.store_half(values + 2 * r * self.spec.value_dim, word >> 16)

    def share(self, name: str, words: list[Value], key_unit: Value, value_unit: Value) -> None:
        """Puts the factors in shared memory, multiplied by powers of two."""
        places = self.spec.places()
        keys, values = (self.lanes.shared(self.place.thread * 2) + places[f"{name}_{x}"] for x in ("keys", "values"))
        for r, word in enumerate(words):
            key, value = self.lanes.unpack_half(word)
            word = self.lanes.pack_half(key * key_unit, value * value_unit)
            self.lanes.store_half(keys + r * row_bytes(self.spec.key_dim), word)
            self.lanes.store_half(values + r * row_bytes(self.spec.value_dim), word >> 16)

    def operands(self, operands: Operands, name: str) -> tuple[OverKeys, Callable[[int], OverValues]]:
        """Of the factors in shared memory: over keys, and over eight value rows from a given one on."""
        places = self.spec.places()
        keys, values = (self.lanes.shared(places[f"{name}_{x}"]) for x in ("keys", "values"))
        return operands.factor_keys(keys), lambda start: operands.factor_values(values, start)


def keep_previous(
    lanes: Lanes, spec: FoldSpec, place: Place, operands: Operands, tiles: Tiles, factors: Factors
) -> Value:
    """`leapquant_jax.fold._keep_unless_better`: whether the previous compensators stay; `tiles` are their residual then.

    The residual against them is R + P_new - P_previous: one product of 16 summation indices per tile. Value factors are
    shared with their signs turned.
    """
    new_over_keys, new_over_values = factors.operands(operands, "new")
    old_over_keys, old_over_values = factors.operands(operands, "previous")
    over_keys = [a + b for a, b in zip(negative(new_over_keys), old_over_keys, strict=True)]

    def over_values(start: int) -> OverValues:
        return [a + b for a, b in zip(new_over_values(start), old_over_values(start), strict=True)]

    # Of the new residual, of the previous compensators'; by accumulator register, so that the additions overlap.
    squares = [[lanes.constant(0.0, "f32")] * 4 for _ in range(2)]
    for start in range(0, spec.tile, 8):
        for values, fours in zip(over_values(start), tiles[start // 2 :], strict=False):
            others = [lanes.mma_f16(four, values, keys) for four, keys in zip(fours, over_keys, strict=True)]
            for which, part in enumerate((fours, others)):
                for four in part:
                    squares[which] = [lanes.fma(x, x, total) for x, total in zip(four, squares[which], strict=True)]
    squares = [(a + b) + (c + d) for a, b, c, d in squares]
    [mine] = lanes.scatter_sum(squares, (16,))
    mine = lanes.all_sum(mine, (1, 2, 4, 8))
    energies = spec.places()["energies"]
    target = lanes.shared(place.warp * 8 + (place.lane >> 4) * 4) + energies
    lanes.store(target, [mine], when=(place.lane & 15).equals(0))
    lanes.barrier()
    parts = [lanes.floats(lanes.load(lanes.shared(energies + 8 * w), 2)) for w in range(spec.warps)]
    new_energy, previous_energy = parts[0]
    for a, b in parts[1:]:
        new_energy, previous_energy = new_energy + a, previous_energy + b
    keep = new_energy >= previous_energy * (1.0 - spec.refit_gain)  # a NaN refits
    over_keys = [[lanes.select(keep, word, 0) for word in pair] for pair in over_keys]
    for start in range(0, spec.tile, 8):
        operands.add(tiles[start // 2 : start // 2 + 4], over_values(start), over_keys)
    return keep
