"""Static sizes of a fold, and what of it lies where in a worker's shared memory."""

import dataclasses

from pallas_kernels.fold.gram import Exchange
from pallas_kernels.fold.inputs import Inputs
from pallas_kernels.fold.operands import row_bytes


@dataclasses.dataclass(frozen=True)
class FoldSpec:
    """Static sizes: heads H, key heads G, K, V, window P, rank R <= 8, batch; subspace iterations; `refit_gain` and `smoothing`
    of `LeapConfig`, the latter 0.5 or 1."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    window: int
    rank: int
    batch: int
    iterations: int = 1
    refit_gain: float = 0.0
    smoothing: float = 0.5

    @property
    def warps(self) -> int:
        return self.key_dim // 32

    @property
    def threads(self) -> int:
        """Also K and V: where one thread finishes one key or one value column."""
        return 32 * self.warps

    @property
    def tile(self) -> int:
        """Value rows per lane."""
        return self.value_dim // 8

    @property
    def basis_words(self) -> int:
        """Words of one column of the value basis: four lanes of a line, `tile` words each, padded against bank conflicts."""
        return 4 * (self.tile + 4)

    def places(self) -> dict[str, int]:
        """Byte offsets in shared memory, and the end."""
        k, v, r, w = self.key_dim, self.value_dim, self.rank, self.warps
        sizes = dict(
            sums=4 * w * r * (v + 4), keys=4 * r * (k + 1), key_basis=2 * 8 * k, value_basis=4 * 8 * self.basis_words,
            new_keys=r * row_bytes(k), new_values=r * row_bytes(v), columns=4 * v, energies=4 * 2 * w,
            exchange=Exchange.bytes(r, w),
        )  # fmt: skip
        if self.refit_gain:
            sizes |= dict(previous_keys=r * row_bytes(k), previous_values=r * row_bytes(v))
        places, end = {}, 0
        for name, size in sizes.items():
            places[name], end = end, end + -(-size // 16) * 16
        return places | {"end": end}

    @property
    def inputs(self) -> Inputs:
        return Inputs(self.key_dim, self.value_dim, self.window, self.rank, self.places()["end"])

    @property
    def shared_bytes(self) -> int:
        return self.inputs.places()["end"]
