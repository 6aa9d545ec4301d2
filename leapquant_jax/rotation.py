"""A signed Hadamard rotation over the key rows: beyond the paper, at the same bytes.

    Q = H D / sqrt(K),    H the Sylvester-Hadamard matrix, D a diagonal of fixed random signs,    Q^T Q = 1

A row of Q S mixes all key rows of S, so that none stands out in its column's scale. The signs matter: q and k are often
outputs of a SiLU, all leaning to one side, and H alone would gather that side in a single row.

Where Q acts depends on the gate.

- One decay per head commutes with Q. The recurrence of S' = Q S, q' = Q q, k' = Q k is the recurrence of S (eq. 3), so the
  whole state is kept in that basis: keys and queries turn once, when they arrive, and nothing else knows of it.
- A decay per key channel does not commute. Then only what is rounded turns, the smoothed residual: the codes hold
  Q C^-1 R, and a read folds Q C into the vector, R^^T x = B * (Z^T (Q C x)).
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from leapquant_jax.config import LeapConfig


def rotates_keys(config: LeapConfig, gate: str) -> bool:
    """Whether the whole state is kept as Q S, with keys and queries turned on arrival."""
    return config.rotation is not None and gate == "scalar"


def rotates_codes(config: LeapConfig, gate: str) -> bool:
    """Whether only the smoothed residual is turned before it is rounded."""
    return config.rotation is not None and gate == "channel"


def rotate(x: Array, axis: int) -> Array:
    """Q x along `axis`, whose length is a power of two; fp32."""
    x = jnp.moveaxis(x, axis, -1)
    return jnp.moveaxis(_hadamard(x * _signs_like(x)), -1, axis)


def rotate_back(x: Array, axis: int) -> Array:
    """Q^T x along `axis`."""
    x = jnp.moveaxis(x, axis, -1)
    return jnp.moveaxis(_hadamard(x) * _signs_like(x), -1, axis)


def signs(size: int) -> np.ndarray:
    """D as fp32 [size]; the same on every machine and in every kernel."""
    return (np.random.RandomState(1).randint(0, 2, size) * 2 - 1).astype(np.float32)


def normalisation(size: int) -> np.float32:
    """1 / sqrt(size), by which H becomes orthonormal."""
    return np.float32(1 / np.sqrt(size))


def _signs_like(x: Array) -> Array:
    return jnp.asarray(signs(x.shape[-1])).reshape((1,) * (x.ndim - 1) + (-1,))


def _hadamard(x: Array) -> Array:
    """H x / sqrt(K) over the last axis.

    Butterflies in a fixed order and not a matrix product: the sums are the same bits in any batch, in a scan, on any
    device and in the kernels.
    """
    size, stride = x.shape[-1], 1
    while stride < size:
        pairs = x.reshape(*x.shape[:-1], size // (2 * stride), 2, stride)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack([low + high, low - high], axis=-2).reshape(x.shape)
        stride *= 2
    return x * normalisation(size)
