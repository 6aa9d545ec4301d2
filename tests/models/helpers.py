"""Small functions the model tests share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import leapquant_jax as lq
from models import qwen35
from models.recurrent import RecurrentCache


def random_tokens(seed: int, batch: int, num_tokens: int, vocab_size: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab_size, (batch, num_tokens)), jnp.int32)


def relative(x, reference) -> float:
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    return float(np.linalg.norm(x - reference) / np.linalg.norm(reference))


def assert_bit_equal(a, b) -> None:
    """Same structure, dtypes and bits in every leaf."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def recurrent_layers(cache: qwen35.Cache) -> list[RecurrentCache]:
    return [layer for layer in cache.layers if isinstance(layer, RecurrentCache)]


@jax.jit
def decode(model: qwen35.Model, tokens: jax.Array, cache: qwen35.Cache) -> tuple[jax.Array, qwen35.Cache]:
    """decode_step over [B, T] tokens as a user would write it: one jitted scan."""

    def body(cache, token):
        logits, cache = qwen35.decode_step(model, token, cache)
        return cache, logits

    cache, logits = jax.lax.scan(body, cache, tokens.T)
    return jnp.swapaxes(logits, 0, 1), cache


def left_pad(tokens: jax.Array, lengths: list[int], width: int) -> tuple[jax.Array, jax.Array]:
    """Row b of `tokens` cut to `lengths[b]` and moved to the right end of `width`, with the mask."""
    out, mask = np.zeros((2, len(lengths), width), np.int32)
    for b, n in enumerate(lengths):
        out[b, width - n :], mask[b, width - n :] = np.asarray(tokens)[b, :n], 1
    return jnp.asarray(out), jnp.asarray(mask)


def right_pad(tokens: jax.Array, lengths: list[int], width: int) -> tuple[jax.Array, jax.Array]:
    """Row b of `tokens` cut to `lengths[b]` at the left end of `width`, with the mask."""
    out, mask = np.zeros((2, len(lengths), width), np.int32)
    for b, n in enumerate(lengths):
        out[b, :n], mask[b, :n] = np.asarray(tokens)[b, :n], 1
    return jnp.asarray(out), jnp.asarray(mask)


def row(state: Any, index: int) -> Any:
    """One row of a cache or state, still batched."""
    return lq.take_rows(state, np.array([index]))
