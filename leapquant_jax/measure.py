"""How far a config strays from the exact recurrence on a trace: errors of states and outputs, head by head."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from leapquant_jax import transitions as leap
from leapquant_jax.config import LeapConfig
from leapquant_jax.exact import exact_decode
from leapquant_jax.numerics import HIGHEST
from leapquant_jax.trace import Trace

SEGMENT = 64  # tokens between two comparisons of the states
LEADING = 4  # directions that carry no detail
SMALLEST_DETAIL = 1e-3  # share of the output's energy


@dataclasses.dataclass(frozen=True)
class HeadErrors:
    """Relative errors of one config against the exact recurrence; fp64 [B, H], B the rows of the trace.

    Attributes:
      output: sqrt(sum_t |o^_t - o_t|^2 / sum_t |o_t|^2).
      detail: the same, relative to the energy of o outside its `LEADING` strongest directions (but at least
        `SMALLEST_DETAIL` of the whole). What a head has stored may be a per cent of its output, beside directions that
        hardly change from token to token: on the trained model, recall follows this error and not the one above.
      state: ||S^ - S|| / ||S||, root mean square over the ends of segments of `SEGMENT` tokens.
      final: ||S^ - S|| / ||S|| at the end of the last segment.
    """

    output: np.ndarray
    detail: np.ndarray
    state: np.ndarray
    final: np.ndarray


def head_errors(config: LeapConfig, trace: Trace) -> HeadErrors:
    """Decodes a trace token by token with a low-bit state and with the exact one, side by side.

    Both start from `trace.dense`, which the config rounds once. Tokens after the last whole segment are left out (of
    4,095 tokens 63): a second program for them would double the time to compile, which is most of the time.

    Args:
      config: how the state is stored.
      trace: the inputs.
    """
    noise, moments, states = _replay(config, dataclasses.replace(trace, layer=0))  # so that layers share one program
    noise, states = np.asarray(noise, np.float64), np.asarray(states, np.float64)
    energies = np.linalg.eigvalsh(np.asarray(moments, np.float64))  # by direction, ascending
    power = energies.sum(axis=-1)
    detail = np.maximum(energies[..., :-LEADING].sum(axis=-1), SMALLEST_DETAIL * power)
    output, detail = (np.sqrt(np.divide(noise, x, out=np.zeros_like(noise), where=noise != 0)) for x in (power, detail))
    return HeadErrors(output, detail, np.sqrt((states**2).mean(axis=0)), states[-1])


@functools.partial(jax.jit, static_argnames="config")
def _replay(config: LeapConfig, trace: Trace) -> tuple[Array, Array, Array]:
    """sum_t |o^_t - o_t|^2 [B, H], sum_t o_t o_t^T [B, H, V, V], and relative state errors [segments, B, H]."""

    def advance(carry: Any, tokens: tuple[Array, ...]) -> tuple[Any, Array]:
        state, dense, noise, moments = carry
        state, outs = leap.decode(config, state, *tokens)
        dense, truth = exact_decode(dense, *tokens)
        noise += jnp.sum((outs - truth) ** 2, axis=(1, 3))
        moments += jnp.einsum("bthv,bthw->bhvw", truth, truth, precision=HIGHEST)
        distance, size = (jnp.linalg.norm(x, axis=(-2, -1)) for x in (leap.dense_state(config, state) - dense, dense))
        # 0 where the error is 0, so that a head that is never written is perfect.
        return (state, dense, noise, moments), jnp.where(distance == jnp.float32(0), distance, distance / size)

    state = leap.init_state(config, dense=trace.dense, **trace.sizes)
    batch, heads, _, value_dim = trace.dense.shape
    zeros = (jnp.zeros((batch, heads), jnp.float32), jnp.zeros((batch, heads, value_dim, value_dim), jnp.float32))
    segment = min(SEGMENT, trace.q.shape[1])
    segments = tuple(_segments(x, segment) for x in trace.tokens)
    (*_, noise, moments), errors = jax.lax.scan(advance, (state, trace.dense, *zeros), segments)
    return noise, moments, errors


def _segments(x: Array, segment: int) -> Array:
    """[B, T, ...] -> [T // segment, B, segment, ...]."""
    whole = x.shape[1] // segment
    return jnp.moveaxis(x[:, : whole * segment].reshape(x.shape[0], whole, segment, *x.shape[2:]), 1, 0)
