"""Where jax 0.11.2 and 0.12 (and this package's use of their unstable Mosaic GPU API) meet: one call.

Everything the kernels need from Pallas is `launch`. Importing this module does not need a GPU, and on a CPU the result
still traces and lowers to cuda; only running it needs the card.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels.lanes.emulator import emulate
from pallas_kernels.lanes.mosaic import MosaicLanes

WARPGROUP = 128  # threads


def launch(
    program: Callable[..., None],
    *,
    name: str,
    blocks: int,
    workers_per_block: int,
    threads: int,
    shared_bytes: int,
    inputs: Sequence[jax.Array],
    updates: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct] = (),
    interpret: bool = False,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Runs `program(lanes, *inputs, *updates, *outputs)` once per worker.

    Args:
      program: a lane program; arrays arrive as references into global memory.
      name: of the kernel, as profilers show it.
      blocks: size of the grid; one dimension, so up to 2^31 - 1.
      workers_per_block: workers that share a block. ptxas gives each thread at most 65,536 / (threads of the block)
        registers, and this is the only way to tell it: Mosaic sets no register limit.
      threads: per worker, whole warps; those of a block must be a multiple of 128.
      shared_bytes: of scratch shared memory, per worker.
      inputs: arrays that are only read.
      updates: arrays changed in place. XLA copies one first unless its buffer may be reused (donated, or carried by a
        loop).
      outputs: shapes of new arrays; the program must write every element.
      interpret: run the same program on NumPy instead, slowly and not under jit (see `lanes.emulator`).

    Returns:
      (updated arrays, new arrays).
    """
    if threads * workers_per_block % WARPGROUP:
        raise ValueError(f"threads of a block must be a multiple of {WARPGROUP}, got {threads} x {workers_per_block}")
    shared_bytes = -(-shared_bytes // 16) * 16
    if interpret:
        memory = [np.array(x) for x in (*inputs, *updates)] + [np.full(x.shape, np.nan, x.dtype) for x in outputs]
        emulate(program, memory, workers=blocks * workers_per_block, threads=threads, shared_bytes=shared_bytes)
        changed = [jnp.asarray(x) for x in memory[len(inputs) :]]
        return changed[: len(updates)], changed[len(updates) :]

    arrays = len(inputs) + len(updates) + len(outputs)

    def body(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        def run(_: Any, *memory: Any) -> None:
            lanes = MosaicLanes(threads, blocks, workers_per_block, shared_bytes, memory[arrays])
            program(lanes, *memory[:arrays])

        run(*refs)

    body.__name__ = name
    groups = threads * workers_per_block // WARPGROUP
    kernel = plgpu.kernel(
        body,
        out_type=tuple(outputs),
        scratch_types=[plgpu.SMEM((shared_bytes // 4 * workers_per_block,), jnp.int32)],
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        num_threads=groups if groups > 1 else None,
        thread_name="warpgroup" if groups > 1 else None,
    )
    refs = [jax.new_ref(x) for x in updates]
    new = kernel(*inputs, *refs)
    return [jax.freeze(ref) for ref in refs], list(new)


def over_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `vmap` of a function whose arguments and results all start with the batch axis a call on a longer batch.

    A kernel knows its place in the grid; batching its launch by another grid axis would be wrong, and slower.
    """
    call = jax.custom_batching.custom_vmap(function)

    @call.def_vmap
    def rule(size: int, batched: Any, *args: Any) -> tuple[Any, Any]:
        def merge(is_batched: bool, x: jax.Array) -> jax.Array:
            x = x if is_batched else jnp.broadcast_to(x[None], (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        out = call(*jax.tree.map(merge, tuple(batched), args))
        out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return call
