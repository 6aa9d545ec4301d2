"""The end of a window: rebuild the state, fit compensators, round the residual once, empty the ring.

    S_p = Gamma_{1:p} S^_0 + sum_j Gamma_{j+1:p} k_j u_j^T                                                       (eq. 4)
    S_p = sum_r k~_r u~_r^T + R,    R^ = Diag(c) (Z * B) ~ R                                              (eq. 5 and 7)

The residual is taken against the compensators *as stored*: against the unrounded ones a low-rank head loses a factor of
4 (fp16) to 32 (bf16) in accuracy.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from leapquant_jax.config import LeapConfig
from leapquant_jax.fit import fit_compensators
from leapquant_jax.numerics import HIGHEST, power_of_two_scale, round_and_store, round_to_grid
from leapquant_jax.quantize import quantize
from leapquant_jax.state import LeapState
from leapquant_jax.window import decays, live_records, materialise

# Rows whose dense states are smaller than this together are folded at once.
_SMALLEST_GROUP_BYTES = 4 << 20


def compress(config: LeapConfig, state: LeapState, dense: Array, *, warm: bool = True) -> LeapState:
    """Replaces the boundary state of every row by `dense`, rounded once, with an empty ring.

    Args:
      config: bits, rank, fit, smoothing, ...
      state: supplies the shapes, and the compensators that the fit starts from.
      dense: [B, H, K, V] fp32.
      warm: `dense` is `state` at its current position: the fit starts from its compensators, and may keep them. False
        starts cold, with more iterations.
    """
    position = jnp.zeros_like(state.position)
    if config.boundary_dtype is not None:
        codes = jnp.swapaxes(round_to_grid(dense, config.boundary_dtype), -1, -2).astype(config.boundary_dtype)
        return dataclasses.replace(state, codes=codes, position=position)
    keys = values = None
    if config.rank:
        previous = state.compensator_values if warm else None
        if previous is not None and config.fit == "cold":
            previous = jnp.zeros_like(previous)
        keys, values = fit_compensators(
            dense, previous, rank=config.rank, method=config.fit,
            iterations=config.fit_iterations, dtype=config.compensator_dtype,
        )  # fmt: skip
        residual = _subtract(dense, keys, values)
        if warm and config.refit_gain:
            keys, values, residual = _keep_unless_better(config, state, dense, keys, values, residual)
        dense = residual
    codes, row_scales, column_scales = quantize(config, dense)
    return dataclasses.replace(
        state, codes=codes, row_scales=row_scales, column_scales=column_scales,
        compensator_keys=keys, compensator_values=values, position=position,
    )  # fmt: skip


def _keep_unless_better(
    config: LeapConfig, state: LeapState, dense: Array, keys: Array, values: Array, residual: Array
) -> tuple[Array, Array, Array]:
    """Per head, the new compensators and their residual, or the previous ones where the new gain too little."""
    assert state.compensator_keys is not None and state.compensator_values is not None
    boundary_decay, _ = decays(state.ring_log_decays, live_records(state))
    decayed = state.compensator_keys.astype(jnp.float32) * boundary_decay[:, :, None]
    old_keys = round_and_store(decayed, config.compensator_dtype)[0]
    old_values = state.compensator_values
    old_residual = _subtract(dense, old_keys, old_values)

    scale = power_of_two_scale(jnp.max(jnp.abs(dense), axis=(-2, -1), keepdims=True))  # energies of any magnitude fit
    new_energy, old_energy = (jnp.sum((x / scale) ** 2, axis=(-2, -1), keepdims=True) for x in (residual, old_residual))
    better = new_energy < jnp.float32(1 - config.refit_gain) * old_energy
    return (
        jnp.where(better, keys, old_keys),
        jnp.where(better, values, old_values),
        jnp.where(better, residual, old_residual),
    )


def _subtract(dense: Array, keys: Array, values: Array) -> Array:
    """R = S - sum_r k~_r u~_r^T, against the factors as stored."""
    keys, values = keys.astype(jnp.float32), values.astype(jnp.float32)
    return dense - jnp.einsum("bhrk,bhrv->bhkv", keys, values, precision=HIGHEST)


def fold_rows(config: LeapConfig, state: LeapState, rows: Array) -> LeapState:
    """Folds the rows where `rows` (bool [B]) holds; the others keep every bit.

    Rows are folded in groups of B / P, as many as fill up at each step when requests arrive at random: such a batch
    does 1 / P of the work per step, and no fp32 copy of a large state is ever alive. Groups are larger where a few rows
    would not fill a processor. A `while_loop` whose body never runs costs nothing.
    """
    batch = state.batch
    if batch == 0:
        return state
    row_bytes = 4 * state.num_heads * state.key_dim * state.value_dim
    group = min(batch, max(-(-batch // config.window), _SMALLEST_GROUP_BYTES // row_bytes))
    boundary = {name: getattr(state, name) for name in _boundary_leaves(state)}

    def body(carry: tuple[Array, dict[str, Array]]) -> tuple[Array, dict[str, Array]]:
        pending, boundary = carry
        # The first `group` pending rows; with fewer, the index is `batch`: reads clamp, writes are dropped.
        (index,) = jnp.nonzero(pending, size=group, fill_value=batch)
        index = index.astype(jnp.int32)
        part = jax.tree.map(lambda x: x.at[index].get(mode="clip"), dataclasses.replace(state, **boundary))
        folded = compress(config, part, materialise(config, part))
        boundary = {
            name: x.at[index].set(getattr(folded, name), mode="drop", unique_indices=True)
            for name, x in boundary.items()
        }
        return pending.at[index].set(False, mode="drop"), boundary

    _, boundary = jax.lax.while_loop(lambda carry: jnp.any(carry[0]), body, (rows, boundary))
    return dataclasses.replace(state, **boundary, position=jnp.where(rows, jnp.int32(0), state.position))


def _boundary_leaves(state: LeapState) -> list[str]:
    """Names of the leaves a fold rewrites (all but the ring and the position)."""
    names = ("codes", "row_scales", "column_scales", "compensator_keys", "compensator_values")
    return [name for name in names if getattr(state, name) is not None]
