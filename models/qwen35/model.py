"""The Qwen3.5 text model, and its two entry points: prefill and decode_step.

A row of a batch holds one text, and nothing of its result depends on the other rows: at a given batch width it is the
same bit for bit. Across batch widths it agrees up to rounding, because a matrix product may sum in another order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from models.blocks import RMSNorm, linear
from models.qwen35.attention import GatedAttention
from models.qwen35.cache import Cache, LayerCache
from models.qwen35.checks import check_prompt, check_step
from models.qwen35.config import LINEAR, Config
from models.qwen35.delta_net import GatedDeltaNet
from models.ragged import Span, full_span, last_real, masked_span, pack, unpack

# Prefill lengths are padded to a multiple of this, the chunk length of the delta rule.
PREFILL_BLOCK = 64


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Config, *, param_dtype: jnp.dtype, rngs: nnx.Rngs):
        project = functools.partial(
            linear, dtype=config.dtype, param_dtype=param_dtype, precision=config.matmul_precision,
            std=config.initializer_range, rngs=rngs,
        )  # fmt: skip
        self.gate_proj = project(config.hidden_size, config.intermediate_size)
        self.up_proj = project(config.hidden_size, config.intermediate_size)
        self.down_proj = project(config.intermediate_size, config.hidden_size)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """A mixer and an MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: Config, kind: str, *, param_dtype: jnp.dtype, rngs: nnx.Rngs):
        self.kind = kind
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, param_dtype=param_dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, param_dtype=param_dtype)
        if kind == LINEAR:
            self.linear_attn = GatedDeltaNet(config, param_dtype=param_dtype, rngs=rngs)
        else:
            self.self_attn = GatedAttention(config, param_dtype=param_dtype, rngs=rngs)
        self.mlp = MLP(config, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, h: Array, cache: LayerCache, span: Span, *, step: bool) -> tuple[Array, LayerCache]:
        mixer: Any = self.linear_attn if self.kind == LINEAR else self.self_attn
        mixed, cache = mixer(self.input_layernorm(h), cache, span, step=step)
        h = h + mixed
        return h + self.mlp(self.post_attention_layernorm(h)), cache


class Model(nnx.Module):
    """The parameters of a Qwen3.5 text model, named as in its checkpoints. A JAX pytree.

    Attributes:
      config: The static configuration.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs, param_dtype: jnp.dtype | str | None = None):
        """Fresh parameters.

        Args:
          config: The configuration.
          rngs: Source of randomness.
          param_dtype: Dtype of the stored parameters, `config.dtype` if None. "float32" under a bfloat16
            config keeps master weights, cast at each use. Decays and gated norms are float32 always.
        """
        self.config = config
        dtype = jnp.dtype(config.dtype)
        param_dtype = jnp.dtype(param_dtype or dtype)
        self.embed_tokens = nnx.Embed(
            config.vocab_size, config.hidden_size, dtype=dtype, param_dtype=param_dtype,
            embedding_init=nnx.initializers.normal(config.initializer_range), rngs=rngs,
        )  # fmt: skip
        self.layers = nnx.List([Layer(config, kind, param_dtype=param_dtype, rngs=rngs) for kind in config.layer_types])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, param_dtype=param_dtype)
        if not config.tie_word_embeddings:
            self.lm_head = linear(
                config.hidden_size, config.vocab_size, dtype=dtype, param_dtype=param_dtype, output_dtype="float32",
                precision=config.matmul_precision, std=config.initializer_range, rngs=rngs,
            )  # fmt: skip

    def __call__(
        self, tokens: Array, cache: Cache, span: Span, *, step: bool = False, remat: bool = False
    ) -> tuple[Array, Cache]:
        """Runs the layers over packed tokens.

        Args:
          tokens: int [B, T], real tokens first.
          cache: The cache before the call.
          span: The real positions.
          step: Whether this is a decode step, T = 1.
          remat: Recompute each layer in the backward pass instead of keeping its activations.

        Returns:
          Final normed hidden states [B, T, hidden_size] and the cache after the call.
        """
        h = self.embed_tokens(tokens)
        layers = []
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            run = functools.partial(Layer.__call__, step=step)
            h, layer_cache = (jax.checkpoint(run) if remat else run)(layer, h, layer_cache, span)
            layers.append(layer_cache)
        return self.norm(h), Cache(cache.lengths + span.counts, tuple(layers))

    def head(self, h: Array) -> Array:
        """Logits of hidden states: [..., hidden_size] to float32 [..., vocab_size]."""
        if not self.config.tie_word_embeddings:
            return self.lm_head(h)
        return jnp.einsum(
            "...d,vd->...v", h, self.embed_tokens.embedding[...].astype(h.dtype),
            precision=self.config.matmul_precision, preferred_element_type=jnp.float32,
        )  # fmt: skip


def prefill(
    model: Model, tokens: Array, cache: Cache, mask: Array | None = None, *, last_only: bool = False,
    remat: bool = False,
) -> tuple[Array, Cache]:  # fmt: skip
    """Feeds several tokens to every row, continuing whatever the cache holds.

    All layers work on matrix products over the tokens; none scans them one by one. Any split of a text into calls
    gives the same result up to rounding. T is padded to a multiple of `PREFILL_BLOCK`, so prompts of many lengths
    share few compiled programs. Works inside `jax.jit` and `jax.lax.scan`, and is differentiable with the "exact"
    method.

    Args:
      model: The parameters.
      tokens: int [B, T].
      cache: The cache before the call.
      mask: [B, T], nonzero at real tokens of this call; None when all are. Padding may stand anywhere, and a row
        may be all padding: its cache is then unchanged.
      last_only: Return the logits of each row's last real token only.
      remat: Recompute layers in the backward pass instead of storing their activations.

    Returns:
      Float32 logits [B, T, vocab] ([B, vocab] with `last_only`), zero at padding, and the cache after the call.

    Raises:
      ValueError: For shapes or dtypes that do not fit, token ids outside the vocabulary, or rows that would outgrow
        `max_length`. The last two are only seen when values are concrete: under a trace, ids follow `jnp.take` and
        keys past the end are dropped.
    """
    tokens, mask = check_prompt(model.config, tokens, cache, mask)
    batch, num_tokens = tokens.shape
    if num_tokens == 0:
        shape = (batch, model.config.vocab_size) if last_only else (batch, 0, model.config.vocab_size)
        return jnp.zeros(shape, jnp.float32), cache
    tail = -num_tokens % PREFILL_BLOCK
    if tail:
        mask = jnp.ones(tokens.shape, bool) if mask is None else mask
        tokens, mask = (jnp.pad(x, ((0, 0), (0, tail))) for x in (tokens, mask))
    logits, cache = _prefill(model, tokens, cache, mask, last_only=last_only, remat=remat)
    return (logits if last_only or not tail else logits[:, :num_tokens]), cache


def decode_step(model: Model, tokens: Array, cache: Cache, *, active: Array | None = None) -> tuple[Array, Cache]:
    """Feeds one token to every row.

    Called outside a trace, it reads the cache's lengths to see that there is room (unless a window bounds attention),
    which waits for the step before. `generate`, or a `jax.lax.scan` of this function, has no such wait.

    Args:
      model: The parameters.
      tokens: int [B].
      cache: The cache before the call.
      active: bool [B]; an inactive row reads nothing, keeps its cache and gets zero logits. None: all are active.

    Returns:
      Float32 logits [B, vocab] and the cache after the call.

    Raises:
      ValueError: For shapes or dtypes that do not fit, or a full cache (when its lengths are concrete).
    """
    tokens = check_step(model.config, tokens, cache, active)
    return _decode_step(model, tokens, cache, active)


@functools.partial(jax.jit, static_argnames=("last_only", "remat"))
def _prefill(
    model: Model, tokens: Array, cache: Cache, mask: Array | None, *, last_only: bool, remat: bool
) -> tuple[Array, Cache]:
    if mask is None:
        span = full_span(cache.lengths, tokens.shape[1])
    else:
        span = masked_span(cache.lengths, mask)
        tokens = pack(jnp.where(mask, tokens, 0), mask)
    h, cache = model(tokens, cache, span, remat=remat)
    if last_only:
        return _keep(model.head(last_real(h, span.counts)), span.counts > 0), cache
    if mask is None:
        return model.head(h), cache
    return _keep(model.head(unpack(h, mask)), mask), cache


@jax.jit
def _decode_step(model: Model, tokens: Array, cache: Cache, active: Array | None) -> tuple[Array, Cache]:
    if active is None:
        span = full_span(cache.lengths, 1)
    else:
        span = Span(cache.lengths, active.astype(jnp.int32), active[:, None])
        tokens = jnp.where(active, tokens, 0)
    h, cache = model(tokens[:, None], cache, span, step=True)
    logits = model.head(h[:, 0])
    return (logits if active is None else _keep(logits, active)), cache


def _keep(logits: Array, real: Array) -> Array:
    return jnp.where(real[..., None], logits, jnp.float32(0))
