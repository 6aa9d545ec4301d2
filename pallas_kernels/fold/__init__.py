"""Fold on Hopper: one launch closes the window of every full row. It must equal `leapquant_jax.fold.fold_rows`."""

import dataclasses
import functools

import jax.numpy as jnp
from jax import Array

from leapquant_jax.config import LeapConfig
from leapquant_jax.fit import start_directions
from leapquant_jax.state import LeapState
from pallas_kernels.compat import launch, over_rows
from pallas_kernels.fold.program import fold_program
from pallas_kernels.fold.spec import FoldSpec
from pallas_kernels.support import boundary_leaves
from pallas_kernels.tuning import Launch, choose_launch


def fold(
    config: LeapConfig, state: LeapState, rows: Array, *, tuning: Launch | None = None, interpret: bool = False
) -> LeapState:
    """Rebuilds, refits and rounds the rows where `rows` holds, and empties their ring; other rows keep every bit.

    Args:
      config, state: what `pallas_kernels.supports` accepts. The boundary state is updated in place where XLA owns its
        buffers (donated arguments, or the carry of a loop); no other copy of a state exists at any time.
      rows: bool [B].
      tuning: launch parameters; None takes them from the table.
      interpret: run the kernel's program on NumPy, outside of jit: for tests without a GPU.

    Returns:
      The state, with position 0 in the folded rows.
    """
    if state.batch == 0:
        return state
    function = functools.partial(_fold, config, tuning, interpret)
    return (function if interpret else over_rows(function))(state, rows)


def _fold(config: LeapConfig, tuning: Launch | None, interpret: bool, state: LeapState, rows: Array) -> LeapState:
    batch = state.batch
    tuning = tuning or choose_launch(f"fold {state.key_dim}", batch * state.num_heads, 1)
    spec = FoldSpec(
        heads=state.num_heads, key_heads=state.num_key_heads, key_dim=state.key_dim, value_dim=state.value_dim,
        window=config.window, rank=config.rank, batch=batch, iterations=config.fit_iterations,
        refit_gain=config.refit_gain, smoothing=config.smoothing,
    )  # fmt: skip
    # The kernel's workers share out the heads of the full rows only; the n-th full row is found in the running count.
    counted = jnp.cumsum(rows.astype(jnp.int32))
    boundary = boundary_leaves(state)
    updated, _ = launch(
        lambda lanes, *arrays: fold_program(spec, lanes, *arrays),
        name="leapquant_fold",
        blocks=tuning.blocks,
        workers_per_block=tuning.workers_per_block,
        threads=spec.threads,
        shared_bytes=spec.shared_bytes,
        inputs=[
            counted, jnp.asarray(start_directions(config.rank, state.value_dim)), state.position,
            state.ring_keys, state.ring_values, state.ring_scales, state.ring_log_decays,
        ],
        updates=list(boundary.values()),
        interpret=interpret,
    )  # fmt: skip
    position = jnp.where(rows, jnp.int32(0), state.position)
    return dataclasses.replace(state, **dict(zip(boundary, updated, strict=True)), position=position)
