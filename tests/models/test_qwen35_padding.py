"""Padding and ragged batches: a row's result is its own, wherever its padding stands and whoever its neighbours are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import qwen35
from tests.models.helpers import (
    assert_bit_equal,
    decode,
    left_pad,
    random_tokens,
    recurrent_layers,
    right_pad,
    row,
)  # fmt: skip

METHODS = ["exact", "leapquant-int8"]
LENGTHS = [5, 16, 17, 200, 0]


@pytest.fixture(scope="module", params=METHODS)
def method(request):
    return request.param


def _cache(small, method, batch=5):
    return small.cache(batch, max_length=256, method=method)


@pytest.mark.parametrize("batch", [1, 5])
def test_A04_left_padding_changes_nothing(small, method, batch):
    tokens = jnp.broadcast_to(random_tokens(4, 1, 37, 320), (batch, 37))
    alone, alone_cache = qwen35.prefill(small.model, tokens, _cache(small, method, batch))
    pads = [27, 0, 1, 3, 20][:batch]
    padded, mask = np.zeros((2, batch, 64), np.int32)
    for b, pad in enumerate(pads):
        padded[b, pad : pad + 37], mask[b, pad : pad + 37] = tokens[0], 1
    logits, cache = qwen35.prefill(small.model, padded, _cache(small, method, batch), mask)
    assert_bit_equal(cache, alone_cache)
    assert cache.lengths.tolist() == [37] * batch
    for b, pad in enumerate(pads):
        np.testing.assert_allclose(logits[b, pad : pad + 37], alone[b], atol=1e-5)
        assert not logits[b, :pad].any() and not logits[b, pad + 37 :].any()
    if method != "exact":
        assert recurrent_layers(cache)[0].recurrent.position.tolist() == [37 % 16] * batch


def _prefill_in_chunks(small, tokens, mask, method):
    cache = _cache(small, method)
    for start in range(0, 256, 64):
        chunk = slice(start, start + 64)
        _, cache = qwen35.prefill(small.model, tokens[:, chunk], cache, mask[:, chunk])
    return cache


def test_A05_each_row_of_a_ragged_batch_is_independent(small, method):
    tokens, mask = right_pad(random_tokens(5, 5, 200, 320), LENGTHS, 256)
    more = random_tokens(6, 5, 20, 320)
    together = _prefill_in_chunks(small, tokens, mask, method)
    _, together_after = decode(small.model, more, together)
    assert together.lengths.tolist() == LENGTHS
    assert_bit_equal(row(together, 4), row(_cache(small, method), 4))
    for b in range(5):
        only = jnp.arange(5)[:, None] == b
        alone = _prefill_in_chunks(small, jnp.where(only, tokens, 0), jnp.where(only, mask, 0), method)
        _, alone_after = decode(small.model, jnp.where(only, more, 0), alone)
        assert_bit_equal(row(together, b), row(alone, b))
        assert_bit_equal(row(together_after, b), row(alone_after, b))
    for leaf in jax.tree.leaves(together_after):
        assert np.isfinite(np.asarray(leaf, np.float32)).all()


def test_A05_a_row_generates_the_same_alone_and_in_a_ragged_batch(small):
    source = random_tokens(7, 5, 40, 320)
    sampler, key = qwen35.Temperature(0.8), jax.random.key(3)
    tokens, mask = left_pad(source, [5, 16, 17, 40, 1], 40)
    together, _ = qwen35.generate(
        small.model, tokens, _cache(small, "exact"), num_tokens=20, mask=mask, sampler=sampler, key=key
    )
    for b, n in enumerate([5, 16]):
        alone, _ = qwen35.generate(
            small.model, source[b : b + 1, :n], _cache(small, "exact", 1), num_tokens=20, sampler=sampler,
            key=jax.random.fold_in(key, b)[None],
        )  # fmt: skip
        np.testing.assert_array_equal(together[b], alone[0])


def test_padding_may_stand_anywhere(small):
    tokens = jnp.broadcast_to(random_tokens(8, 1, 9, 320), (5, 9))
    places = jnp.array([1, 2, 5, 6, 7, 11, 15, 16, 18])
    mask = jnp.zeros((5, 20), bool).at[:, places].set(True)
    scattered = jnp.full((5, 20), -1, jnp.int32).at[:, places].set(tokens)
    logits, packed = qwen35.prefill(small.model, tokens, _cache(small, "exact"))
    spread, spread_cache = qwen35.prefill(small.model, scattered, _cache(small, "exact"), mask)
    np.testing.assert_allclose(spread[:, places], logits, atol=1e-5)
    assert_bit_equal(packed, spread_cache)
    last, _ = qwen35.prefill(small.model, scattered, _cache(small, "exact"), mask, last_only=True)
    np.testing.assert_allclose(last, logits[:, -1], atol=1e-5)


def test_inactive_rows_keep_their_cache(small, method):
    tokens = random_tokens(9, 5, 6, 320)
    _, cache = qwen35.prefill(small.model, tokens, _cache(small, method))
    active = jnp.array([False, True, True, False, True])
    logits, after = qwen35.decode_step(small.model, tokens[:, 0], cache, active=active)
    everyone, _ = qwen35.decode_step(small.model, tokens[:, 0], cache, active=jnp.ones((5,), bool))
    for b in range(5):
        assert int(after.lengths[b]) == 6 + int(active[b])
        if active[b]:
            np.testing.assert_allclose(logits[b], everyone[b], atol=1e-5)
        else:
            assert not logits[b].any()
            assert_bit_equal(row(cache, b), row(after, b))


def test_empty_calls(small):
    cache = _cache(small, "exact")
    logits, after = qwen35.prefill(small.model, jnp.zeros((5, 0), jnp.int32), cache)
    assert logits.shape == (5, 0, 320)
    assert_bit_equal(cache, after)
