"""A state method that keeps what it is fed: the way to a layer's inputs that the model knows nothing of.

A model hands every token of a recurrent layer to the layer's method, so a method that stores its arguments beside the state
records exactly what the layer used, whatever the model is.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

import leapquant_jax as lq
from models import qwen35
from models.qwen35.config import LINEAR

Tokens = tuple[Array, Array, Array, Array, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recorded:
    """The state of the method underneath, and the tokens of the last call (q, k, v, g, beta, each [B, T, ...])."""

    state: Any
    tokens: Tokens | None = None


@dataclasses.dataclass(frozen=True)
class Recorder:
    """`method`, with the arguments of its last call kept in the state."""

    method: lq.Method
    name: str = "recorder"

    def init(self, *, dense: Array | None = None, **sizes: Any) -> Recorded:
        return Recorded(self.method.init(dense=dense, **sizes))

    def step(
        self, state: Recorded, *token: Array, active: Array | None = None, implementation: str | None = None
    ) -> tuple[Recorded, Array]:
        inner, out = self.method.step(state.state, *token, active=active, implementation=implementation)
        return _recorded(inner, [x[:, None] for x in token]), out

    def decode(
        self, state: Recorded, *tokens: Array, active: Array | None = None, implementation: str | None = None
    ) -> tuple[Recorded, Array]:
        inner, outs = self.method.decode(state.state, *tokens, active=active, implementation=implementation)
        return _recorded(inner, tokens), outs

    def prefill(self, state: Recorded, *tokens: Array, mask: Array | None = None) -> tuple[Recorded, Array]:
        inner, outs = self.method.prefill(state.state, *tokens, mask=mask)
        return _recorded(inner, tokens), outs

    def dense_state(self, state: Recorded) -> Array:
        return self.method.dense_state(state.state)

    def state_bytes(self, state: Recorded) -> dict[str, int]:
        return self.method.state_bytes(state.state)


def record(
    model: qwen35.Model, tokens: np.ndarray, layers: Sequence[int], *, skip: int = 0, segment: int = 512
) -> tuple[list[lq.Trace], qwen35.Cache]:
    """Reads prompts with fp32 states and keeps the inputs of some recurrent layers.

    Args:
      model: The model, in the dtype it is to be run in.
      tokens: int32 [B, T].
      layers: Indices of gated DeltaNet layers, in increasing order.
      skip: Tokens that are read first and not recorded; the traces start from the states after them.
      segment: Tokens per call of `prefill`; bounds the memory of the activations.

    Returns:
      (one trace of B rows per layer, the cache after the last token).
    """
    config = model.config
    linear = linear_layers(config)
    exact = lq.get_method("exact")
    methods = [Recorder(exact) if layer in layers else exact for layer in linear]
    cache = qwen35.init_cache(config, batch=len(tokens), max_length=tokens.shape[1], method=methods)
    starts = [*range(0, skip, segment), *range(skip, tokens.shape[1], segment)]
    dense: dict[int, np.ndarray] = {}
    kept: dict[int, list[list[np.ndarray]]] = {layer: [] for layer in layers}
    for start, stop in tqdm(list(zip(starts, [*starts[1:], tokens.shape[1]], strict=True)), desc="recording"):
        if start == skip:
            states = dict(zip(linear, qwen35.recurrent_states(cache), strict=True))
            dense = {layer: np.asarray(states[layer]) for layer in layers}
        _, cache = qwen35.prefill(model, jnp.asarray(tokens[:, start:stop]), cache, last_only=True)
        cache, found = _take(cache)
        if start >= skip:  # the model pads its prompts on the right: only the first tokens are real
            for layer in layers:
                kept[layer].append([np.asarray(x[:, : stop - start]) for x in found[layer]])
    traces = []
    for layer in layers:
        arrays = [jnp.asarray(np.concatenate(parts, axis=1)) for parts in zip(*kept[layer], strict=True)]
        traces.append(lq.Trace(*arrays, dense=jnp.asarray(dense[layer]), layer=layer))
    return traces, cache


def linear_layers(config: qwen35.Config) -> list[int]:
    """Indices of the layers with a recurrent state."""
    return [index for index, kind in enumerate(config.layer_types) if kind == LINEAR]


def select_heads(trace: lq.Trace, key_heads: Sequence[int]) -> lq.Trace:
    """The trace of some key heads and the value heads they serve."""
    per_key_head = trace.v.shape[2] // trace.k.shape[2]
    keys = jnp.asarray(key_heads, jnp.int32)
    values = (keys[:, None] * per_key_head + jnp.arange(per_key_head, dtype=jnp.int32)[None]).reshape(-1)
    picked = {name: jnp.take(getattr(trace, name), keys, axis=2) for name in ("q", "k")}
    picked |= {name: jnp.take(getattr(trace, name), values, axis=2) for name in ("v", "g", "beta")}
    return dataclasses.replace(trace, **picked, dense=jnp.take(trace.dense, values, axis=1))


def _recorded(state: Any, tokens: Sequence[Array]) -> Recorded:
    q, k, v, g, beta = tokens
    return Recorded(state, (q, k, v, g, beta))


def _take(cache: qwen35.Cache) -> tuple[qwen35.Cache, dict[int, Tokens]]:
    """The cache without recordings, so that every call compiles once, and the recordings by layer."""
    layers, found = [], {}
    for index, layer in enumerate(cache.layers):
        recurrent = getattr(layer, "recurrent", None)
        if isinstance(recurrent, Recorded):
            assert recurrent.tokens is not None
            found[index] = recurrent.tokens
            layer = dataclasses.replace(layer, recurrent=Recorded(recurrent.state))
        layers.append(layer)
    return qwen35.Cache(cache.lengths, tuple(layers)), found
