"""Gated DeltaNet: the recurrent layer of Qwen3.5."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from models.blocks import CausalConvolution, Float32Param, GatedRMSNorm, linear
from models.qwen35.config import Config
from models.ragged import Span
from models.recurrent import RecurrentCache, advance


class GatedDeltaNet(nnx.Module):
    """Projections, a short convolution, the gated delta rule and a gated norm.

    Per value head, with the decay exp(g) and the write strength beta computed from the layer's input,

        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = S_t^T q_t.
    """

    def __init__(self, config: Config, *, param_dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        heads, width = config.linear_num_value_heads, config.hidden_size
        values = heads * config.linear_value_head_dim
        options = dict(
            dtype=config.dtype, param_dtype=param_dtype, precision=config.matmul_precision,
            std=config.initializer_range, rngs=rngs,
        )  # fmt: skip
        self.in_proj_qkv = linear(width, config.linear_conv_dim, **options)
        self.in_proj_z = linear(width, values, **options)
        # The gates' products are handed over in float32: a rounding here would be a rounding of every write.
        self.in_proj_b = linear(width, heads, output_dtype="float32", **options)
        self.in_proj_a = linear(width, heads, output_dtype="float32", **options)
        self.conv1d = CausalConvolution(
            config.linear_conv_dim, config.linear_conv_kernel_dim, param_dtype=param_dtype, rngs=rngs
        )
        self.A_log = Float32Param(init_log_rate(rngs.params(), (heads,)))
        self.dt_bias = Float32Param(init_time_step(rngs.params(), (heads,)))
        self.norm = GatedRMSNorm(config.linear_value_head_dim, eps=config.rms_norm_eps, activation=jax.nn.silu)
        self.out_proj = linear(values, width, **options)

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


def log_decay(a: Array, log_rate: Array, bias: Array) -> Array:
    """g = -exp(A_log) softplus(a + dt_bias) in float32; `log_rate` and `bias` broadcast over leading axes.

    `jax.nn.softplus` is log-add-exp, so a large pre-activation decays the state instead of erasing it.
    """
    rate, bias = (jnp.broadcast_to(y.astype(jnp.float32), a.shape) for y in (jnp.exp(log_rate), bias))
    return -rate * jax.nn.softplus(a.astype(jnp.float32) + bias)


def init_log_rate(key: Array, shape: tuple[int, ...]) -> Array:
    """log A with A ~ U(1, 16), as Mamba and FLA start their decays."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0))


def init_time_step(key: Array, shape: tuple[int, ...]) -> Array:
    """dt_bias whose softplus is log-uniform in [1e-3, 1e-1], so that fresh heads remember ten to thousands of tokens."""
    dt = jnp.exp(jax.random.uniform(key, shape, jnp.float32, math.log(1e-3), math.log(1e-1)))
    return dt + jnp.log(-jnp.expm1(-dt))
