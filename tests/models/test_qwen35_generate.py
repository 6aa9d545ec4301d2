"""Samplers and the decode loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import qwen35
from tests.models.helpers import random_tokens


def _draws(sampler, logits, count=400):
    keys = jax.random.split(jax.random.key(0), count)
    return np.asarray(sampler(jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits))), keys))


def test_samplers_draw_from_the_right_set():
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    assert set(_draws(qwen35.Greedy(), logits)) == {0}
    assert set(_draws(qwen35.Temperature(), logits)) == {0, 1, 2, 3}
    assert set(_draws(qwen35.Temperature(0.01), logits)) == {0}
    assert set(_draws(qwen35.TopK(2), logits[::-1])) == {2, 3}
    assert set(_draws(qwen35.TopK(99), logits)) == {0, 1, 2, 3}
    assert set(_draws(qwen35.TopP(0.4), logits)) == {0}
    assert set(_draws(qwen35.TopP(0.7), logits)) == {0, 1}
    assert set(_draws(qwen35.TopP(1.0), logits)) == {0, 1, 2, 3}
    share = np.mean(_draws(qwen35.TopP(0.7), logits, 4000) == 0)
    assert abs(share - 0.5 / 0.8) < 0.03


@pytest.mark.parametrize("bad", [lambda: qwen35.Temperature(0), lambda: qwen35.TopK(0), lambda: qwen35.TopP(0)])
def test_samplers_refuse_nonsense(bad):
    with pytest.raises(ValueError):
        bad()


def test_stop_tokens_end_a_row_and_freeze_its_cache(small):
    prompt = random_tokens(1, 3, 10, 320)
    free, _ = qwen35.generate(small.model, prompt, small.cache(3), num_tokens=12)
    stop = int(free[1, 4])
    first = [int(np.argmax(np.append(np.asarray(row) == stop, True))) for row in free]
    assert first[1] <= 4
    tokens, cache = qwen35.generate(
        small.model, prompt, small.cache(3), num_tokens=12, stop_tokens=[stop], pad_token=319
    )
    for row, ended, expected in zip(np.asarray(tokens), first, np.asarray(free), strict=True):
        np.testing.assert_array_equal(row[: ended + 1], expected[: ended + 1])
        assert (row[ended + 1 :] == 319).all()
    assert cache.lengths.tolist() == [10 + min(n + 1, 12) - 1 for n in first]


def test_generation_goes_on_where_it_stopped(small):
    prompt, key = random_tokens(2, 3, 10, 320), jax.random.key(7)
    options = dict(sampler=qwen35.Temperature(0.7), key=key)
    whole, cache = qwen35.generate(small.model, prompt, small.cache(3), num_tokens=12, **options)
    first, half = qwen35.generate(small.model, prompt, small.cache(3), num_tokens=5, **options)
    second, rest = qwen35.generate(small.model, first[:, -1:], half, num_tokens=7, **options)
    np.testing.assert_array_equal(np.concatenate([first, second], axis=1), whole)
    assert rest.lengths.tolist() == cache.lengths.tolist()
    options["key"] = jax.random.key_data(key)
    same, _ = qwen35.generate(small.model, prompt, small.cache(3), num_tokens=12, **options)
    np.testing.assert_array_equal(same, whole)
    options["key"] = jax.random.key(8)
    other, _ = qwen35.generate(small.model, prompt, small.cache(3), num_tokens=12, **options)
    assert (np.asarray(other) != np.asarray(whole)).any()


def test_bad_calls_are_refused(small):
    model, prompt = small.model, jnp.zeros((2, 4), jnp.int32)
    cache = small.cache(2)
    for arguments, message in [
        (dict(prompt=prompt, num_tokens=0), "num_tokens"),
        (dict(prompt=prompt[0], num_tokens=1), "prompt"),
        (dict(prompt=prompt, num_tokens=1, sampler=qwen35.TopK(3)), "needs a key"),
        (dict(prompt=prompt, num_tokens=1, key=jax.random.split(jax.random.key(0), 3)), "one per row"),
        (dict(prompt=prompt + 320, num_tokens=1), r"0\.\.319"),
    ]:
        with pytest.raises(ValueError, match=message):
            qwen35.generate(model, arguments.pop("prompt"), cache, **arguments)
    for tokens, mask, message in [
        (prompt.astype(jnp.float32), None, "integers"),
        (prompt[:1], None, "1 rows but the cache has 2"),
        (prompt, prompt[:, :2], "mask"),
        (prompt.at[0, 0].set(-1), None, "got -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            qwen35.prefill(model, tokens, cache, mask)
    with pytest.raises(ValueError, match="max_length"):
        qwen35.init_cache(small.config, batch=2)
    with pytest.raises(ValueError, match="2 methods for 1 linear layers"):
        small.cache(2, method=["exact", "exact"])
    with pytest.raises(ValueError, match="method must be one of"):
        small.cache(2, method=3)
    with pytest.raises(ValueError):
        small.cache(2, method="no-such-method")
