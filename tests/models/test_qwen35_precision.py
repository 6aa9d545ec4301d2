"""What stays float32 when everything else is bfloat16: gates, decays, the write strength and the state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import qwen35
from models.blocks import Float32Param
from models.qwen35.delta_net import GatedDeltaNet
from models.ragged import full_span
from models.recurrent import RecurrentCache, advance, init_log_rate, init_time_step, log_decay, resolve_method
from tests.models.helpers import decode, random_tokens, recurrent_layers, relative


def _set(variable: nnx.Variable, value) -> None:
    variable[...] = jnp.asarray(value, variable.dtype)


def _one_write(step: bool) -> jax.Array:
    """The state after one token of a bfloat16 layer with k = e0, v = 64 e0 and b = 0.5."""
    config = qwen35.Config(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=4,
        linear_value_head_dim=4, layer_types=("linear_attention",), dtype="bfloat16",
    )  # fmt: skip
    layer = GatedDeltaNet(config, param_dtype=jnp.dtype("bfloat16"), rngs=nnx.Rngs(0))
    qkv = np.zeros((8, 12), np.float32)
    qkv[0, [0, 4, 8]] = 64  # silu(64) is 64 in float32, and l2norm(64 e0) is e0
    taps = np.zeros((4, 12), np.float32)
    taps[-1] = 1
    _set(layer.in_proj_qkv.kernel, qkv)
    _set(layer.conv1d.kernel, taps)
    _set(layer.in_proj_b.kernel, np.eye(8, 1) * 0.5)
    x = jnp.zeros((1, 1, 8), jnp.bfloat16).at[..., 0].set(1)
    cache = qwen35.init_cache(config, batch=1).layers[0]
    _, cache = layer(x, cache, full_span(jnp.zeros((1,), jnp.int32), 1), step=step)
    return cache.method.dense_state(cache.recurrent)[0, 0]


@pytest.mark.parametrize("step", [True, False], ids=["decode", "prefill"])
def test_A08_write_strength_is_the_float32_sigmoid(step):
    state = _one_write(step)
    beta = 1 / (1 + np.exp(-0.5))
    assert abs(float(state[0, 0]) / 64 - beta) <= 1e-7
    assert abs(float(jnp.bfloat16(beta)) - beta) > 1e-4  # what rounding it would have cost
    assert not state.at[0, 0].set(0).any()


def test_A09_fresh_decays_are_finite_float32():
    keys = jax.vmap(jax.random.key)(jnp.arange(1000))
    rates = jax.jit(jax.vmap(lambda key: init_log_rate(key, (16,))))(keys)
    steps = jax.jit(jax.vmap(lambda key: init_time_step(key, (16,))))(keys)
    assert rates.dtype == steps.dtype == jnp.float32
    assert np.isfinite(rates).all() and np.isfinite(steps).all()
    dt = jax.nn.softplus(steps)
    assert float(dt.min()) >= 0.99e-3 and float(dt.max()) <= 0.101
    assert float(rates.min()) >= 0 and float(rates.max()) <= np.log(16) + 1e-6


def test_A09_decays_stay_float32_in_a_bfloat16_model(small, fixtures):
    fresh = nnx.eval_shape(lambda: qwen35.Model(dataclasses.replace(small.config, dtype="bfloat16"), rngs=nnx.Rngs(0)))
    _, loaded = qwen35.from_pretrained(fixtures / "tiny_a", dtype="bfloat16")
    for model in (fresh, loaded, qwen35.cast(small.model, "bfloat16")):
        assert model.config.dtype == "bfloat16"
        for path, variable in nnx.to_flat_state(nnx.state(model)):
            keep = path[-1] in ("A_log", "dt_bias") or path[-3:-1] == ("linear_attn", "norm")
            assert isinstance(variable, Float32Param) == keep
            assert variable.dtype == (jnp.float32 if keep else jnp.bfloat16), path


def test_A09_slow_decay_is_not_rounded_away():
    log_rate = jnp.log(jnp.full((1,), 1e-3 / np.log(2), jnp.float32))
    g = log_decay(jnp.zeros((1, 1), jnp.bfloat16), log_rate, jnp.zeros((1,)))
    assert g.dtype == jnp.float32
    assert abs(float(jnp.exp(g[0, 0])) - np.exp(-1e-3)) <= 1e-7


def test_A10_state_dtype_is_independent_of_the_activations(small, capsys):
    tokens = random_tokens(10, 2, 64, 320)
    model = qwen35.cast(small.model, "bfloat16")
    states = {}
    runs = [("fp32", small.model, "exact"), ("bf16", model, "exact"), ("bf16 state", model, "step-bf16")]
    for name, network, method in runs:
        cache = qwen35.init_cache(network.config, batch=2, max_length=64, method=method)
        _, cache = decode(network, tokens, cache)
        (layer,) = recurrent_layers(cache)
        leaf = jax.tree.leaves(layer.recurrent)[0]
        with capsys.disabled():
            print(f"\n{name}: activations {network.config.dtype}, state {leaf.dtype}", end="")
        assert leaf.dtype == (jnp.bfloat16 if method == "step-bf16" else jnp.float32)
        assert layer.conv.dtype == jnp.dtype(network.config.dtype)
        (states[name],) = qwen35.recurrent_states(cache)
    error = relative(states["bf16"], states["fp32"])
    assert error < 1e-2
    assert relative(states["bf16 state"], states["fp32"]) > error


def test_A12_large_gate_decays_and_does_not_erase():
    g = log_decay(jnp.full((1, 1), 60.0), jnp.log(jnp.full((1,), 1e-3)), jnp.full((1,), 40.0))
    assert abs(float(jnp.exp(g[0, 0])) - 0.904837) <= 1e-6


@pytest.mark.parametrize("scale", [1, 0.1, 1e-2, 1e-3, 1e-4, 0])
@pytest.mark.parametrize("step", [True, False], ids=["decode", "prefill"])
def test_A13_one_norm_for_prefill_and_decode(scale, step):
    rng = np.random.default_rng(13)
    q, k, v = (rng.standard_normal((1, 1, 1, 8)).astype(np.float32) for _ in range(3))
    method = resolve_method("exact")
    state = method.init(batch=1, num_heads=1, num_key_heads=1, key_dim=8, value_dim=8)
    cache = RecurrentCache(jnp.zeros((1, 3, 24)), state, method)
    g, beta = jnp.zeros((1, 1, 1)), jnp.full((1, 1, 1), 0.5)
    span = full_span(jnp.zeros((1,), jnp.int32), 1)
    inputs = (jnp.asarray(x) for x in (q * scale, k * scale, v))
    out, cache = advance(cache, cache.conv, *inputs, g, beta, span, step=step)

    def norm(x):
        x = np.float64(x * np.float32(scale)).ravel()
        return x / np.sqrt(np.sum(x**2) + 1e-6)

    dense = np.outer(norm(k), 0.5 * v.ravel())
    reference = dense.T @ norm(q) * 8**-0.5
    np.testing.assert_allclose(method.dense_state(cache.recurrent)[0, 0], dense, rtol=2e-6, atol=1e-12)
    np.testing.assert_allclose(out[0, 0, 0], reference, rtol=5e-6, atol=1e-7)


@pytest.mark.parametrize("method", ["exact", "leapquant-int8"])
def test_A31_value_head_reads_its_own_key_head(method):
    """Two key heads with distinct one-hot keys, four value heads: heads 0, 1 hear key head 0, heads 2, 3 key head 1."""
    method = resolve_method(method)
    state = method.init(batch=1, num_heads=4, num_key_heads=2, key_dim=16, value_dim=8)
    cache = RecurrentCache(jnp.zeros((1, 3, 96)), state, method)
    keys = jnp.zeros((1, 1, 2, 16)).at[0, 0, 0, 3].set(100).at[0, 0, 1, 7].set(100)
    values = jnp.broadcast_to(jnp.arange(1, 5, dtype=jnp.float32)[None, None, :, None], (1, 1, 4, 8))
    zeros = jnp.zeros((1, 1, 4))
    span = full_span(jnp.zeros((1,), jnp.int32), 1)
    out, cache = advance(cache, cache.conv, keys, keys, values, zeros, zeros + 1, span, step=True)
    dense = method.dense_state(cache.recurrent)[0]
    for head, row in enumerate([3, 3, 7, 7]):
        np.testing.assert_allclose(dense[head, row], head + 1, rtol=1e-3)
        assert not dense[head].at[row].set(0).any()
        np.testing.assert_allclose(out[0, 0, head], (head + 1) / 4, rtol=1e-3)
    with pytest.raises(ValueError, match="linear_num_value_heads=4 must be a multiple"):
        dataclasses.replace(qwen35.Config.qwen35_9b(), linear_num_value_heads=4)
