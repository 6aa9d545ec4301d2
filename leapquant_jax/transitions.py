"""The public state transitions: init, step, decode, prefill, fold, rollback. Pure functions of a frozen pytree."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from leapquant_jax import backends, inputs
from leapquant_jax.chunked import chunked_delta_rule
from leapquant_jax.config import LeapConfig, check_implementation
from leapquant_jax.fold import compress
from leapquant_jax.state import LeapState, check_state, empty_state
from leapquant_jax.window import materialise


def init_state(
    config: LeapConfig, *, batch: int, num_heads: int, num_key_heads: int | None = None, key_dim: int, value_dim: int,
    gate: str = "scalar", dense: Array | None = None,
) -> LeapState:  # fmt: skip
    """A fresh state, or one that continues from a dense fp32 state (rounded once).

    Args:
      config: how the state is stored.
      batch, num_heads, key_dim, value_dim: B, H, K, V.
      num_key_heads: G, a divisor of H; None means H.
      gate: "scalar" (one log decay per head, GDN) or "channel" (one per key channel, KDA).
      dense: [B, H, K, V] fp32 or None for the empty memory.

    Returns:
      LeapState with an empty ring.

    Raises:
      ValueError: unknown gate, sizes that do not fit each other or the config, or a wrong `dense`.
    """
    num_key_heads = num_heads if num_key_heads is None else num_key_heads
    state = empty_state(
        config, batch=batch, num_heads=num_heads, num_key_heads=num_key_heads, key_dim=key_dim, value_dim=value_dim,
        gate=gate,
    )  # fmt: skip
    if dense is None:
        return state
    expected = (batch, num_heads, key_dim, value_dim)
    if inputs.dense_shape(dense) != expected:
        raise ValueError(f"dense has shape {tuple(dense.shape)}, expected [B, H, K, V] = {expected}")
    return compress(config, state, dense, warm=False)


def step(
    config: LeapConfig, state: LeapState, q: Array, k: Array, v: Array, g: Array, beta: Array, *,
    active: Array | None = None, implementation: str | None = None,
) -> tuple[LeapState, Array]:  # fmt: skip
    """One token: append a record, read the output, and fold the rows whose window is now full.

    Args:
      config: the state's config.
      state: from `init_state` or an earlier step.
      q, k: [B, G, K]; L2-normalised (`l2norm`), q scaled by K**-0.5.
      v: [B, H, V].
      g: log decay <= 0, [B, H] (scalar gate) or [B, H, K] (channel gate); -inf erases the state.
      beta: write strength in (0, 1), [B, H].
      active: bool [B]; an inactive row reads nothing, keeps every bit of its state and outputs exactly 0.
      implementation: None (the best that can run), "xla" or "mosaic_gpu".

    Returns:
      (state, output [B, H, V] fp32).

    Raises:
      ValueError: a shape, dtype or option does not fit.
      NotImplementedError: an explicit implementation cannot run here; the message says why.
    """
    check_state(config, state)
    inputs.check_tokens(
        q, k, v, g, beta, batch=state.batch, num_heads=state.num_heads, num_key_heads=state.num_key_heads,
        key_dim=state.key_dim, value_dim=state.value_dim, gate=state.gate, active=active,
    )  # fmt: skip
    implementation = backends.resolve(config, state, implementation)
    return _batched_step(config, implementation, folds=True)(state, q, k, v, g, beta, active=active)


def decode(
    config: LeapConfig, state: LeapState, q: Array, k: Array, v: Array, g: Array, beta: Array, *,
    active: Array | None = None, implementation: str | None = None,
) -> tuple[LeapState, Array]:  # fmt: skip
    """`step` over T tokens as one `lax.scan`; arrays are [B, T, ...], `active` is bool [B, T].

    Returns:
      (state, outputs [B, T, H, V] fp32).
    """
    check_implementation(implementation)
    one_token = functools.partial(step, config, implementation=implementation)
    return inputs.scan_tokens(one_token, state, (q, k, v, g, beta), active)


def prefill(
    config: LeapConfig, state: LeapState, q: Array, k: Array, v: Array, g: Array, beta: Array, *,
    mask: Array | None = None, implementation: str | None = None,
) -> tuple[LeapState, Array]:  # fmt: skip
    """T tokens at once as matrix products, continuing `state`.

    Each row is taken to its last window boundary in fp32 and rounded once there; the fewer than P tokens behind it
    become records, appended as `decode` would. So position is the row's token count modulo P however a prompt is cut,
    and a prompt is rounded once per call, not once per window: cutting it differently moves the roundings, within the
    error of one fold per cut.

    Args:
      config, state: as for `step`.
      q, k, v, g, beta: [B, T, ...] as for `decode`.
      mask: bool [B, T], real tokens first (right padding); padded tokens change nothing and output 0. None: all real.
      implementation: of the tail's steps.

    Returns:
      (state, outputs [B, T, H, V] fp32).
    """
    check_state(config, state)
    length = inputs.time_length(q)
    inputs.check_tokens(
        q, k, v, g, beta, batch=state.batch, num_heads=state.num_heads, num_key_heads=state.num_key_heads,
        key_dim=state.key_dim, value_dim=state.value_dim, gate=state.gate, active=mask, length=length,
    )  # fmt: skip
    _check_right_padded(mask)
    if length == 0:
        return state, jnp.zeros((state.batch, 0, state.num_heads, state.value_dim), jnp.float32)
    window = config.window
    index = jnp.arange(length, dtype=jnp.int32)[None]
    tokens = jnp.full((state.batch,), length, jnp.int32) if mask is None else jnp.sum(mask, axis=1, dtype=jnp.int32)
    # Tokens of this call before the row's last window boundary; 0 if it does not reach one.
    body = jnp.maximum((state.position + tokens) // window * window - state.position, 0)

    dense = materialise(config, state)
    dense, outs = chunked_delta_rule(dense, q, k, v, g, beta, mask=index < body[:, None])
    rounded = compress(config, state, dense, warm=False)  # far from the last fold, or the first one: a cold fit
    reached = body > 0
    state = jax.tree.map(
        lambda new, old: jnp.where(reached.reshape(-1, *(1,) * (old.ndim - 1)), new, old), rounded, state
    )

    tail = min(window - 1, length)  # what lies behind the boundary is shorter than a window
    if tail == 0:
        return state, outs
    where = body[:, None] + jnp.arange(tail, dtype=jnp.int32)[None]
    active = where < tokens[:, None]
    where = jnp.minimum(where, length - 1)
    rows = jnp.arange(state.batch, dtype=jnp.int32)[:, None]
    arrays = [jnp.asarray(x)[rows, where] for x in (q, k, v, g, beta)]
    append = _batched_step(config, backends.resolve(config, state, implementation), folds=False)
    state, tail_outs = inputs.scan_tokens(append, state, tuple(arrays), active)
    target = jnp.where(active, where, length)
    return state, outs.at[rows, target].set(tail_outs, mode="drop")


def _check_right_padded(mask: Array | None) -> None:
    """Raises ValueError when a mask known before tracing has a real token behind a padded one."""
    if mask is None or isinstance(mask, Tracer):
        return
    if bool(jnp.any(mask[:, 1:] & ~mask[:, :-1])):
        raise ValueError("mask must have the real tokens of every row first: move left padding to the right")


def fold(config: LeapConfig, state: LeapState, *, implementation: str | None = None) -> LeapState:
    """Closes the window of every row early: its records are folded into the boundary state, rounded once.

    A row without records keeps every bit: there is nothing to fold, and rounding again would only add error.

    Args:
      config: the state's config.
      state: any position.
      implementation: None, "xla" or "mosaic_gpu".

    Returns:
      LeapState with position 0 everywhere.
    """
    check_state(config, state)
    implementation = backends.resolve(config, state, implementation)
    return _batched_fold(config, implementation)(state)


def dense_state(config: LeapConfig, state: LeapState) -> Array:
    """The state after the last token, materialised: fp32 [B, H, K, V] (for measuring; decoding never needs it)."""
    check_state(config, state)
    return materialise(config, state)


def rollback(config: LeapConfig, state: LeapState, num_tokens: Array) -> tuple[LeapState, Array]:
    """Forgets the last tokens of each row, exactly: nothing inside a window has been rounded into the state.

    Args:
      config: the state's config.
      state: any position.
      num_tokens: int32 [B], tokens to drop per row.

    Returns:
      (state, ok bool [B]). A row asked for a negative number or for more than its window holds (tokens before the last
      fold are no longer separable) is left as it was, with ok False.

    Raises:
      ValueError: num_tokens is not an integer array [B].
    """
    check_state(config, state)
    num_tokens = jnp.asarray(num_tokens)
    if num_tokens.shape != (state.batch,) or not jnp.issubdtype(num_tokens.dtype, jnp.integer):
        raise ValueError(
            f"num_tokens must be an integer array [{state.batch}], got {num_tokens.dtype} {num_tokens.shape}"
        )
    ok = (num_tokens >= 0) & (num_tokens <= state.position.astype(num_tokens.dtype))  # before any narrowing cast
    num_tokens = num_tokens.astype(jnp.int32)
    return dataclasses.replace(state, position=jnp.where(ok, state.position - num_tokens, state.position)), ok


def _vmap_into_batch(function: Callable) -> Callable:
    """Lets `vmap` of `function` run as one call on a larger batch (the first axis of every argument and result).

    Under an ordinary vmap the folds of different lanes would be traced as one select over all lanes, and a kernel could
    not be called at all.
    """
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def _rule(axis_size: int, in_batched: list, *args):
        def merge(x: Array, is_batched: bool) -> Array:
            x = x if is_batched else jnp.broadcast_to(x[None], (axis_size, *x.shape))
            return x.reshape(axis_size * x.shape[1], *x.shape[2:])

        merged = jax.tree.map(merge, list(args), list(in_batched))
        outs = mapped(*merged)
        outs = jax.tree.map(lambda x: x.reshape(axis_size, x.shape[0] // axis_size, *x.shape[1:]), outs)
        return outs, jax.tree.map(lambda _: True, outs)

    return mapped


@functools.lru_cache(maxsize=256)
def _batched_step(config: LeapConfig, implementation: str, *, folds: bool) -> Callable:
    """append, and with `folds` the fold of full rows; `(state, q, k, v, g, beta, *, active) -> (state, out)`."""
    backend = backends.get(implementation)

    def run(state: LeapState, token: tuple[Array, ...], active: Array | None) -> tuple[LeapState, Array]:
        state, out = backend.append(config, state, *token, active=active)
        if folds:
            state = backend.fold_rows(config, state, state.position >= config.window)
        return state, out

    mapped = _vmap_into_batch(run)
    return lambda state, *token, active=None: mapped(state, token, active)


@functools.lru_cache(maxsize=256)
def _batched_fold(config: LeapConfig, implementation: str) -> Callable:
    backend = backends.get(implementation)
    return _vmap_into_batch(lambda state: backend.fold_rows(config, state, state.position > 0))
