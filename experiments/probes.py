"""Looking at a state without changing it: what its next fold would do, how uneven it is, and checks that must hold.

A probe folds a *copy* of the state, wherever its window stands, so the run that it looks at goes on undisturbed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import leapquant_jax as lq
from leapquant_jax.numerics import HIGHEST
from leapquant_jax.packing import unpack
from leapquant_jax.quantize import rotate


@functools.partial(jax.jit, static_argnames="config")
def fold_probe(config: lq.LeapConfig, state: lq.LeapState) -> dict[str, Array]:
    """What folding now would do to each head; arrays fp32 [B, H], NaN in rows whose ring is empty.

    energy_gain: ||S after||^2 / ||S before||^2 - 1; what accumulates in slow heads at 4 bits.
    rounding_error: ||S after - S before|| / ||S before||, one fold's error.
    half_step: the largest rounding error in units of the allowed one, at most 1. For codes that is half a step, for a boundary
      state in floats half a unit in the last place; both with a little room for fp32. With clip="mse" the stored scale is
      not the one that the codes were rounded with; see `_code_share`.
    """
    before = lq.dense_state(config, state)
    folded = lq.fold(config, state)
    after = lq.dense_state(config, folded)
    energy, new_energy, lost = (_energy(x) for x in (before, after, after - before))
    found = {
        "energy_gain": jnp.where(energy > jnp.float32(0), new_energy / energy - jnp.float32(1), jnp.float32(0)),
        "rounding_error": jnp.where(energy > jnp.float32(0), jnp.sqrt(lost / energy), jnp.float32(0)),
        "half_step": half_step_share(config, folded, before, after),
    }
    holds = (state.position > 0)[:, None]
    return {name: jnp.where(holds, x, jnp.float32(jnp.nan)) for name, x in found.items()}


@functools.partial(jax.jit, static_argnames="config")
def flatness(config: lq.LeapConfig, state: lq.LeapState) -> dict[str, Array]:
    """max |x| / median |x| of every head's state before a fold and after each of its parts: fp32 [B, H] each.

    The parts are those of the config, in the order of the fold (paper, Figure 6).
    """
    dense = lq.dense_state(config, state)
    return {name: _peak_over_median(x) for name, x in parts_left(config, lq.fold(config, state), dense).items()}


def parts_left(config: lq.LeapConfig, folded: lq.LeapState, dense: Array) -> dict[str, Array]:
    """What is left to round after each part of the method: arrays [B, H, K, V] by the name of the part.

    Args:
      config: Says which parts there are.
      folded: The state after a fold.
      dense: The state that was folded.
    """
    left = {"nothing": dense}
    residual = dense
    if config.rank:
        left["compensators"] = residual = _residual(folded, dense)
    if folded.row_scales is not None:
        left["smoothing"] = residual = residual / folded.row_scales[..., None]
    if config.rotation:
        left["rotation"] = rotate(residual, axis=-2)
    return left


def half_step_share(config: lq.LeapConfig, folded: lq.LeapState, before: Array, after: Array) -> Array:
    """The largest rounding error over the allowed one; see `fold_probe`.

    Args:
      config: Of the state.
      folded: The state after a fold.
      before, after: [B, H, K, V], the dense states that went into the fold and came out of it.

    Returns:
      fp32 [B, H].
    """
    # The fold and this check sum in different orders: fp32 noise of the state itself, before compensators are taken out.
    noise = jnp.float32(1e-6) * jnp.max(jnp.abs(before), axis=(-2, -1), keepdims=True) + jnp.float32(1e-30)
    if folded.column_scales is None:
        step = jnp.float32(float(jnp.finfo(config.boundary_dtype).eps)) * jnp.abs(before)
        return jnp.max(jnp.abs(after - before) / (step / 2 + noise), axis=(-2, -1))
    rounded = _residual(folded, before)
    if folded.row_scales is not None:
        rounded, noise = (x / folded.row_scales[..., None] for x in (rounded, noise))
    if config.rotation:
        rounded = rotate(rounded, axis=-2)
        noise = 4 * jnp.sqrt(jnp.mean(noise * noise, axis=-2, keepdims=True))
    codes = jnp.swapaxes(unpack(folded.codes, config.bits or 8, folded.key_dim), -1, -2).astype(jnp.float32)
    if config.clip:
        return _code_share(codes, rounded, noise, config.largest_code)
    scales = folded.column_scales[..., None, :]
    return jnp.max(jnp.abs(rounded - codes * scales) / (scales / 2 + noise), axis=(-2, -1))


def _code_share(codes: Array, rounded: Array, noise: Array, largest: int) -> Array:
    """Whether one scale per column explains all codes: the least that some code asks for over the most that another allows.

    A code q != 0 of x is right for scales from |x| / (|q| + 1/2) to |x| / (|q| - 1/2), a clipped one for any below the
    latter, and 0 for any from 2 |x|. At most 1 if all are right.

    Args:
      codes, rounded: fp32 [B, H, K, V], the integers and what was rounded to them.
      noise: Of `rounded`; broadcasts.
      largest: The largest code.

    Returns:
      fp32 [B, H].
    """
    size, half = jnp.abs(codes), jnp.float32(0.5)
    along = jnp.where(size > jnp.float32(0), rounded * jnp.sign(codes), jnp.abs(rounded))
    asked = jnp.where(size < jnp.float32(largest), (along - noise) / (size + half), jnp.float32(0))
    allowed = jnp.where(size > jnp.float32(0), (along + noise) / (size - half), jnp.float32(jnp.inf))
    least, most = jnp.max(asked, axis=-2), jnp.min(allowed, axis=-2)
    share = jnp.where(most > jnp.float32(0), jnp.maximum(least, jnp.float32(0)) / most, jnp.float32(jnp.inf))
    return jnp.max(share, axis=-1)


def byte_check(method: lq.Method, state: Any) -> tuple[int, int]:
    """(bytes that the method claims, bytes of the live buffers)."""
    return method.state_bytes(state)["total"], sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def _residual(folded: lq.LeapState, dense: Array) -> Array:
    """R = S - sum_r k~_r u~_r^T against the factors as stored (eq. 5)."""
    if folded.compensator_keys is None or folded.compensator_values is None:
        return dense
    keys, values = (x.astype(jnp.float32) for x in (folded.compensator_keys, folded.compensator_values))
    return dense - jnp.einsum("bhrk,bhrv->bhkv", keys, values, precision=HIGHEST)


def _energy(dense: Array) -> Array:
    return jnp.sum(dense * dense, axis=(-2, -1))


def _peak_over_median(x: Array) -> Array:
    magnitude = jnp.abs(x).reshape(*x.shape[:-2], -1)
    median = jnp.median(magnitude, axis=-1)
    return jnp.max(magnitude, axis=-1) / jnp.where(median > jnp.float32(0), median, jnp.float32(1))
