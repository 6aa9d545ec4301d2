"""Lane programs: kernels written per CUDA thread, run by Mosaic GPU on the card and by NumPy on a CPU.

The append kernel is a chain of very small steps (two mat-vecs, twenty dot products, one outer sum) that has to take about
a microsecond per head. What decides its speed is which lane holds which element, and Pallas' array layouts cannot say
that 16 consecutive key channels of a value row belong to one lane. So the bodies are written one level lower, in the
vocabulary of this package: 32-bit registers, vector loads, warp shuffles and warp-level matrix products. A program is a
Python function of a `Lanes` object; two objects exist:

  MosaicLanes    emits MLIR inside a `plgpu.kernel` body (`plgpu.inline_mgpu`): what runs on the GPU;
  EmulatedLanes  runs all threads of one worker in lock step on NumPy arrays: what the CPU tests run, lane for lane.

A *worker* is one or more warpgroups that walk over items (heads) together, with their own barrier and shared memory;
several workers may share a block, which also tells the compiler how many registers a thread may have.

Rules a program keeps: control flow depends on Python values, on `lanes.for_items`, or on `lanes.when(condition)` with a
condition that is equal in all threads of a warp; every register is 32 bits wide (`f32`, `i32`), conditions are `i1`.
"""

from pallas_kernels.lanes.emulator import EmulatedLanes as EmulatedLanes
from pallas_kernels.lanes.emulator import emulate as emulate
from pallas_kernels.lanes.value import Pointer as Pointer
from pallas_kernels.lanes.value import Value as Value
