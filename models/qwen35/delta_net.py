"""Gated DeltaNet: the recurrent layer of Qwen3.5."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from models.blocks import CausalConvolution, Float32Param, GatedRMSNorm, linear
from models.qwen35.config import Config
from models.ragged import Span
from models.recurrent import RecurrentCache, advance, init_log_rate, init_time_step, log_decay


class GatedDeltaNet(nnx.Module):
    """Projections, a short convolution, the gated delta rule and a gated norm.

    Per value head, with the decay exp(g) and the write strength beta computed from the layer's input,

        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = S_t^T q_t.
    """

    def __init__(self, config: Config, *, param_dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        heads, width = config.linear_num_value_heads, config.hidden_size
        values = heads * config.linear_value_head_dim
        project = functools.partial(
            linear, dtype=config.dtype, param_dtype=param_dtype, precision=config.matmul_precision,
            std=config.initializer_range, rngs=rngs,
        )  # fmt: skip
        self.in_proj_qkv = project(width, config.linear_conv_dim)
        self.in_proj_z = project(width, values)
        # The gates' products are handed over in float32: a rounding here would be a rounding of every write.
        self.in_proj_b = project(width, heads, output_dtype="float32")
        self.in_proj_a = project(width, heads, output_dtype="float32")
        self.conv1d = CausalConvolution(
            config.linear_conv_dim, config.linear_conv_kernel_dim, param_dtype=param_dtype, rngs=rngs
        )
        self.A_log = Float32Param(init_log_rate(rngs.params(), (heads,)))
        self.dt_bias = Float32Param(init_time_step(rngs.params(), (heads,)))
        self.norm = GatedRMSNorm(config.linear_value_head_dim, eps=config.rms_norm_eps, activation=jax.nn.silu)
        self.out_proj = project(values, width)

    def __call__(self, x: Array, cache: RecurrentCache, span: Span, *, step: bool) -> tuple[Array, RecurrentCache]:
        """Mixes the tokens of one call into the state.

        Args:
          x: [B, T, hidden_size], real tokens first.
          cache: The layer's cache before the call.
          span: The real positions.
          step: Whether this is a decode step, T = 1.

        Returns:
          [B, T, hidden_size] and the new cache.
        """
        config = self.config
        batch, num_tokens, _ = x.shape
        counts = None if span.valid is None else span.counts
        mixed, conv = self.conv1d(self.in_proj_qkv(x), cache.conv, counts)
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        q, k, v = jnp.split(mixed, (keys, 2 * keys), axis=-1)
        q, k = (y.reshape(batch, num_tokens, -1, config.linear_key_head_dim) for y in (q, k))
        v = v.reshape(batch, num_tokens, -1, config.linear_value_head_dim)

        beta = jax.nn.sigmoid(self.in_proj_b(x))
        g = log_decay(self.in_proj_a(x), self.A_log[...], self.dt_bias[...])
        out, cache = advance(cache, conv, q, k, v, g, beta, span, step=step)

        z = self.in_proj_z(x).reshape(out.shape)
        y = self.norm(out, z).astype(x.dtype)
        return self.out_proj(y.reshape(batch, num_tokens, -1)), cache
