"""Rounding the residual: smoothing (eq. 7), rotation and clipping if asked for, symmetric codes, a scale per column.

    R^ = Diag(c) (Z * B),    c_i = (mean_j |R_ij|)^s,    B_j = max_i |R_ij / c_i| / qmax

With clip="mse" a column's scale is first shrunk where that rounds with a smaller squared error, and then set to the
least-squares scale of the codes, B_j = <R_j, q_j> / <q_j, q_j> with q_j what the codes read back as at scale 1. Then
|R^_j|^2 = |R_j|^2 - |R_j - R^_j|^2: a fold can only take energy away. A scale from the largest entry adds some, and a head
that hardly forgets feeds on it until it diverges.

With rotation="hadamard" the codes hold Q C^-1 R instead, Q = H D the orthonormal Hadamard matrix over the key rows with
fixed random signs D. The signs matter: keys often come out of a SiLU and lean to one side, which H alone would gather in a
single row. C and Q act on the key index, so a read folds them into the vector, R^^T x = B * (Z^T (Q C x)), and saves a pass
over the state.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from leapquant_jax.config import LeapConfig
from leapquant_jax.numerics import HIGHEST, power_of_two_scale
from leapquant_jax.packing import pack, unpack, unpack_parts

# Shrink factors that clip="mse" tries besides 1.
_CLIP_RATIOS = np.linspace(0.95, 0.6, 8, dtype=np.float32)
# Below these a row or column counts as zero: its reciprocal would leave fp32.
_SMALLEST_MEAN = 1e-36
_SMALLEST_COLUMN = 1e-37


class Quantized(NamedTuple):
    """A rounded residual. Shapes as in `LeapState`; `row_scales` is None without smoothing."""

    codes: Array
    row_scales: Array | None
    column_scales: Array


def quantize(config: LeapConfig, residual: Array) -> Quantized:
    """Rounds a residual once.

    A zero row or column stays exactly zero; a NaN stays in its head, visible in the scales.

    Args:
      config: bits, smoothing, rotation, clip.
      residual: [..., K, V] fp32.
    """
    target, row_scales = residual, None
    if config.smoothing:
        mean = jnp.mean(jnp.abs(residual), axis=-1)
        row_scales = jnp.sqrt(mean) if config.smoothing == 0.5 else mean ** jnp.float32(config.smoothing)
        smallest = jnp.float32(_SMALLEST_MEAN**config.smoothing)
        row_scales = jnp.where(row_scales < smallest, jnp.float32(1), row_scales)
        residual = residual / row_scales[..., None]
    if config.rotation:
        residual = rotate(residual, axis=-2)

    largest = jnp.float32(config.largest_code)
    column_scales = jnp.max(jnp.abs(residual), axis=-2) / largest
    if config.clip:
        column_scales = _clip_by_mse(residual, column_scales, largest)
    codes = _round(residual, column_scales, largest)
    if config.clip:
        column_scales = column_scales * _least_squares(config, target, codes, row_scales, column_scales)
    codes = jnp.swapaxes(codes, -1, -2).astype(jnp.int8)  # value-major: a read sums along the last axis
    return Quantized(pack(codes, config.bits or 8), row_scales, column_scales)


def dequantize(config: LeapConfig, quantized: Quantized, key_dim: int) -> Array:
    """[..., K, V] fp32 from codes and scales."""
    codes = unpack(quantized.codes, config.bits or 8, key_dim)
    scaled = jnp.swapaxes(codes, -1, -2).astype(jnp.float32) * quantized.column_scales[..., None, :]
    return _unsmooth(config, scaled, quantized.row_scales)


def _unsmooth(config: LeapConfig, residual: Array, row_scales: Array | None) -> Array:
    """C Q^T of a rotated and smoothed residual [..., K, V]."""
    if config.rotation:
        residual = rotate_back(residual, axis=-2)
    return residual if row_scales is None else residual * row_scales[..., None]


def read_quantized(config: LeapConfig, quantized: Quantized, x: Array) -> Array:
    """R^^T x without forming R^ (appendix B.3).

    Args:
      quantized: codes [B, H, V, bytes] and scales.
      x: [B, H, N, K] fp32, N vectors per head.

    Returns:
      [B, H, N, V] fp32.
    """
    if quantized.row_scales is not None:
        x = x * quantized.row_scales[:, :, None]
    if config.rotation:
        x = rotate(x, axis=-1)
    parts = unpack_parts(quantized.codes, config.bits or 8)
    x = jnp.pad(x, [(0, 0)] * 3 + [(0, len(parts) * parts[0].shape[-1] - x.shape[-1])])
    # A multiply and a sum, not a dot: XLA fuses the widening into the reduction, so no fp32 copy of the state exists.
    reads = (
        jnp.sum(codes[:, :, None].astype(jnp.float32) * x_part[:, :, :, None], axis=-1)
        for codes, x_part in zip(parts, jnp.split(x, len(parts), axis=-1), strict=True)
    )
    return functools.reduce(jnp.add, reads) * quantized.column_scales[:, :, None]


def rotate(x: Array, axis: int) -> Array:
    """Q x along `axis` (length a power of two)."""
    return _multiply(rotation(x.shape[axis]), x, axis)


def rotate_back(x: Array, axis: int) -> Array:
    """Q^T x along `axis`."""
    return _multiply(rotation(x.shape[axis]).T, x, axis)


def rotation(size: int) -> np.ndarray:
    """Q, [size, size] fp32: the orthonormal Sylvester-Hadamard matrix, with a fixed random sign to each column."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = np.random.RandomState(1).randint(0, 2, size) * 2 - 1  # the same on every machine
    return (matrix * signs / np.sqrt(size)).astype(np.float32)


def _multiply(matrix: np.ndarray, x: Array, axis: int) -> Array:
    product = jnp.einsum("...k,lk->...l", jnp.moveaxis(x, axis, -1), jnp.asarray(matrix), precision=HIGHEST)
    return jnp.moveaxis(product, -1, axis)


def _round(residual: Array, column_scales: Array, largest: Array) -> Array:
    """round half to even, clip, NaN to 0, in that order: integer casts of anything else differ between backends."""
    usable = column_scales > jnp.float32(_SMALLEST_COLUMN)
    inverse = jnp.where(usable, jnp.float32(1) / jnp.where(usable, column_scales, 1), jnp.float32(0))
    codes = jnp.clip(jnp.round(residual * inverse[..., None, :]), -largest, largest)
    return jnp.where(jnp.isnan(codes), jnp.float32(0), codes)


def _clip_by_mse(residual: Array, column_scales: Array, largest: Array) -> Array:
    """Per column, the shrink factor of the scale with the smallest squared rounding error."""

    def error(scale: Array) -> Array:
        return jnp.sum((_round(residual, scale, largest) * scale[..., None, :] - residual) ** 2, axis=-2)

    def try_ratio(best: tuple[Array, Array], ratio: Array) -> tuple[tuple[Array, Array], None]:
        scale = column_scales * ratio
        candidate = error(scale)
        better = candidate < best[1]
        return (jnp.where(better, scale, best[0]), jnp.where(better, candidate, best[1])), None

    # a scan, not nine copies of the expression: the residual is formed once, and the program stays small
    start = (column_scales, error(column_scales))
    (best_scale, _), _ = jax.lax.scan(try_ratio, start, jnp.asarray(_CLIP_RATIOS))
    return best_scale


def _least_squares(config: LeapConfig, target: Array, codes: Array, row_scales: Array | None, scales: Array) -> Array:
    """By what to multiply the column scales so that the codes [..., K, V] come closest to `target`: [..., V]."""
    if row_scales is not None:  # squares of states of any magnitude fit
        unit = power_of_two_scale(jnp.max(row_scales, axis=-1, keepdims=True))
        row_scales, target = row_scales / unit, target / unit[..., None]
    read = _unsmooth(config, codes, row_scales)
    usable = scales > jnp.float32(_SMALLEST_COLUMN)
    target = target * jnp.where(usable, jnp.float32(1) / jnp.where(usable, scales, 1), jnp.float32(0))[..., None, :]
    energy = jnp.sum(read * read, axis=-2)
    filled = energy > jnp.float32(0)
    return jnp.where(filled, jnp.sum(read * target, axis=-2) / jnp.where(filled, energy, 1), jnp.float32(1))
