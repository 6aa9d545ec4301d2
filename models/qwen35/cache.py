"""The explicit cache of a batch of requests: the only state of a decode."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import leapquant_jax as lq
from models.qwen35.attention import AttentionCache
from models.qwen35.config import LINEAR, Config
from models.recurrent import RecurrentCache, resolve_method

LayerCache = RecurrentCache | AttentionCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """What a batch of rows remembers. A pytree whose every leaf has the batch as its leading axis.

    Attributes:
      lengths: int32 [B], tokens each row has seen. Rows are independent.
      layers: One cache per layer, of the layer's kind.
    """

    lengths: Array
    layers: tuple[LayerCache, ...]


def init_cache(
    config: Config, *, batch: int, max_length: int | None = None, method: Any | Sequence[Any] = "exact"
) -> Cache:
    """The cache of `batch` rows that have seen nothing.

    Args:
      config: The model's configuration.
      batch: Number of rows.
      max_length: Slots for keys and values in the full layers, the most tokens a row may ever hold. Not needed when
        `config.attention_window` bounds them or there is no full layer.
      method: How recurrent states are stored: a name of `leapquant_jax.list_methods()`, a method object, a list with
        one of these per linear layer, or a `leapquant_jax.Policy`, which knows layers by their index in the model.

    Returns:
      Recurrent states of the given methods (float32 for "exact", whatever the activation dtype); convolution
      histories, keys and values in `config.dtype`.

    Raises:
      ValueError: If a size is missing or not positive, the method is unknown, or the policy lacks a layer.
    """
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    slots = config.attention_window or max_length
    if config.num_linear_layers < config.num_hidden_layers and (slots is None or slots < 1):
        raise ValueError(f"max_length must be at least 1 for a model with full attention layers, got {max_length}")
    if isinstance(method, lq.Policy):
        methods = iter([method.method(i) for i, kind in enumerate(config.layer_types) if kind == LINEAR])
    elif isinstance(method, (list, tuple)):
        if len(method) != config.num_linear_layers:
            raise ValueError(f"got {len(method)} methods for {config.num_linear_layers} linear layers")
        methods = iter([resolve_method(m) for m in method])
    else:
        methods = iter([resolve_method(method)] * config.num_linear_layers)

    dtype = jnp.dtype(config.dtype)
    layers = []
    for kind in config.layer_types:
        if kind == LINEAR:
            layer_method = next(methods)
            conv = jnp.zeros((batch, config.linear_conv_kernel_dim - 1, config.linear_conv_dim), dtype)
            state = layer_method.init(
                batch=batch,
                num_heads=config.linear_num_value_heads,
                num_key_heads=config.linear_num_key_heads,
                key_dim=config.linear_key_head_dim,
                value_dim=config.linear_value_head_dim,
                gate="scalar",
            )
            layers.append(RecurrentCache(conv, state, layer_method))
        else:
            shape = (batch, config.num_key_value_heads, slots, config.head_dim)
            layers.append(AttentionCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)))
    return Cache(jnp.zeros((batch,), jnp.int32), tuple(layers))


def recurrent_states(cache: Cache) -> list[Array]:
    """The dense recurrent states, float32 [B, H, K, V], one per linear layer; for measuring."""
    return [layer.method.dense_state(layer.recurrent) for layer in cache.layers if isinstance(layer, RecurrentCache)]
