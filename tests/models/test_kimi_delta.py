"""The Kimi delta attention layer on exact and quantized states, padded, split and stepped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import kimi_delta
from tests.models.helpers import assert_bit_equal, relative, row


@pytest.fixture(scope="module")
def kda(fixtures):
    config, layer = kimi_delta.load_layer(fixtures / "kda_layer_a")
    with np.load(fixtures / "kda_layer_a" / "reference.npz") as file:
        return config, layer, jnp.asarray(file["x"])


def test_A04_padding_and_A07_splits(kda):
    config, layer, x = kda
    whole, whole_cache = kimi_delta.prefill(layer, x, kimi_delta.init_cache(config, batch=2))
    padded = jnp.full((2, 80, 48), jnp.nan).at[:, 5:].set(x)
    mask = jnp.broadcast_to(jnp.arange(80) >= 5, (2, 80)).at[1].set(False)
    y, cache = kimi_delta.prefill(layer, padded, kimi_delta.init_cache(config, batch=2), mask)
    np.testing.assert_allclose(y[0, 5:], whole[0], atol=1e-5)
    assert not y[0, :5].any() and not y[1].any()
    assert_bit_equal(row(cache, 1), row(kimi_delta.init_cache(config, batch=2), 1))
    assert relative(row(cache, 0).recurrent.dense, row(whole_cache, 0).recurrent.dense) <= 1e-5

    cache = kimi_delta.init_cache(config, batch=2)
    outs = []
    for start, stop in [(0, 25), (25, 50), (50, 75)]:
        y, cache = kimi_delta.prefill(layer, x[:, start:stop], cache)
        outs.append(y)
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), whole, atol=1e-5)


def test_quantized_state_with_channel_gates(kda):
    config, layer, x = kda
    exact, _ = kimi_delta.prefill(layer, x, kimi_delta.init_cache(config, batch=2))
    cache = kimi_delta.init_cache(config, batch=2, method="leapquant-int8")
    _, cache = kimi_delta.prefill(layer, x[:, :25], cache)

    def body(cache, x):
        y, cache = kimi_delta.step(layer, x, cache)
        return cache, y

    cache, y = jax.lax.scan(body, cache, jnp.swapaxes(x[:, 25:], 0, 1))
    assert relative(jnp.swapaxes(y, 0, 1), exact[:, 25:]) <= 1e-2
    assert cache.recurrent.position.tolist() == [75 % 16] * 2


def test_inactive_rows_and_bad_input(kda):
    config, layer, x = kda
    cache = kimi_delta.init_cache(config, batch=2)
    y, after = kimi_delta.step(layer, x[:, 0], cache, jnp.array([True, False]))
    assert y[0].any() and not y[1].any()
    assert_bit_equal(row(after, 1), row(cache, 1))
    with pytest.raises(ValueError, match="hidden_size=48"):
        kimi_delta.step(layer, x[:, 0, :3], cache)
    with pytest.raises(ValueError, match="2 rows but the cache has 1"):
        kimi_delta.prefill(layer, x, kimi_delta.init_cache(config, batch=1))
    with pytest.raises(ValueError, match="batch"):
        kimi_delta.init_cache(config, batch=0)
