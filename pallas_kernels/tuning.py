"""How many workers share a block, and how many blocks are launched, by device kind and number of heads.

Few heads: one worker per block, spread over the multiprocessors; the time is the latency of one head. Many heads: one
block per multiprocessor whose workers stay and walk over the heads, so that the next head's codes are always in flight.
More workers hide more latency; fewer leave each thread more registers (65,536 / threads of the block).
"""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Launch:
    blocks: int
    workers_per_block: int


# kernel -> device kind -> (largest number of heads, workers per block, blocks per multiprocessor), first that fits; measured
# with experiments/bench_kernels.py.
_TABLE: dict[str, dict[str, tuple[tuple[int, int, int], ...]]] = {
    "append": {
        "NVIDIA H200": ((528, 1, 4), (2**31, 6, 1)),
        "sm_90": ((528, 1, 4), (2**31, 6, 1)),
    },
    "fold": {
        "NVIDIA H200": ((2**31, 2, 1),),
        "sm_90": ((2**31, 2, 1),),
    },
}
_MULTIPROCESSORS = 132  # of H100 SXM and H200; used when tracing for a GPU on a machine without one


def choose_launch(kernel: str, heads: int) -> Launch:
    """Launch parameters for a number of heads (batch x value heads) on the default device."""
    device = jax.devices()[0]
    multiprocessors = getattr(device, "core_count", None) or _MULTIPROCESSORS
    table = _TABLE[kernel].get(device.device_kind, _TABLE[kernel]["sm_90"])
    workers, per_multiprocessor = next((w, p) for largest, w, p in table if heads <= largest)
    return Launch(min(-(-heads // workers), multiprocessors * per_multiprocessor), workers)
