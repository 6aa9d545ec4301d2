"""Append on Hopper: one launch per layer and token. The XLA function it must equal is `leapquant_jax.append.append`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from leapquant_jax.config import LeapConfig
from leapquant_jax.state import LeapState
from pallas_kernels.append.program import THREADS, AppendSpec, append_program
from pallas_kernels.compat import launch, over_rows
from pallas_kernels.support import boundary_leaves
from pallas_kernels.tuning import Launch, choose_launch


def append(
    config: LeapConfig, state: LeapState, q: Array, k: Array, v: Array, g: Array, beta: Array,
    active: Array | None = None, *, tuning: Launch | None = None, interpret: bool = False,
) -> tuple[LeapState, Array]:  # fmt: skip
    """Appends one record to every active row and reads the output after the write; never folds.

    Args:
      config, state: what `pallas_kernels.supports` accepts. The ring is updated in place where XLA owns its buffer
        (a donated argument, or the carry of a loop); nothing else of the state is written but the position.
      q, k: [B, G, K]; v: [B, H, V]; float32 or bfloat16 are read as they are, other dtypes are converted first.
      g, beta: [B, H].
      active: bool [B], or None for all. A row that is inactive, or whose position is not in [0, P), stays as it is and
        outputs 0.
      tuning: launch parameters; None takes them from the table.
      interpret: run the kernel's program on NumPy, outside of jit: for tests without a GPU.

    Returns:
      (state, output [B, H, V] fp32).
    """
    if state.batch == 0:
        return state, jnp.zeros((0, state.num_heads, state.value_dim), jnp.float32)
    function = functools.partial(_append, config, tuning, interpret)
    return (function if interpret else over_rows(function))(state, q, k, v, g, beta, active)


def _append(
    config: LeapConfig, tuning: Launch | None, interpret: bool, state: LeapState, q: Array, k: Array, v: Array, g: Array,
    beta: Array, active: Array | None,
) -> tuple[LeapState, Array]:  # fmt: skip
    batch, heads = state.batch, state.num_heads
    if not (q.dtype == k.dtype and q.dtype in (jnp.float32, jnp.bfloat16)):
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    v = v if v.dtype in (jnp.float32, jnp.bfloat16) else v.astype(jnp.float32)
    tuning = tuning or choose_launch("append", batch * heads, heads // state.num_key_heads)
    spec = AppendSpec(
        count=batch * heads, heads=heads, key_heads=state.num_key_heads, key_dim=state.key_dim, value_dim=state.value_dim,
        window=config.window, rank=config.rank, masked=active is not None,
        bfloat_qk=q.dtype == jnp.bfloat16, bfloat_v=v.dtype == jnp.bfloat16, pair=tuning.heads_per_item,
    )  # fmt: skip
    mask = state.position if active is None else active.astype(jnp.int8)
    (ring_keys, ring_values, ring_scales, ring_log_decays), (out,) = launch(
        lambda lanes, *arrays: append_program(spec, lanes, *arrays),
        name="leapquant_append",
        blocks=tuning.blocks,
        workers_per_block=tuning.workers_per_block,
        threads=THREADS,
        shared_bytes=spec.shared_bytes,
        inputs=[
            *boundary_leaves(state).values(),
            state.position, mask, q, k, v, g.astype(jnp.float32), beta.astype(jnp.float32),
        ],
        updates=[state.ring_keys, state.ring_values, state.ring_scales, state.ring_log_decays],
        outputs=[jax.ShapeDtypeStruct((batch, heads, state.value_dim), jnp.float32)],
        interpret=interpret,
    )  # fmt: skip
    usable = (state.position >= 0) & (state.position < config.window)
    advanced = (usable if active is None else usable & active).astype(jnp.int32)
    state = dataclasses.replace(
        state, ring_keys=ring_keys, ring_values=ring_values, ring_scales=ring_scales, ring_log_decays=ring_log_decays,
        position=state.position + advanced,
    )  # fmt: skip
    return state, out
