"""Compensators: the strongest rank-one parts of a state, kept in high precision (eq. 5).

    (k~, u~) = argmin ||S - sum_r k~_r u~_r^T||_F

The minimiser is the top of the SVD. What runs at every fold is a block subspace iteration on all r directions at once,
warm-started from the previous window's compensators: a state changes little in 16 tokens, so one iteration is enough.
(Fitting one direction at a time from the longest row is not: it can land on a direction that holds almost no energy.)
"""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from leapquant_jax.numerics import HIGHEST, power_of_two_scale, round_and_store

# Share of a fixed pseudo-random direction in each start vector: lets the fit leave a zero or stale start.
_EXPLORE = 0.05
# A column whose part outside the earlier columns is below sqrt(this) of its length is rounding noise: rank deficiency.
_SMALLEST_PIVOT = 1e-6
# Iterations when there is no previous window to start from.
_COLD_ITERATIONS = 4


def start_directions(rank: int, value_dim: int) -> np.ndarray:
    """Fixed sign vectors [rank, value_dim] of unit length; the same on every machine and in every kernel."""
    signs = np.random.RandomState(0).randint(0, 2, (rank, value_dim)) * 2 - 1
    return (signs / np.sqrt(value_dim)).astype(np.float32)


def fit_compensators(
    dense: Array, previous_values: Array | None, *, rank: int, method: str, iterations: int, dtype: DTypeLike
) -> tuple[Array, Array]:
    """Fits `rank` compensators to every head.

    Args:
      dense: [..., K, V] fp32 state.
      previous_values: value factors of the previous window, [..., R, V], or None for a cold start.
      rank: R >= 1.
      method: "subspace" ("cold" is the same from zero previous values) or "svd".
      iterations: subspace iterations (two products with the state each, and one at the end). Leaving that last product
        out would cost 17-55 % more residual on fast and low-rank heads.
      dtype: in which the factors are stored; the norm of each part is split evenly over its two factors, which keeps
        both inside the range of fp16 up to a singular value of 4e9. Beyond that a part is kept only partially, and the
        residual carries the rest.

    Returns:
      (keys [..., R, K], values [..., R, V]), both in `dtype`.
    """
    scale = power_of_two_scale(jnp.max(jnp.abs(dense), axis=(-2, -1), keepdims=True))
    dense = dense / scale  # exact; keeps every product below in range for states of any magnitude
    if method == "svd":
        left, sigma, right = jnp.linalg.svd(dense, full_matrices=False)
        keys = jnp.swapaxes(left * sigma[..., None, :], -1, -2)[..., :rank, :]
        values = right[..., :rank, :]
    else:
        cold = previous_values is None
        values = _start(previous_values, rank, dense)
        for i in range(max(iterations, _COLD_ITERATIONS) if cold else iterations):
            values = _explore(values) if cold and i else values
            keys = orthonormal_rows(jnp.einsum("...kv,...rv->...rk", dense, values, precision=HIGHEST))
            values = orthonormal_rows(jnp.einsum("...kv,...rk->...rv", dense, keys, precision=HIGHEST))
        keys = jnp.einsum("...kv,...rv->...rk", dense, values, precision=HIGHEST)  # S ~ sum_r (S y_r) y_r^T
    return _split_evenly(keys, values, scale, dtype)


def orthonormal_rows(rows: Array) -> Array:
    """Orthonormalises R row vectors, [..., R, N] -> [..., R, N], by Cholesky of their R x R Gram matrix.

    Rows are first scaled to unit length, so the pivots are relative; a row that depends on the earlier ones becomes
    zero instead of noise or NaN, and zero rows stay zero.
    """
    rank = rows.shape[-2]
    squared = jnp.sum(rows * rows, axis=-1, keepdims=True)
    rows = rows * jnp.where(squared > jnp.float32(0), jnp.float32(1) / jnp.sqrt(squared), jnp.float32(0))
    gram = jnp.einsum("...rn,...sn->...rs", rows, rows, precision=HIGHEST)
    done: list[Array] = []
    lower: list[list[Array]] = []  # rows of the Cholesky factor, and with it Q = L^-1 rows by forward substitution
    for i in range(rank):
        entries: list[Array] = []
        for j in range(i):
            partial = gram[..., i, j]
            for m in range(j):
                partial -= entries[m] * lower[j][m]
            entries.append(partial * lower[j][j])
        pivot = gram[..., i, i] - sum((e * e for e in entries), jnp.zeros_like(gram[..., i, i]))
        usable = pivot > jnp.float32(_SMALLEST_PIVOT)
        inverse = jnp.where(usable, jnp.float32(1) / jnp.sqrt(jnp.where(usable, pivot, 1)), jnp.float32(0))
        row = rows[..., i, :]
        for j in range(i):
            row -= entries[j][..., None] * done[j]
        done.append(row * inverse[..., None])
        lower.append([*entries, inverse])  # the diagonal is kept inverted
    return jnp.stack(done, axis=-2)


def _start(previous_values: Array | None, rank: int, dense: Array) -> Array:
    """Start basis [..., R, V]: the previous value factors at unit length, and a little of the fixed directions."""
    shape = (*dense.shape[:-2], rank, dense.shape[-1])
    if previous_values is None:
        return _explore(jnp.zeros(shape, jnp.float32))
    previous = previous_values.astype(jnp.float32)
    largest = jnp.max(jnp.abs(previous), axis=-1, keepdims=True)
    previous = previous / jnp.where(largest > jnp.float32(0), largest, jnp.float32(1))
    squared = jnp.sum(previous * previous, axis=-1, keepdims=True)
    return _explore(previous * jnp.where(squared > jnp.float32(0), jnp.float32(1) / jnp.sqrt(squared), jnp.float32(0)))


def _explore(values: Array) -> Array:
    """Adds a little of the fixed directions and makes the rows orthogonal.

    Without that a row that was dropped would come back as a raw fixed direction, whose image under a state with one
    strong direction is that same direction again: it would be dropped at every fold for ever.
    """
    fixed = jnp.asarray(start_directions(values.shape[-2], values.shape[-1]))
    return orthonormal_rows(values + jnp.float32(_EXPLORE) * jnp.broadcast_to(fixed, values.shape))


def _split_evenly(keys: Array, values: Array, scale: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """Moves the square root of each part's norm from its key factor to its unit value factor, and rounds both."""
    largest = jnp.float32(float(jnp.finfo(dtype).max) if jnp.dtype(dtype) == jnp.dtype(jnp.float16) else 1e18)
    norm = jnp.sqrt(jnp.sum(keys * keys, axis=-1, keepdims=True))
    unit = keys / jnp.where(norm > jnp.float32(0), norm, jnp.float32(1))
    factor = jnp.minimum(jnp.sqrt(norm) * jnp.sqrt(scale), largest)
    return round_and_store(unit * factor, dtype)[0], round_and_store(values * factor, dtype)[0]
