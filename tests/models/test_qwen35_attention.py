"""Gated attention: ring and plain cache against a masked softmax, ragged rows, and the blocks of long prefills."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import qwen35
from models.qwen35.attention import AttentionCache, GatedAttention, apply_rope
from models.ragged import Span, full_span
from tests.models.helpers import decode, random_tokens

WINDOW = 7


def _layer(window: int | None) -> GatedAttention:
    config = qwen35.Config(
        vocab_size=8, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, linear_num_key_heads=1, linear_num_value_heads=1, partial_rotary_factor=0.5,
        layer_types=("full_attention",), initializer_range=0.4, attention_window=window, rope_theta=100.0,
    )  # fmt: skip
    return GatedAttention(config, param_dtype=jnp.dtype("float32"), rngs=nnx.Rngs(5))


def _reference(layer: GatedAttention, x: np.ndarray, window: int | None) -> np.ndarray:
    """The layer's equations with an explicit T x T mask, for one row."""
    x = jnp.asarray(x)[None]
    num_tokens = x.shape[1]
    q, gate = jnp.split(layer.q_proj(x).reshape(1, num_tokens, 4, 16), 2, axis=-1)
    k, v = (project(x).reshape(1, num_tokens, 2, 8) for project in (layer.k_proj, layer.v_proj))
    positions = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    q, k = (
        apply_rope(norm(y), positions=positions, dim=4, theta=100.0)
        for norm, y in ((layer.q_norm, q), (layer.k_norm, k))
    )
    q, k, v = (np.asarray(y[0], np.float64) for y in (q, k, v))
    k, v = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)
    scores = np.einsum("thd,nhd->htn", q, k) / np.sqrt(8)
    age = np.arange(num_tokens)[:, None] - np.arange(num_tokens)[None]
    seen = (age >= 0) & (age < (window or num_tokens))
    weights = np.exp(np.where(seen, scores, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("htn,nhd->thd", weights, v) / (1 + np.exp(-np.asarray(gate[0], np.float64)))
    return out.reshape(num_tokens, 32) @ np.asarray(layer.o_proj.kernel[...], np.float64)


def _empty(batch: int, slots: int) -> AttentionCache:
    return AttentionCache(jnp.zeros((batch, 2, slots, 8)), jnp.zeros((batch, 2, slots, 8)))


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize(
    "split", [[600], [5, 300, 1, 1, 9, 260, 24], [3] * 4 + [1] * 12 + [20]], ids=["one", "long", "short"]
)
def test_any_split_equals_a_masked_softmax(window, split):
    layer = _layer(window)
    x = np.random.default_rng(0).standard_normal((2, sum(split), 16)).astype(np.float32)
    run = jax.jit(
        lambda x, cache, lengths, step: layer(x, cache, full_span(lengths, x.shape[1]), step=step), static_argnums=3
    )
    cache, start, outs = _empty(2, window or 600), 0, []
    for n in split:
        out, cache = run(x[:, start : start + n], cache, jnp.full((2,), start, jnp.int32), n == 1)
        outs.append(out)
        start += n
    for b in range(2):
        np.testing.assert_allclose(np.concatenate(outs, axis=1)[b], _reference(layer, x[b], window), atol=2e-5)


@pytest.mark.parametrize("window", [None, WINDOW])
def test_ragged_rows_write_only_their_own_slots(window):
    layer = _layer(window)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((4, 40, 16)), jnp.float32)
    counts = jnp.array([40, 9, 3, 0], jnp.int32)
    valid = jnp.arange(40, dtype=jnp.int32)[None] < counts[:, None]
    poisoned = jnp.where(valid[..., None], x, jnp.nan)
    run = jax.jit(lambda x, counts, valid: layer(x, empty, Span(jnp.zeros_like(counts), counts, valid), step=False))
    empty = _empty(4, window or 64)
    out, cache = run(poisoned, counts, valid)
    assert np.isfinite(cache.keys).all() and not cache.keys[3].any()
    for b, n in enumerate(counts.tolist()):
        whole, whole_cache = run(x, jnp.full((4,), n, jnp.int32), valid[b : b + 1] & jnp.ones((4, 1), bool))
        np.testing.assert_allclose(out[b, :n], whole[b, :n], atol=1e-5)
        np.testing.assert_allclose(cache.keys[b], whole_cache.keys[b], atol=1e-5)
        if n:
            np.testing.assert_allclose(out[b, :n], _reference(layer, x[b, :n], window), atol=2e-5)


def test_window_cache_stays_small_and_never_fills(small):
    config = dataclasses.replace(small.config, attention_window=16)
    model = qwen35.with_config(small.model, config)
    cache = qwen35.init_cache(config, batch=1)
    assert cache.layers[1].keys.shape[2] == 16
    tokens = random_tokens(2, 1, 60, 320)
    whole, _ = qwen35.prefill(model, tokens, cache)
    first, cache = qwen35.prefill(model, tokens[:, :40], cache)
    rest, cache = decode(model, tokens[:, 40:], cache)
    np.testing.assert_allclose(jnp.concatenate([first, rest], axis=1), whole, atol=1e-4)
    plain, _ = qwen35.prefill(small.model, tokens, small.cache(1))
    np.testing.assert_allclose(whole[:, :16], plain[:, :16], atol=1e-4)
    assert np.abs(whole[:, 40:] - plain[:, 40:]).max() > 0.01


def test_a_cache_of_another_window_is_refused(small):
    model = qwen35.with_config(small.model, dataclasses.replace(small.config, attention_window=16))
    with pytest.raises(ValueError, match="attention_window=16"):
        qwen35.decode_step(model, jnp.zeros((1,), jnp.int32), small.cache(1))


def test_full_cache_raises_before_writing(small):
    cache = small.cache(2, max_length=8)
    with pytest.raises(ValueError, match="max_length=8"):
        qwen35.prefill(small.model, jnp.zeros((2, 9), jnp.int32), cache)
    with pytest.raises(ValueError, match="max_length=8"):
        qwen35.generate(small.model, jnp.zeros((2, 4), jnp.int32), cache, num_tokens=6)
    mask = jnp.zeros((2, 9), bool).at[:, :8].set(True)
    _, cache = qwen35.prefill(small.model, jnp.zeros((2, 9), jnp.int32), cache, mask)
    with pytest.raises(ValueError, match="9 tokens"):
        qwen35.decode_step(small.model, jnp.zeros((2,), jnp.int32), cache)
