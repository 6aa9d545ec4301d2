"""Samplers: from logits to tokens, each row with its own key."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class Greedy:
    """The most likely token; the key is not used."""

    def __call__(self, logits: Array, keys: Array) -> Array:
        """Float32 logits [B, vocab] and keys [B] to int32 tokens [B]."""
        del keys
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Temperature:
    """Samples from softmax(logits / temperature)."""

    temperature: float = 1.0

    def __post_init__(self):
        _check_temperature(self.temperature)

    def __call__(self, logits: Array, keys: Array) -> Array:
        """Float32 logits [B, vocab] and keys [B] to int32 tokens [B]."""
        return _categorical(logits / self.temperature, keys)


@dataclasses.dataclass(frozen=True)
class TopK:
    """Samples among the k most likely tokens."""

    k: int
    temperature: float = 1.0

    def __post_init__(self):
        _check_temperature(self.temperature)
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k}")

    def __call__(self, logits: Array, keys: Array) -> Array:
        """Float32 logits [B, vocab] and keys [B] to int32 tokens [B]."""
        values, indices = jax.lax.top_k(logits, min(self.k, logits.shape[-1]))
        choice = _categorical(values / self.temperature, keys)
        return jnp.take_along_axis(indices, choice[:, None], axis=-1)[:, 0].astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class TopP:
    """Samples among the fewest tokens whose probabilities sum to at least p."""

    p: float
    temperature: float = 1.0

    def __post_init__(self):
        _check_temperature(self.temperature)
        if not 0 < self.p <= 1:
            raise ValueError(f"p must lie in (0, 1], got {self.p}")

    def __call__(self, logits: Array, keys: Array) -> Array:
        """Float32 logits [B, vocab] and keys [B] to int32 tokens [B]."""
        values, indices = jax.lax.top_k(logits / self.temperature, logits.shape[-1])
        probabilities = jax.nn.softmax(values, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities  # mass of the tokens ranked above
        choice = _categorical(jnp.where(before < self.p, values, -jnp.inf), keys)
        return jnp.take_along_axis(indices, choice[:, None], axis=-1)[:, 0].astype(jnp.int32)


Sampler = Greedy | Temperature | TopK | TopP


def _categorical(logits: Array, keys: Array) -> Array:
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}; use Greedy() for the limit 0")
