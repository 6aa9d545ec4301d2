"""Checks of what callers pass in, made before tracing starts, and the scan that turns a step into a decode.

Every message names the argument, what was given, and what to pass instead.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def check_tokens(
    q: Array, k: Array, v: Array, g: Array, beta: Array, *, batch: int, num_heads: int, num_key_heads: int,
    key_dim: int, value_dim: int, gate: str | None = None, active: Array | None = None, length: int | None = None,
) -> None:  # fmt: skip
    """Raises ValueError unless the arrays of one token ([B, ...]) or of `length` tokens ([B, T, ...]) fit the state.

    Args:
      q, k: [B, G, K]; v: [B, H, V]; beta: [B, H]; g: [B, H] ("scalar") or [B, H, K] ("channel").
      gate: the state's gate, or None when either is welcome.
      active: bool [B] or None.
      length: number of tokens when the arrays have a time axis after the batch.
    """
    if num_key_heads < 1 or num_heads % num_key_heads:
        raise ValueError(
            f"num_heads ({num_heads}) must be a multiple of num_key_heads ({num_key_heads}): each key head serves "
            "num_heads // num_key_heads consecutive value heads"
        )
    lead = (batch,) if length is None else (batch, length)
    expected = {
        "q": (q, (*lead, num_key_heads, key_dim)),
        "k": (k, (*lead, num_key_heads, key_dim)),
        "v": (v, (*lead, num_heads, value_dim)),
        "beta": (beta, (*lead, num_heads)),
    }
    for name, (array, shape) in expected.items():
        if tuple(array.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(array.shape)}, expected {shape} to fit the state")
    gates = {"scalar": (*lead, num_heads), "channel": (*lead, num_heads, key_dim)}
    allowed = [gates[gate]] if gate else list(gates.values())
    if tuple(g.shape) not in allowed:
        raise ValueError(
            f"g has shape {tuple(g.shape)}, expected {' or '.join(map(str, allowed))} (log decay per head, or per key "
            "channel for a state made with gate='channel')"
        )
    for name, array in {"q": q, "k": k, "v": v, "g": g, "beta": beta}.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {array.dtype}; pass a floating point array")
    if active is not None and (tuple(active.shape) != lead or active.dtype != jnp.bool_):
        raise ValueError(f"active must be bool {lead}, got {active.dtype} {tuple(active.shape)}")


def dense_shape(dense: Array) -> tuple[int, int, int, int]:
    """(B, H, K, V) of a dense state, or ValueError."""
    if dense.ndim != 4 or dense.dtype != jnp.float32:
        raise ValueError(f"a dense state is fp32 [B, H, K, V], got {dense.dtype} {tuple(dense.shape)}")
    batch, num_heads, key_dim, value_dim = dense.shape
    return batch, num_heads, key_dim, value_dim


def time_length(q: Array) -> int:
    """T of arrays laid out [B, T, ...], or ValueError when the time axis is missing."""
    if q.ndim != 4:
        raise ValueError(f"decode takes q of shape [B, T, G, K], got {tuple(q.shape)}; use step for one token")
    return q.shape[1]


def scan_tokens(
    step: Callable[..., tuple[Any, Array]], state: Any, tokens: tuple[Array, ...], active: Array | None
) -> tuple[Any, Array]:
    """Runs `step(state, *token, active=...)` over the time axis (axis 1 of every array) with `lax.scan`.

    Returns:
      (final state, outputs stacked along axis 1).
    """
    length = time_length(tokens[0])
    for array in (*tokens, *(() if active is None else (active,))):
        if array.ndim < 2 or array.shape[1] != length:
            raise ValueError(f"all arrays need {length} tokens on axis 1, got shape {tuple(array.shape)}")

    def body(state: Any, token: tuple[tuple[Array, ...], Array | None]) -> tuple[Any, Array]:
        arrays, is_active = token
        return step(state, *arrays, active=is_active)

    time_major = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (tokens, active))
    state, outs = jax.lax.scan(body, state, time_major)
    return state, jnp.moveaxis(outs, 0, 1)
