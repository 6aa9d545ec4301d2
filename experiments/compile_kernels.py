"""Compiles the kernels for an H200 on a machine without a GPU, and prints what ptxas says: registers, spills, temporaries.

    pip install "jax[cuda13]"                      # the plugin holds the compiler; no driver and no card are needed
    python -m experiments.compile_kernels --kernel=append --batch=512

ptxas has to be on the path (it comes with CUDA). `--dump_dir` keeps the PTX as well; `ptxas -arch=sm_90a` and nvdisasm
turn it into machine code to read. This is how register counts, spills and instruction counts of every variant were
compared before any of them was run.
"""

import dataclasses
import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.experimental import topologies

import leapquant_jax as lq
import pallas_kernels
from pallas_kernels.shapes import SHAPES

_KERNEL = flags.DEFINE_enum("kernel", "append", ["append", "fold"], "Which kernel.")
_SHAPE = flags.DEFINE_enum("shape", "qwen3.5-9b", list(SHAPES), "Which named shape.")
_METHOD = flags.DEFINE_enum("method", "leapquant-int8", ["leapquant-int8", "leapquant-int8-paper"], "Whose config.")
_BATCH = flags.DEFINE_integer("batch", 512, "Batch size.")
_LAUNCH = flags.DEFINE_list("launch", None, "Blocks, workers per block, heads per item; the tuning table if not given.")
_DUMP_DIR = flags.DEFINE_string(
    "dump_dir", None, "Where to leave PTX and ptxas' report; a temporary folder if not given."
)

_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 62914560  device_memory_size: 150000000000
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""


def main(_: list[str]) -> None:
    dump = pathlib.Path(_DUMP_DIR.value or tempfile.mkdtemp())
    dump.mkdir(parents=True, exist_ok=True)
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(dump)
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    shape, batch = SHAPES[_SHAPE.value], _BATCH.value
    launch = None
    if _LAUNCH.value:
        launch = pallas_kernels.Launch(*map(int, _LAUNCH.value))
    method = lq.get_method(_METHOD.value)
    assert isinstance(method, lq.LeapMethod)
    config = dataclasses.replace(method.config, rank=shape.rank, window=shape.window)
    state = jax.eval_shape(
        lambda: lq.init_state(
            config, batch=batch, num_heads=shape.heads, num_key_heads=shape.key_heads, key_dim=shape.key_dim,
            value_dim=shape.value_dim,
        )
    )  # fmt: skip
    q = jax.ShapeDtypeStruct((batch, shape.key_heads, shape.key_dim), jnp.float32)
    v = jax.ShapeDtypeStruct((batch, shape.heads, shape.value_dim), jnp.float32)
    g = jax.ShapeDtypeStruct((batch, shape.heads), jnp.float32)
    if _KERNEL.value == "append":
        function, args = lambda s, *t: pallas_kernels.append(config, s, *t, tuning=launch), (state, q, q, v, g, g)
    else:
        rows = jax.ShapeDtypeStruct((batch,), jnp.bool_)
        function, args = lambda s, r: pallas_kernels.fold(config, s, r, tuning=launch), (state, rows)

    target = topologies.get_topology_desc("h200", platform="cuda", target_config=_H200, topology="1x1x1")
    sharding = jax.sharding.SingleDeviceSharding(target.devices[0])
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    lowered = jax.jit(function, donate_argnums=0).trace(*args).lower(lowering_platforms=("cuda",))
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    for report in sorted(dump.glob("*.ptxas")):
        print(report.read_text())
    print(f"temporaries {memory.temp_size_in_bytes} bytes, updated in place {memory.alias_size_in_bytes} bytes; {dump}")


if __name__ == "__main__":
    app.run(main)
