"""Parity with the reference implementation, in the order of the recipe: each step narrows where an error can be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import kimi_delta, qwen35
from models.ragged import full_span
from tests.models.helpers import decode


def _max_error(x, reference) -> float:
    return float(np.abs(np.asarray(x, np.float64) - reference).max())


@pytest.fixture(scope="module")
def stepped(tiny_a):
    return decode(tiny_a.model, tiny_a.arrays["input_ids"], tiny_a.cache())


def test_1_hidden_states_layer_by_layer(tiny_a):
    model, cache, reference = tiny_a.model, tiny_a.cache(), tiny_a.arrays
    h = model.embed_tokens(jnp.asarray(reference["input_ids"]))
    assert _max_error(h, reference["hidden_0"]) <= 1e-4
    span = full_span(cache.lengths, h.shape[1])
    run = jax.jit(lambda layer, h, cache: layer(h, cache, span, step=False)[0])
    for i, layer in enumerate(model.layers):
        h = run(layer, h, cache.layers[i])
        normed = h if i < 3 else model.norm(h)
        assert _max_error(normed, reference[f"hidden_{i + 1}"]) <= 1e-4, f"layer {i}"


def test_2_logits_of_one_prefill(tiny_a):
    logits, cache = qwen35.prefill(tiny_a.model, tiny_a.arrays["input_ids"], tiny_a.cache())
    assert logits.dtype == jnp.float32
    assert _max_error(logits, tiny_a.arrays["logits_full"]) <= 2e-4
    assert cache.lengths.tolist() == [83, 83]


def test_3_decode_from_empty(tiny_a, stepped):
    assert _max_error(stepped[0], tiny_a.arrays["logits_step"]) <= 2e-4


def test_3_prefill_then_decode(tiny_a):
    ids = tiny_a.arrays["input_ids"]
    first, cache = qwen35.prefill(tiny_a.model, ids[:, :37], tiny_a.cache())
    rest, _ = decode(tiny_a.model, jnp.asarray(ids[:, 37:]), cache)
    assert _max_error(first[:, -1], tiny_a.arrays["logits_full"][:, 36]) <= 2e-4
    assert _max_error(rest, tiny_a.arrays["logits_prefill_step"]) <= 2e-4


def test_4_cache_at_the_end(tiny_a, stepped):
    cache, reference = stepped[1], tiny_a.arrays
    for i, state in enumerate(qwen35.recurrent_states(cache)):
        assert _max_error(state, reference[f"final_recurrent_{i}"]) <= 2e-5
        assert _max_error(np.swapaxes(cache.layers[i].conv, 1, 2), reference[f"final_conv_{i}"][..., 1:]) <= 1e-4
    assert _max_error(cache.layers[3].keys[:, :, :83], reference["final_key_3"]) <= 1e-4
    assert _max_error(cache.layers[3].values[:, :, :83], reference["final_value_3"]) <= 1e-4


def test_5_left_padding(tiny_a):
    reference = tiny_a.arrays
    logits, cache = qwen35.prefill(tiny_a.model, reference["leftpad_ids"], tiny_a.cache(), reference["leftpad_mask"])
    assert _max_error(logits[:, -8:], reference["leftpad_logits_last"]) <= 2e-4
    assert not logits[0, :9].any()
    assert cache.lengths.tolist() == [83, 92]


def test_6_greedy_tokens(tiny_a):
    assert tiny_a.arrays["greedy_margin_per_step"].min() > 1e-3
    tokens, cache = qwen35.generate(tiny_a.model, tiny_a.arrays["input_ids"][:, :37], tiny_a.cache(), num_tokens=24)
    np.testing.assert_array_equal(tokens, tiny_a.arrays["greedy_tokens"])
    assert cache.lengths.tolist() == [60, 60]


def test_7_long_decode(tiny_a):
    logits, cache = decode(tiny_a.model, tiny_a.arrays["long_ids"], tiny_a.cache(batch=1, max_length=512))
    assert _max_error(logits[:, -8:], tiny_a.arrays["long_logits_last"]) <= 2e-4
    for i, state in enumerate(qwen35.recurrent_states(cache)):
        assert _max_error(state, tiny_a.arrays[f"long_final_recurrent_{i}"]) <= 2e-5


def test_8_multimodal_layout(tiny_a, fixtures):
    config, model = qwen35.from_pretrained(fixtures / "tiny_a_wrapped")
    assert config == tiny_a.config
    logits, _ = qwen35.prefill(model, tiny_a.arrays["input_ids"], tiny_a.cache())
    assert _max_error(logits, tiny_a.arrays["logits_full"]) <= 2e-4


def test_9_kimi_delta_layer(fixtures):
    config, layer = kimi_delta.load_layer(fixtures / "kda_layer_a")
    with np.load(fixtures / "kda_layer_a" / "reference.npz") as file:
        reference = dict(file)
    x = jnp.asarray(reference["x"])
    assert _max_error(layer.log_decay(x), reference["log_decay"]) <= 1e-5
    y, cache = kimi_delta.prefill(layer, x, kimi_delta.init_cache(config, batch=2))
    assert _max_error(y, reference["y_full"]) <= 2e-5
    assert _max_error(cache.method.dense_state(cache.recurrent), reference["final_recurrent"]) <= 1e-5
    assert _max_error(np.swapaxes(cache.conv, 1, 2), reference["final_conv"][..., 1:]) <= 1e-4

    def body(cache, x):
        y, cache = kimi_delta.step(layer, x, cache)
        return cache, y

    cache, y = jax.lax.scan(body, kimi_delta.init_cache(config, batch=2), jnp.swapaxes(x, 0, 1))
    assert _max_error(jnp.swapaxes(y, 0, 1), reference["y_step"]) <= 2e-5
    assert _max_error(cache.method.dense_state(cache.recurrent), reference["final_recurrent"]) <= 1e-5
