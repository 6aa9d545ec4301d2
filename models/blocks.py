"""Building blocks of the layers: fp32 parameters, linear maps, RMS norms and the causal convolution."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


class Float32Param(nnx.Param):
    """A parameter that stays float32 when the model is cast: decays and gated norms lose too much in bfloat16."""


def linear(
    in_features: int, out_features: int, *, dtype: Any, param_dtype: Any, precision: str, std: float, rngs: nnx.Rngs,
    output_dtype: Any = None,
) -> nnx.Linear:  # fmt: skip
    """A linear map without bias, its kernel stored [in, out].

    Args:
      in_features: Input width.
      out_features: Output width.
      dtype: Dtype the product is computed in; sums are float32 on every accelerator.
      param_dtype: Dtype of the stored kernel.
      precision: `jax.lax.Precision` by name.
      std: Standard deviation of the fresh kernel.
      rngs: Source of randomness.
      output_dtype: Dtype of the result, if not `dtype`.
    """
    return nnx.Linear(
        in_features, out_features, use_bias=False, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(param_dtype),
        precision=precision, preferred_element_type=None if output_dtype is None else jnp.dtype(output_dtype),
        kernel_init=nnx.initializers.normal(std), rngs=rngs,
    )  # fmt: skip


def normalize_rms(x: Array, eps: float) -> Array:
    """x / sqrt(mean(x**2) + eps) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + jnp.float32(eps))


class RMSNorm(nnx.Module):
    """The zero-centred RMS norm: normalize(x) * (1 + weight), in float32 with one cast back at the end."""

    def __init__(self, features: int, *, eps: float, param_dtype: Any):
        self.weight = nnx.Param(jnp.zeros((features,), param_dtype))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        scale = 1 + self.weight[...].astype(jnp.float32)
        return (normalize_rms(x, self.eps) * jnp.broadcast_to(scale, x.shape)).astype(x.dtype)


class GatedRMSNorm(nnx.Module):
    """normalize(x) * weight * activation(gate): norm before gate, plain weight, all in float32."""

    def __init__(self, features: int, *, eps: float, activation: Any):
        self.weight = Float32Param(jnp.ones((features,), jnp.float32))
        self.eps = eps
        self.activation = activation

    def __call__(self, x: Array, gate: Array) -> Array:
        y = normalize_rms(x, self.eps) * jnp.broadcast_to(self.weight[...], x.shape)
        return y * self.activation(gate.astype(jnp.float32))


class CausalConvolution(nnx.Module):
    """A depthwise convolution over time followed by silu. The last tap meets the newest token.

    The taps are summed in float32, and the result stays float32: its readers are the L2 norm and the recurrence.
    """

    def __init__(self, channels: int, taps: int, *, param_dtype: Any, rngs: nnx.Rngs):
        bound = taps**-0.5
        kernel = jax.random.uniform(rngs.params(), (taps, channels), jnp.float32, -bound, bound)
        self.kernel = nnx.Param(kernel.astype(param_dtype))

    def __call__(self, x: Array, history: Array, counts: Array | None) -> tuple[Array, Array]:
        """Convolves a call's tokens after those of `history`.

        Args:
          x: [B, T, C], real tokens first.
          history: [B, taps - 1, C], the inputs before x.
          counts: int32 [B], real tokens of each row; None when all T are.

        Returns:
          Float32 [B, T, C] and the history after the last real token, in the dtype of `history`.
        """
        num_tokens, past = x.shape[1], history.shape[1]
        inputs = jnp.concatenate([history, x.astype(history.dtype)], axis=1)
        kernel = self.kernel[...].astype(jnp.float32)
        out = jnp.zeros(x.shape, jnp.float32)
        for tap in range(past + 1):
            window = jax.lax.slice_in_dim(inputs, tap, tap + num_tokens, axis=1)
            out += window.astype(jnp.float32) * jnp.broadcast_to(kernel[tap], x.shape)
        if counts is None:
            history = inputs[:, num_tokens:]
        else:
            newest = counts[:, None] + jnp.arange(past, dtype=jnp.int32)[None]
            history = jnp.take_along_axis(inputs, newest[..., None], axis=1)
        return jax.nn.silu(out), history
