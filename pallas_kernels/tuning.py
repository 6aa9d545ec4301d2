"""How many workers share a block, and how many blocks are launched, by device kind and number of heads.

Few heads: one worker per block, spread over the multiprocessors; the time is the latency of one head. Many heads: one
block per multiprocessor whose workers stay and walk over the heads, so that the next head's codes are always in flight.
More workers hide more latency; fewer leave each thread more registers (65,536 / threads of the block).
"""

import dataclasses
import math

import jax


@dataclasses.dataclass(frozen=True)
class Launch:
    """Blocks; workers in each; for append how many value heads of one key head a worker takes together."""

    blocks: int
    workers_per_block: int
    heads_per_item: int = 1


# kernel -> device kind -> (largest number of heads, workers per block, blocks per multiprocessor, heads per item), the
# first that fits. Measured on one H200 (results/kernels); an H100 is the same chip with slower memory.
_APPEND = ((2048, 1, 4, 1), (2**31, 4, 1, 2))
_FOLD_128 = ((264, 1, 2, 1), (2**31, 3, 1, 1))
_FOLD_64 = ((528, 2, 2, 1), (2**31, 6, 1, 1))
_TABLE: dict[str, dict[str, tuple[tuple[int, int, int, int], ...]]] = {
    "append": {"NVIDIA H200": _APPEND, "sm_90": _APPEND},
    "fold 128": {"NVIDIA H200": _FOLD_128, "sm_90": _FOLD_128},
    "fold 64": {"NVIDIA H200": _FOLD_64, "sm_90": _FOLD_64},
}
_MULTIPROCESSORS = 132  # of H100 SXM and H200; used when tracing for a GPU on a machine without one


def choose_launch(kernel: str, heads: int, heads_per_key_head: int) -> Launch:
    """Launch parameters for a number of heads (batch x value heads) on the default device."""
    device = jax.devices()[0]
    multiprocessors = getattr(device, "core_count", None) or _MULTIPROCESSORS
    table = _TABLE[kernel].get(device.device_kind, _TABLE[kernel]["sm_90"])
    workers, per_multiprocessor, together = next(rest for largest, *rest in table if heads <= largest)
    together = math.gcd(together, heads_per_key_head)
    return Launch(min(-(-heads // (workers * together)), multiprocessors * per_multiprocessor), workers, together)
