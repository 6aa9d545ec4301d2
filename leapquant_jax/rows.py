"""Moving requests in and out of a batch. Every function acts on *all* leaves of any state (the batch is axis 0).

A negative index is padding: it reads nothing (zeros) and writes nothing. It never wraps around to the last row.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike


def take_rows[State](state: State, indices: ArrayLike) -> State:
    """The rows at `indices`, in that order; padding (-1) gives all-zero rows.

    Args:
      state: pytree whose leaves all start with the batch axis.
      indices: int [N].

    Raises:
      ValueError: an index that is known at trace time lies beyond the batch.
    """
    index = _checked(state, indices)
    return jax.tree.map(lambda x: x.at[index].get(mode="fill", fill_value=0), state)


def put_rows[State](state: State, rows: State, indices: ArrayLike) -> State:
    """Writes `rows[n]` to `state[indices[n]]`; padding (-1) writes nothing. Indices must not repeat."""
    index = _checked(state, indices)
    _check_same(state, rows)
    if _batch(rows) != index.shape[0]:
        raise ValueError(f"{_batch(rows)} rows for {index.shape[0]} indices: give one row per index")
    return jax.tree.map(lambda x, new: x.at[index].set(new, mode="drop"), state, rows)


def reset_rows[State](state: State, fresh: State, indices: ArrayLike) -> State:
    """Puts a fresh request into each row of `indices`, whatever the rows held (also NaN).

    Args:
      state: the running batch.
      fresh: a state of batch 1 to copy from, e.g. `init_state(config, batch=1, ...)`.
      indices: int [N]; negative entries are ignored.
    """
    if _batch(fresh) != 1:
        raise ValueError(f"fresh must have batch 1, got {_batch(fresh)}")
    index = _checked(state, indices)
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (index.shape[0], *x.shape[1:])), fresh)
    return put_rows(state, rows, indices)


def concatenate_rows[State](*states: State) -> State:
    """One batch from several: rows of the first state, then of the second, ..."""
    if not states:
        raise ValueError("concatenate_rows needs at least one state")
    for other in states[1:]:
        _check_same(states[0], other)
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=0), *states)


def _batch(state: object) -> int:
    leaves = jax.tree.leaves(state)
    if not leaves or any(x.ndim == 0 or x.shape[0] != leaves[0].shape[0] for x in leaves):
        raise ValueError("not a state: every leaf must start with the same batch axis")
    return leaves[0].shape[0]


def _checked(state: object, indices: ArrayLike) -> Array:
    """Indices as int32 [N] with padding moved beyond the end, where JAX drops writes and fills reads."""
    batch = _batch(state)
    index = jnp.asarray(indices)
    if index.ndim != 1 or not (jnp.issubdtype(index.dtype, jnp.integer) or index.size == 0):
        raise ValueError(f"indices must be a 1-D integer array, got {index.dtype} {index.shape}")
    if not isinstance(index, Tracer) and index.size and int(jnp.max(index)) >= batch:
        raise ValueError(f"index {int(jnp.max(index))} is beyond a batch of {batch}")
    index = index.astype(jnp.int32)
    return jnp.where(index < 0, jnp.int32(batch), index)


def _check_same(state: object, other: object) -> None:
    """Raises unless both have the same structure, dtypes and shapes behind the batch axis."""
    if jax.tree.structure(state) != jax.tree.structure(other):
        raise ValueError("the states differ in structure: make both with the same method and config")
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        if a.dtype != b.dtype or a.shape[1:] != b.shape[1:]:
            raise ValueError(
                f"the states differ: {a.dtype} {a.shape} against {b.dtype} {b.shape} behind the batch axis"
            )
