"""The model's cache takes a policy, which names layers by their index in the model."""

import jax
import numpy as np
import pytest

import leapquant_jax as lq
from models import qwen35
from models.recurrent import resolve_method
from tests.models import helpers

PLAIN = lq.LeapConfig(bits=None, boundary_dtype="float16", rank=0, smoothing=0, window=4)
EIGHT = lq.LeapConfig(rank=0, window=4)


def test_a_policy_is_the_methods_of_its_layers(small):
    """Heads may differ within a layer; the cache decodes as with the method objects, inside jit."""
    heads = small.config.linear_num_value_heads
    groups = (lq.HeadGroup(EIGHT, tuple(range(1, heads))), lq.HeadGroup(PLAIN, (0,)))
    policy = lq.Policy((lq.LayerChoice(layer=0, groups=groups),))
    tokens = helpers.random_tokens(0, 2, 9, small.config.vocab_size)
    logits, cache = helpers.decode(small.model, tokens, small.cache(method=policy))
    expected, other = helpers.decode(small.model, tokens, small.cache(method=[lq.MixedMethod(groups, policy.name)]))
    np.testing.assert_array_equal(logits, expected)
    helpers.assert_bit_equal(cache, other)
    (layer,) = helpers.recurrent_layers(cache)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(layer.recurrent))
    assert layer.method.state_bytes(layer.recurrent)["total"] == held


def test_layers_are_those_of_the_model(tiny_a):
    """Three recurrent layers, 0 to 2; one that the policy lacks is refused, or takes its default."""
    policy = lq.Policy.of({0: EIGHT, 2: PLAIN}, default=EIGHT)
    methods = [layer.method for layer in helpers.recurrent_layers(tiny_a.cache(method=policy))]
    assert [method.config for method in methods] == [EIGHT, EIGHT, PLAIN]
    with pytest.raises(ValueError, match=r"no choice for layer 1, only for \[0, 2\]"):
        tiny_a.cache(method=lq.Policy.of({0: EIGHT, 2: PLAIN}))
    with pytest.raises(ValueError, match=r"policy\.method\(layer\)"):
        resolve_method(policy)


def test_heads_that_do_not_fit(small):
    groups = (lq.HeadGroup(EIGHT, (0,)),)
    with pytest.raises(ValueError, match="but the groups name 1 heads"):
        qwen35.init_cache(
            small.config, batch=1, max_length=8, method=lq.Policy((lq.LayerChoice(layer=0, groups=groups),))
        )
