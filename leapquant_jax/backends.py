"""Which code runs a step: plain JAX anywhere, or the Pallas kernels on a Hopper GPU."""

import importlib
from collections.abc import Callable
from typing import NamedTuple

import jax

from leapquant_jax.append import append
from leapquant_jax.config import LeapConfig, check_implementation
from leapquant_jax.fold import fold_rows
from leapquant_jax.state import LeapState


class Backend(NamedTuple):
    """`append(config, state, q, k, v, g, beta, active)` and `fold_rows(config, state, rows)`."""

    append: Callable
    fold_rows: Callable


def resolve(config: LeapConfig, state: LeapState, implementation: str | None) -> str:
    """The implementation to run: an explicit one, or the fastest that can and may be chosen without being asked for.

    Raises:
      ValueError: unknown name.
      NotImplementedError: "mosaic_gpu" was asked for and cannot run; the message says why.
    """
    check_implementation(implementation)
    if implementation == "xla":
        return "xla"
    reason = _why_not_mosaic(config, state)
    if reason is None:
        return "mosaic_gpu"
    if implementation == "mosaic_gpu":
        raise NotImplementedError(
            f"implementation='mosaic_gpu' cannot run this: {reason}. Use implementation='xla' or None"
        )
    return "xla"


def get(implementation: str) -> Backend:
    """The functions behind a resolved implementation name."""
    if implementation == "xla":
        return Backend(append, fold_rows)
    kernels = importlib.import_module("pallas_kernels")
    return Backend(kernels.append, kernels.fold)


def _why_not_mosaic(config: LeapConfig, state: LeapState) -> str | None:
    """None when the kernels support this config on this machine, otherwise the reason."""
    if jax.default_backend() != "gpu":
        return f"it needs a Hopper GPU (sm_90) and the default JAX backend is {jax.default_backend()!r}"
    try:
        kernels = importlib.import_module("pallas_kernels")
    except ImportError as error:
        return f"the package pallas_kernels cannot be imported ({error})"
    return kernels.supports(config, state)
