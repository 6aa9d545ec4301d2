"""The Kimi delta attention (KDA) layer of Kimi-Linear: a delta rule with one decay per key channel.

config, layer = kimi_delta.load_layer(directory, layer_index=0)
cache = kimi_delta.init_cache(config, batch=2, method="leapquant-int8")
y, cache = kimi_delta.prefill(layer, x, cache)           # x [B, T, hidden_size]
y, cache = kimi_delta.step(layer, x, cache)              # x [B, hidden_size]
"""

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from models.blocks import CausalConvolution, Float32Param, GatedRMSNorm, linear
from models.checkpoints import Checkpoint, check_names, read_json
from models.ragged import Span, full_span, masked_span, pack, unpack
from models.recurrent import RecurrentCache, advance, init_log_rate, init_time_step, log_decay, resolve_method


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One KDA layer; the defaults are Kimi-Linear-48B-A3B's.

    Attributes:
      hidden_size: Width of the layer's input and output.
      num_heads: Heads of queries, keys and values alike.
      head_dim: Width of a key and of a value.
      short_conv_kernel_size: Taps of the causal convolution.
      rms_norm_eps: Epsilon of the output norm.
      kda_layers: Indices of the KDA layers, counted from 0 (config.json counts from 1).
      dtype: Dtype of the activations and of the matrix products.
      matmul_precision: `jax.lax.Precision` of the matrix products, by name.
    """

    hidden_size: int = 2304
    num_heads: int = 32
    head_dim: int = 128
    short_conv_kernel_size: int = 4
    rms_norm_eps: float = 1e-5
    kda_layers: tuple[int, ...] = (0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 16, 17, 18, 20, 21, 22, 24, 25)
    dtype: str = "float32"
    matmul_precision: str = "highest"

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> Self:
        """Reads the contents of a Kimi-Linear config.json.

        Raises:
          ValueError: If it lacks `linear_attn_config` with its list of KDA layers.
        """
        attention = fields.get("linear_attn_config") or {}
        if "kda_layers" not in attention:
            raise ValueError("config.json lacks linear_attn_config.kda_layers; the layer pattern cannot be guessed")
        return cls(
            hidden_size=fields["hidden_size"],
            num_heads=attention["num_heads"],
            head_dim=attention["head_dim"],
            short_conv_kernel_size=attention["short_conv_kernel_size"],
            rms_norm_eps=fields.get("rms_norm_eps", 1e-5),
            kda_layers=tuple(i - 1 for i in attention["kda_layers"]),
        )


class KimiDeltaAttention(nnx.Module):
    """Projections, a short convolution, the channel-gated delta rule and a sigmoid-gated norm.

    S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T,    o_t = S_t^T q_t.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs, param_dtype: jnp.dtype | str | None = None):
        self.config = config
        param_dtype = jnp.dtype(param_dtype or config.dtype)
        width, heads, dim = config.hidden_size, config.num_heads, config.head_dim
        inner = heads * dim
        project = functools.partial(
            linear, dtype=config.dtype, param_dtype=param_dtype, precision=config.matmul_precision, std=0.02, rngs=rngs
        )
        self.qkv_proj = project(width, 3 * inner)  # q | k | v, convolved together
        self.conv1d = CausalConvolution(3 * inner, config.short_conv_kernel_size, param_dtype=param_dtype, rngs=rngs)
        self.f_a_proj = project(width, dim)
        self.f_b_proj = project(dim, inner, output_dtype="float32")
        self.b_proj = project(width, heads, output_dtype="float32")
        self.g_a_proj = project(width, dim)
        self.g_b_proj = project(dim, inner)
        self.A_log = Float32Param(init_log_rate(rngs.params(), (heads,)))
        self.dt_bias = Float32Param(init_time_step(rngs.params(), (heads, dim)))
        self.o_norm = GatedRMSNorm(dim, eps=config.rms_norm_eps, activation=jax.nn.sigmoid)
        self.o_proj = project(inner, width)

    def log_decay(self, x: Array) -> Array:
        """Log decay per key channel, float32 [B, T, H, D], of inputs [B, T, hidden_size]."""
        f = self.f_b_proj(self.f_a_proj(x))
        f = f.reshape(*x.shape[:2], self.config.num_heads, self.config.head_dim)
        return log_decay(f, self.A_log[...][:, None], self.dt_bias[...])

    def __call__(self, x: Array, cache: RecurrentCache, span: Span, *, step: bool) -> tuple[Array, RecurrentCache]:
        """As `models.qwen35.delta_net.GatedDeltaNet.__call__`: packed inputs and the cache, in and out."""
        batch, num_tokens, _ = x.shape
        shape = (batch, num_tokens, self.config.num_heads, self.config.head_dim)
        counts = None if span.valid is None else span.counts
        mixed, conv = self.conv1d(self.qkv_proj(x), cache.conv, counts)
        q, k, v = (y.reshape(shape) for y in jnp.split(mixed, 3, axis=-1))
        beta = jax.nn.sigmoid(self.b_proj(x))
        out, cache = advance(cache, conv, q, k, v, self.log_decay(x), beta, span, step=step)
        gate = self.g_b_proj(self.g_a_proj(x)).reshape(shape)
        y = self.o_norm(out, gate).astype(x.dtype)
        return self.o_proj(y.reshape(batch, num_tokens, -1)), cache


def init_cache(config: Config, *, batch: int, method: Any = "exact") -> RecurrentCache:
    """The cache of `batch` rows that have seen nothing, its state stored by `method`."""
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    method = resolve_method(method)
    heads, dim = config.num_heads, config.head_dim
    conv = jnp.zeros((batch, config.short_conv_kernel_size - 1, 3 * heads * dim), jnp.dtype(config.dtype))
    state = method.init(batch=batch, num_heads=heads, num_key_heads=heads, key_dim=dim, value_dim=dim, gate="channel")
    return RecurrentCache(conv, state, method)


@jax.jit
def prefill(
    layer: KimiDeltaAttention, x: Array, cache: RecurrentCache, mask: Array | None = None
) -> tuple[Array, RecurrentCache]:
    """Several tokens at once, continuing the cache.

    Args:
      layer: The parameters.
      x: [B, T, hidden_size] in the layer's dtype.
      cache: The cache before the call.
      mask: [B, T], nonzero at real tokens, anywhere in their rows; None when all are.

    Returns:
      [B, T, hidden_size], zero at padding, and the new cache.
    """
    _check_input(layer, x, 3, cache)
    lengths = jnp.zeros((x.shape[0],), jnp.int32)  # nothing here depends on absolute positions
    if mask is None:
        return layer(x, cache, full_span(lengths, x.shape[1]), step=False)
    if mask.shape != x.shape[:2]:
        raise ValueError(f"mask must be [B, T] = {x.shape[:2]}, got {mask.shape}")
    mask = mask.astype(bool)
    y, cache = layer(pack(x, mask), cache, masked_span(lengths, mask), step=False)
    return unpack(y, mask), cache


@jax.jit
def step(
    layer: KimiDeltaAttention, x: Array, cache: RecurrentCache, active: Array | None = None
) -> tuple[Array, RecurrentCache]:
    """One token for every row: x [B, hidden_size] to [B, hidden_size]. Rows that are not active keep their cache."""
    _check_input(layer, x, 2, cache)
    lengths = jnp.zeros((x.shape[0],), jnp.int32)
    span = full_span(lengths, 1) if active is None else Span(lengths, active.astype(jnp.int32), active[:, None])
    y, cache = layer(x[:, None], cache, span, step=True)
    y = y[:, 0]
    return (y if active is None else jnp.where(active[:, None], y, jnp.zeros((), y.dtype))), cache


def load_layer(
    path: str | os.PathLike, *, layer_index: int | None = None, dtype: str | None = None
) -> tuple[Config, KimiDeltaAttention]:
    """Loads one KDA layer from a checkpoint in the public names.

    Args:
      path: A directory with config.json and safetensors, whole model or one layer ("layer.safetensors").
      layer_index: Counted from 0; the first KDA layer if None.
      dtype: Cast to this dtype and compute in it; None keeps the file's. Decays and the norm are float32 always.

    Raises:
      FileNotFoundError: If a file is missing.
      ValueError: If the layer is not a KDA layer, or its tensors are unknown, missing or misshapen (naming them).
    """
    directory = Path(path)
    config = Config.from_hf(read_json(directory / "config.json"))
    layer_index = config.kda_layers[0] if layer_index is None else layer_index
    if layer_index not in config.kda_layers:
        raise ValueError(f"layer {layer_index} is not a KDA layer; those are {config.kda_layers}")
    single = directory / "layer.safetensors"
    checkpoint = Checkpoint(single if single.exists() else directory)
    prefix = f"model.layers.{layer_index}.self_attn."
    shapes = _tensor_shapes(config)
    check_names([prefix + n for n in shapes], [n for n in checkpoint.files if n.startswith(prefix)])
    tensors = {name: checkpoint.read(prefix + name) for name in shapes}
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise ValueError(f"tensor {prefix}{name} has shape {tensors[name].shape}, config.json asks for {shape}")
    config = dataclasses.replace(config, dtype=dtype or str(tensors["o_proj.weight"].dtype))

    def stacked(suffix: str) -> np.ndarray:
        return np.concatenate([tensors[f"{x}_{suffix}.weight"] for x in "qkv"])

    values = {
        ("qkv_proj", "kernel"): stacked("proj").T,
        ("conv1d", "kernel"): stacked("conv1d")[:, 0].T,
        ("A_log",): tensors["A_log"].reshape(-1),
        ("dt_bias",): tensors["dt_bias"].reshape(config.num_heads, config.head_dim),
        ("o_norm", "weight"): tensors["o_norm.weight"],
    }
    for name in ("f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj", "o_proj"):
        values[(name, "kernel")] = tensors[f"{name}.weight"].T
    graphdef, parameters = nnx.split(nnx.eval_shape(lambda: KimiDeltaAttention(config, rngs=nnx.Rngs(0))))
    loaded = []
    for key, variable in nnx.to_flat_state(parameters):
        kept = jnp.float32 if isinstance(variable, Float32Param) else config.dtype
        loaded.append((key, variable.replace(jnp.asarray(values[key], dtype=kept))))
    return config, nnx.merge(graphdef, nnx.from_flat_state(loaded))


def _tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of one layer with its shape in the checkpoint."""
    width, heads, dim, inner = config.hidden_size, config.num_heads, config.head_dim, config.num_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"A_log": (1, 1, heads, 1), "dt_bias": (inner,), "o_norm.weight": (dim,)}
    for x in "qkv":
        shapes[f"{x}_proj.weight"] = (inner, width)
        shapes[f"{x}_conv1d.weight"] = (inner, 1, config.short_conv_kernel_size)
    for x in "fg":
        shapes[f"{x}_a_proj.weight"] = (dim, width)
        shapes[f"{x}_b_proj.weight"] = (inner, dim)
    return shapes | {"b_proj.weight": (heads, width), "o_proj.weight": (width, inner)}


def _check_input(layer: KimiDeltaAttention, x: Array, rank: int, cache: RecurrentCache) -> None:
    config = layer.config
    if x.ndim != rank or x.shape[-1] != config.hidden_size or x.dtype != jnp.dtype(config.dtype):
        expected = "[B, T, hidden_size]" if rank == 3 else "[B, hidden_size]"
        raise ValueError(
            f"x must be {config.dtype} {expected} with hidden_size={config.hidden_size}, got {x.dtype} {x.shape}"
        )
    if x.shape[0] != cache.conv.shape[0]:
        raise ValueError(f"x has {x.shape[0]} rows but the cache has {cache.conv.shape[0]}")
