"""Running a state method over a batch of traces, block by block, against the exact recurrence."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

import leapquant_jax as lq
from experiments.traces import Block, TraceBatch


class Expected(NamedTuple):
    """What the exact recurrence says about a block: outputs [B, S, H, V], and the state after it [B, H, K, V]."""

    outs: Array
    dense: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Errors:
    """One block of one method against `Expected`; all fp32 [B, H].

    Attributes:
      state: ||S^ - S|| / ||S|| after the block; 0 where both are zero, infinite where only S is.
      output: sum over the block's tokens of ||o^ - o||^2.
      size: the same sum of ||o||^2.
      finite: 1 where state and outputs are free of NaN and infinity.
      read: ||o - S^^T q|| / (||S^|| ||q||) of the last token, the output against the materialised state (eq. 10).
    """

    state: Array
    output: Array
    size: Array
    finite: Array
    read: Array


def relative_error(dense: Array, truth: Array) -> Array:
    """||S^ - S|| / ||S|| of every head: [B, H, K, V] -> [B, H]."""
    distance, size = (jnp.linalg.norm(x, axis=(-2, -1)) for x in (dense - truth, truth))
    return jnp.where(distance == jnp.float32(0), distance, distance / size)


@jax.jit
def _exact_block(dense: Array, tokens: tuple[Array, ...], active: Array) -> tuple[Array, Array]:
    q, k, v, g, beta = tokens
    return lq.exact_decode(dense, q, k, v, g, beta, active=active)


def expectations(batch: TraceBatch, block: int) -> list[tuple[Block, Expected]]:
    """The blocks of a batch with what the exact recurrence makes of them; shared by all methods."""
    dense, result = batch.trace.dense, []
    for part in batch.blocks(block):
        dense, outs = _exact_block(dense, part.tokens, part.active)
        result.append((part, Expected(outs, dense)))
    return result


@functools.partial(jax.jit, static_argnames=("method", "implementation"), donate_argnames="state")
def _play_block(
    method: lq.Method,
    implementation: str | None,
    state: Any,
    tokens: tuple[Array, ...],
    active: Array,
    expected: Expected,
) -> tuple[Any, Errors]:
    state, outs = method.decode(state, *tokens, active=active, implementation=implementation)
    dense = method.dense_state(state)
    shown = active[:, :, None, None]
    squares = [
        jnp.sum(jnp.where(shown, x, jnp.float32(0)) ** 2, axis=(1, 3)) for x in (outs - expected.outs, expected.outs)
    ]
    finite = jnp.all(jnp.isfinite(dense), axis=(-2, -1)) & jnp.all(jnp.isfinite(outs), axis=(1, 3))
    return state, Errors(
        state=relative_error(dense, expected.dense),
        output=squares[0],
        size=squares[1],
        finite=finite.astype(jnp.float32),
        read=_read_error(dense, tokens[0][:, -1], outs[:, -1], active[:, -1]),
    )


def _read_error(dense: Array, q: Array, out: Array, active: Array) -> Array:
    """How far an output [B, H, V] is from S^T q with q [B, G, K], over ||S|| ||q||: [B, H]; 0 in inactive rows."""
    q = jnp.repeat(q, dense.shape[1] // q.shape[1], axis=1)
    difference = jnp.linalg.norm(jnp.sum(dense * q[..., None], axis=-2) - out, axis=-1)
    scale = jnp.linalg.norm(dense, axis=(-2, -1)) * jnp.linalg.norm(q, axis=-1)
    return jnp.where(active[:, None] & (difference > jnp.float32(0)), difference / scale, jnp.float32(0))


@dataclasses.dataclass(frozen=True)
class Playback:
    """A method's whole run over a batch of B traces with N blocks.

    Attributes:
      positions: Tokens read after each block, [N].
      errors: Of every block, arrays [N, B, H].
      probes: What `probe` returned after each block, each [N, B, H].
      state: The method's state after the last token.
    """

    positions: np.ndarray
    errors: Errors
    probes: dict[str, np.ndarray]
    state: Any

    @property
    def output_error(self) -> np.ndarray:
        """sqrt(sum ||o^ - o||^2 / sum ||o||^2) over the whole trace: [B, H]."""
        return _root_ratio(self.errors.output.sum(axis=0), self.errors.size.sum(axis=0))

    @property
    def output_error_by_block(self) -> np.ndarray:
        """The same for each block: [N, B, H]."""
        return _root_ratio(self.errors.output, self.errors.size)


def by_method(method: lq.Method | lq.Policy, batch: TraceBatch) -> list[tuple[lq.Method, np.ndarray]]:
    """What each row of a batch is decoded with: methods, and their rows in ascending order.

    A policy's layers that are stored alike are one method, whose program is compiled once.

    Raises:
      ValueError: If the policy has no choice for a layer, or splits another number of heads than the traces have.
    """
    if not isinstance(method, lq.Policy):
        return [(method, np.arange(len(batch.rows)))]
    num_heads = batch.trace.sizes["num_heads"]
    rows: dict[lq.Method, list[int]] = {}
    for index, row in enumerate(batch.rows):
        try:
            chosen = method.method(row.layer)
        except ValueError as error:
            raise ValueError(f"{method.name}: {error}; or replay traces of its layers alone") from error
        if isinstance(chosen, lq.MixedMethod) and chosen.num_heads != num_heads:
            raise ValueError(
                f"{method.name} names {chosen.num_heads} heads of layer {row.layer}, the traces have {num_heads}: record the "
                "heads that it was planned for (--key_heads), or plan a policy from these traces"
            )
        rows.setdefault(chosen, []).append(index)
    return [(chosen, np.array(found)) for chosen, found in rows.items()]


def play(
    method: lq.Method, batch: TraceBatch, expected: Sequence[tuple[Block, Expected]], *,
    rows: np.ndarray | None = None, implementation: str | None = None,
    probe: Callable[[Any], dict[str, Array]] | None = None,
) -> Playback:  # fmt: skip
    """Decodes a batch of traces token by token.

    Args:
      method: How the state is kept.
      batch: The traces.
      expected: From `expectations`.
      rows: Which rows to decode, as the B rows of the result; None for all.
      implementation: Of the method's steps.
      probe: Called with the state after each block; returns arrays [B, H]. It cannot change the run.

    Raises:
      NotImplementedError: If the implementation cannot run here.
    """
    rows = np.arange(len(batch.rows)) if rows is None else rows
    whole = len(rows) == len(batch.rows)

    def pick(arrays: Any) -> Any:
        return arrays if whole else jax.tree.map(lambda x: x[rows], arrays)

    sizes = batch.trace.sizes | {"batch": len(rows)}
    state = jax.jit(lambda dense: method.init(dense=dense, **sizes))(pick(batch.trace.dense))
    errors, probes = [], []
    for block, truth in expected:
        tokens, active, truth = pick((block.tokens, block.active, truth))
        state, found = _play_block(method, implementation, state, tokens, active, truth)
        errors.append(found)
        probes.append(probe(state) if probe else {})
    positions = np.array([block.end for block, _ in expected])
    stack = functools.partial(jax.tree.map, lambda *x: np.stack([np.asarray(y) for y in x]))
    return Playback(positions, stack(*errors), stack(*probes), state)


def _root_ratio(part: ArrayLike, whole: ArrayLike) -> np.ndarray:
    part, whole = np.asarray(part, np.float64), np.asarray(whole, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(part == 0, 0.0, np.sqrt(part / whole))
