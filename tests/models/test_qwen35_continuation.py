"""Any split of a text into calls gives the same state: prefill and decode are one recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import qwen35
from tests.models.helpers import decode, random_tokens, recurrent_layers, relative, right_pad


def test_A06_prefill_state_is_the_recurrence_for_every_length(small):
    tokens = random_tokens(6, 1, 130, 320)
    prompts, mask = right_pad(jnp.broadcast_to(tokens, (130, 130)), list(range(1, 131)), 130)

    @jax.jit
    def walk(model, cache):
        def body(cache, token):
            _, cache = qwen35.decode_step(model, token, cache)
            return cache, [state[0] for state in qwen35.recurrent_states(cache)]

        return jax.lax.scan(body, cache, tokens.T)[1]

    stepped = [np.asarray(states) for states in walk(small.model, small.cache(1, max_length=130))]
    _, cache = qwen35.prefill(small.model, prompts, small.cache(130, max_length=130), mask, last_only=True)
    for layer, state in enumerate(map(np.asarray, qwen35.recurrent_states(cache))):
        errors = [relative(state[n], stepped[layer][n]) for n in range(130)]
        assert max(errors) <= 1e-5, f"layer {layer}, length {int(np.argmax(errors)) + 1}"
    for n in (1, 65):
        _, cache = qwen35.prefill(small.model, tokens[:, :n], small.cache(1, max_length=130))
        for layer, state in enumerate(qwen35.recurrent_states(cache)):
            assert relative(state[0], stepped[layer][n - 1]) <= 1e-5, f"layer {layer}, length {n}"


def test_A06_no_length_is_bad_for_the_quantized_state(small):
    """All lengths five at a time, in chunks of 64, then 20 decoded tokens."""
    tokens = jnp.broadcast_to(random_tokens(6, 1, 130, 320), (5, 130))
    more = jnp.broadcast_to(random_tokens(7, 1, 20, 320), (5, 20))
    errors = []
    for first in range(1, 131, 5):
        states = []
        for method in ("exact", "leapquant-int8"):
            cache = small.cache(5, max_length=256, method=method)
            prompts, mask = right_pad(tokens, list(range(first, first + 5)), 192)
            for start in range(0, 192, 64):
                chunk = slice(start, start + 64)
                if mask[:, chunk].any():
                    _, cache = qwen35.prefill(small.model, prompts[:, chunk], cache, mask[:, chunk])
            _, cache = decode(small.model, more, cache)
            states.append(np.asarray(qwen35.recurrent_states(cache)[0]))
        errors += [relative(quantized, exact) for exact, quantized in zip(*states, strict=True)]
    assert np.isfinite(errors).all()
    assert max(errors) <= 10 * np.median(errors)


SPLITS = {"50": [50], "49+1": [49, 1], "1+49": [1, 49], "16s": [16, 16, 16, 2], "7s": [7] * 7 + [1]}


def _split(small, split, method):
    tokens = random_tokens(8, 1, 50, 320)
    cache, start, logits = small.cache(1, max_length=256, method=method), 0, []
    for n in split:
        some, cache = qwen35.prefill(small.model, tokens[:, start : start + n], cache)
        logits.append(some)
        start += n
    return jnp.concatenate(logits, axis=1), cache


@pytest.mark.parametrize("split", SPLITS)
def test_A07_any_split_is_the_same_text(small, split):
    whole, whole_cache = _split(small, [50], "exact")
    logits, cache = _split(small, SPLITS[split], "exact")
    assert relative(logits, whole) <= 1e-5
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(whole_cache), strict=True):
        assert relative(a, b) <= 1e-5


@pytest.mark.parametrize("split", SPLITS)
def test_A07_quantized_splits_differ_by_a_rounding_at_most(small, split):
    """A prefill rounds once, at the last window boundary it reaches: here at 48, and at 48 alone for two splits."""
    _, whole_cache = _split(small, [50], "leapquant-int8")
    _, cache = _split(small, SPLITS[split], "leapquant-int8")
    (state,), (whole,) = qwen35.recurrent_states(cache), qwen35.recurrent_states(whole_cache)
    assert relative(state, whole) <= (1e-3 if split in ("50", "49+1") else 2e-2)
    assert recurrent_layers(cache)[0].recurrent.position.tolist() == [50 % 16]
