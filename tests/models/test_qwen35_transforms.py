"""The model under JAX's transformations: jit, scan, grad, remat, donation, x64, and orbax in the middle of a window."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import leapquant_jax as lq
from models import qwen35
from models.qwen35 import model as model_module
from models.ragged import full_span
from tests.models.helpers import assert_bit_equal, decode, random_tokens, recurrent_layers, relative


def test_B20_generate_equals_scan_equals_eager_loop(small):
    prompt = random_tokens(20, 2, 9, 320)
    tokens, cache = qwen35.generate(small.model, prompt, small.cache(2), num_tokens=33)

    logits, eager = qwen35.prefill(small.model, prompt, small.cache(2), last_only=True)
    for i in range(32):
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        np.testing.assert_array_equal(token, tokens[:, i])
        logits, eager = qwen35.decode_step(small.model, token, eager)
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(cache), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)

    @jax.jit
    def user_loop(model, prompt, cache):
        logits, cache = qwen35.prefill(model, prompt, cache, last_only=True)

        def body(carry, _):
            logits, cache = carry
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            return qwen35.decode_step(model, token, cache), token

        return jax.lax.scan(body, (logits, cache), length=32)[1].T

    np.testing.assert_array_equal(user_loop(small.model, prompt, small.cache(2)), tokens[:, :32])


def test_B20_scan_over_layers_equals_unrolled_layers(tiny_a):
    """Layers are pytrees: three of a kind stack into one that `lax.scan` walks."""
    cache = tiny_a.cache(2)
    h = tiny_a.model.embed_tokens(random_tokens(21, 2, 64, 320))
    layers, caches = list(tiny_a.model.layers)[:3], cache.layers[:3]
    span = full_span(cache.lengths, 64)

    def body(h, layer_and_cache):
        return layer_and_cache[0](h, layer_and_cache[1], span, step=False)

    @jax.jit
    def unrolled(layers, h):
        out = []
        for pair in zip(layers, caches, strict=True):
            h, new = body(h, pair)
            out.append(new)
        return h, out

    @jax.jit
    def scanned(layers, h):
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *zip(layers, caches, strict=True))
        return jax.lax.scan(body, h, stacked)

    h_unrolled, out = unrolled(layers, h)
    h_scanned, stacked = scanned(layers, h)
    np.testing.assert_allclose(h_scanned, h_unrolled, rtol=1e-5, atol=1e-5)
    for i in range(3):
        for a, b in zip(jax.tree.leaves(out[i]), jax.tree.leaves(stacked), strict=True):
            np.testing.assert_allclose(a, b[i], rtol=1e-5, atol=1e-5)


def test_B09_B19_one_compile_for_all_steps_and_a_donated_cache_is_reused(small):
    cache = small.cache(3, method="leapquant-int8")
    fresh = small.cache(1, method="leapquant-int8")
    logits, cache = qwen35.decode_step(small.model, jnp.zeros((3,), jnp.int32), cache)
    compiled = model_module._decode_step._cache_size()
    for i in range(20):
        logits, cache = qwen35.decode_step(small.model, jnp.argmax(logits, axis=-1), cache)
        if i % 8 == 5:
            cache = lq.reset_rows(cache, fresh, np.array([i % 3]))
    assert model_module._decode_step._cache_size() == compiled
    step = jax.jit(qwen35.decode_step, donate_argnums=2)
    memory = step.lower(small.model, jnp.zeros((3,), jnp.int32), cache).compile().memory_analysis()
    parameters = sum(x.nbytes for x in jax.tree.leaves(small.model))
    if memory is not None:
        assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(cache))
        assert memory.output_size_in_bytes < memory.alias_size_in_bytes + parameters
    shapes = jax.eval_shape(qwen35.decode_step, small.model, jnp.zeros((3,), jnp.int32), cache)[1]
    assert jax.tree.structure(shapes) == jax.tree.structure(cache)
    for a, b in zip(jax.tree.leaves(shapes), jax.tree.leaves(cache), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)


def test_prefill_is_differentiable_and_remat_changes_nothing(small):
    tokens = random_tokens(22, 2, 64, 320)

    @functools.partial(jax.jit, static_argnums=1)
    def loss(model, remat):
        logits, _ = qwen35.prefill(model, tokens, small.cache(2), remat=remat)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)
        return -jnp.mean(picked)

    value, grads = jax.jit(jax.value_and_grad(loss), static_argnums=1)(small.model, True)
    np.testing.assert_allclose(value, loss(small.model, False), rtol=1e-6)
    for leaf in jax.tree.leaves(grads):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0
    squares = sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(grads))
    eps = 1e-2 / squares**0.5
    moved = jax.tree.map(lambda p, g: p - eps * g, small.model, grads)
    np.testing.assert_allclose(float(value - loss(moved, False)), eps * squares, rtol=0.1)


def test_methods_per_layer_and_cursor(tiny_a):
    methods = ["exact", "leapquant-int8", "step-bf16"]
    cache = tiny_a.cache(2, method=methods)
    assert [layer.method.name for layer in recurrent_layers(cache)] == methods
    assert [s.shape for s in qwen35.recurrent_states(cache)] == [(2, 4, 16, 16)] * 3


def test_quantized_runs_follow_the_exact_one(small, capsys):
    """No quality claim, the weights are random: errors of the format's size, the cursor at the length mod 16."""
    tokens = random_tokens(23, 2, 90, 320)
    exact_logits, exact = decode(small.model, tokens, small.cache(2))
    errors = {}
    for method in ("leapquant-int8", "step-int8"):
        logits, cache = decode(small.model, tokens, small.cache(2, method=method))
        errors[method] = relative(qwen35.recurrent_states(cache)[0], qwen35.recurrent_states(exact)[0])
        p, log_p = jax.nn.softmax(exact_logits), jax.nn.log_softmax(exact_logits)
        divergence = float(jnp.mean(jnp.sum(p * (log_p - jax.nn.log_softmax(logits)), axis=-1)))
        with capsys.disabled():
            print(f"\n{method}: state error {errors[method]:.2e}, KL {divergence:.1e}", end="")
        if method == "leapquant-int8":
            assert recurrent_layers(cache)[0].recurrent.position.tolist() == [90 % 16] * 2
    assert errors["leapquant-int8"] < 5e-3
    assert errors["leapquant-int8"] < errors["step-int8"]


def test_orbax_round_trip_in_the_middle_of_a_window(small, tmp_path):
    make = functools.partial(small.cache, 5, max_length=256, method="leapquant-int8")
    _, cache = qwen35.prefill(small.model, random_tokens(24, 5, 21, 320), make())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "cache", cache)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "cache", jax.eval_shape(make))
    assert_bit_equal(cache, restored)


def test_B13_same_dtypes_with_x64_and_default_promotion(fixtures):
    code = f"""
import jax, jax.numpy as jnp, numpy as np
from models import qwen35
config, model = qwen35.from_pretrained({str(fixtures / "tiny_a")!r})
cache = qwen35.init_cache(config, batch=1, max_length=90)
reference = np.load({str(fixtures / "tiny_a" / "reference.npz")!r})
with jax.default_matmul_precision("highest"):
    logits, new = qwen35.prefill(model, reference["input_ids"][:1, :40], cache)
    tokens, new = qwen35.generate(model, reference["input_ids"][:1, 40:41], new, num_tokens=2)
assert logits.dtype == jnp.float32 and tokens.dtype == jnp.int32
assert [x.dtype for x in jax.tree.leaves(new)] == [x.dtype for x in jax.tree.leaves(cache)]
assert np.abs(logits - reference["logits_full"][:1, :40]).max() < 2e-4
"""
    environment = os.environ | {"JAX_ENABLE_X64": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, env=environment, timeout=300)
