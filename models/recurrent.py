"""What gated DeltaNet and Kimi delta attention share: a layer's cache, its advance by one call, and the decays."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import leapquant_jax as lq
from models.ragged import Span


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentCache:
    """The constant-size memory of one recurrent layer. Every leaf has the batch as its leading axis.

    Attributes:
      conv: [B, taps - 1, C] in the activation dtype, the newest inputs of the convolution, newest last; zeros
        before the start.
      recurrent: The state of `method`, opaque here.
      method: A `leapquant_jax` state method; static.
    """

    conv: Array
    recurrent: Any
    method: Any = dataclasses.field(metadata={"static": True})


def resolve_method(method: Any) -> Any:
    """A state method from its name; a method object passes through.

    Raises:
      ValueError: If the name is unknown or the object does not follow the protocol.
    """
    if isinstance(method, str):
        return lq.get_method(method)
    if isinstance(method, lq.Policy):
        raise ValueError("a Policy holds a method for each layer: pass policy.method(layer)")
    if not all(hasattr(method, name) for name in ("init", "step", "prefill", "dense_state")):
        raise ValueError(f"method must be one of {lq.list_methods()} or a method object, got {method!r}")
    return method


def advance(
    cache: RecurrentCache, conv: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, span: Span, *, step: bool
) -> tuple[Array, RecurrentCache]:
    """Runs the recurrence over the tokens of one call.

    q and k are L2-normalised and q scaled here, once for prefill and decode, so that callers cannot disagree.

    Args:
      cache: The layer's cache before the call.
      conv: The convolution history after the call, [B, taps - 1, C].
      q, k: [B, T, G, K], any float dtype, neither normalised nor scaled.
      v: [B, T, H, V].
      g: Log decay, float32 [B, T, H] or [B, T, H, K].
      beta: Write strength, float32 [B, T, H].
      span: The real positions.
      step: Use the method's single-token step; T must be 1.

    Returns:
      Outputs float32 [B, T, H, V], zero at padding, and the new cache.
    """
    q = lq.l2norm(q.astype(jnp.float32)) * q.shape[-1] ** -0.5
    k = lq.l2norm(k.astype(jnp.float32))
    inputs = (q, k, v.astype(jnp.float32), g, beta)
    if step:
        active = None if span.valid is None else span.valid[:, 0]
        state, out = cache.method.step(cache.recurrent, *(x[:, 0] for x in inputs), active=active)
        out = out[:, None]
    else:
        state, out = cache.method.prefill(cache.recurrent, *inputs, mask=span.valid)
    return out, RecurrentCache(conv, state, cache.method)


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
    """dt_bias with its softplus log-uniform in [1e-3, 1e-1]: fresh heads remember from a few to a thousand tokens."""
    dt = jnp.exp(jax.random.uniform(key, shape, jnp.float32, math.log(1e-3), math.log(1e-1)))
    return dt + jnp.log(-jnp.expm1(-dt))
