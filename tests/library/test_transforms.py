"""jit, scan, donation, sharding, 64-bit mode and precision: the same bits, one compilation, no hidden copies."""

import functools
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import leapquant_jax as lq
from tests.library import helpers as hp
from tests.library import oracle

ROOT = Path(__file__).parents[2]
SIZES = dict(batch=2, num_heads=4, num_key_heads=2, key_dim=8, value_dim=10)


def _token(gate, batch=2):
    return hp.at(hp.tokens(0, B=batch, T=1, G=2, H=4, K=8, V=10, gate=gate), 0)


def _avals(tree):
    return [(leaf.shape, leaf.dtype, jax.typeof(leaf).weak_type) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    ("name", "gate"),
    [*((name, "scalar") for name in lq.list_methods()), ("exact", "channel"), ("window-int8", "channel")],
)
def test_B09_a_step_returns_the_avals_it_was_given(name, gate):
    method = lq.get_method(name)
    token = _token(gate)
    tokens = tuple(a[:, None] for a in token)

    def every_way(state):
        assert not any(weak for _, _, weak in _avals(state))
        stepped, _ = method.step(state, *token)
        masked, _ = method.step(stepped, *token, active=jnp.array([True, False]))
        decoded, _ = method.decode(masked, *tokens)
        filled, out = method.prefill(decoded, *tokens, mask=jnp.ones((2, 1), bool))
        assert out.dtype == jnp.float32 and not jax.typeof(out).weak_type
        for new in (stepped, masked, decoded, filled):
            assert _avals(new) == _avals(state)
            assert jax.tree.structure(new) == jax.tree.structure(state)
        return filled

    jax.eval_shape(every_way, method.init(**SIZES, gate=gate))


def test_B09_B19_one_compilation_and_one_buffer_serve_the_whole_life_of_a_batch():
    """pyproject.toml turns JAX's "donated buffers were not usable" into an error."""
    traces = []

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, *token):
        traces.append(1)
        return lq.step(hp.POOL, state, *token)

    state, x = lq.init_state(hp.POOL, **hp.POOL_SIZES), hp.pool_tokens(0, 40)
    state = jax.tree.map(jnp.array, state)  # own buffers: equal constants may share one
    fresh = lq.init_state(hp.POOL, **{**hp.POOL_SIZES, "batch": 1})
    for t in range(40):
        if t % 10 == 5:
            state = lq.reset_rows(state, fresh, [t % 16])
        if t in (17, 33):
            state = lq.concatenate_rows(lq.take_rows(state, np.arange(15)), fresh)
        old = state
        state, _ = step(state, *hp.at(x, t))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert len(traces) == 1 and step._cache_size() == 1
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        step(old, *hp.at(x, 0))


def test_decode_is_a_scan_of_step_bit_by_bit():
    state, x = hp.phased_pool(), hp.pool_tokens(1, 20)
    active = np.random.default_rng(0).random((16, 20)) < 0.8
    looped, outs = hp.run(hp.POOL, state, x, active=active)
    scanned, scanned_outs = hp.decode(hp.POOL, state, *x, active=active)
    hp.assert_bit_equal(scanned, looped)
    assert hp.bits_of(scanned_outs) == hp.bits_of(outs)


# --- donation ----------------------------------------------------------------------------------------------------------


def test_B06_decode_copies_no_boundary_state():
    """In the compiled loop no copy is as large as the codes; and 64 tokens need no more memory than their inputs."""
    batch = 64  # more rows than a fold takes at once
    config, sizes = lq.LeapConfig(rank=0), dict(batch=batch, num_heads=2, num_key_heads=2, key_dim=128, value_dim=128)

    def compiled(length):
        x = hp.tokens(3, B=batch, T=length, G=2, H=2, K=128, V=128)
        state = jax.eval_shape(lambda: lq.init_state(config, **sizes))
        decode = jax.jit(functools.partial(lq.decode, config), donate_argnums=0)
        done = decode.lower(state, *x).compile()
        moved = sum(a.nbytes for a in x) + x[2].nbytes  # inputs and outputs with the time axis in front
        return done, done.memory_analysis().temp_size_in_bytes, moved

    one, one_peak, _ = compiled(2)
    many, many_peak, moved = compiled(64)
    assert many_peak - one_peak < 1.1 * moved
    for text in (one.as_text(), many.as_text()):
        copies = re.findall(r"= s8\[([\d,]+)\]\S* copy\(", text)
        assert not [shape for shape in copies if np.prod([int(n) for n in shape.split(",")]) >= batch * 2 * 128 * 128]


# --- placement ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["batch", "heads"])
def test_A31_sharded_over_devices_bit_by_bit(axis):
    """device_put is all it takes: over four devices by rows, over two by value heads (the key head is replicated)."""
    devices = np.array(jax.devices()[: 4 if axis == "batch" else 2])
    mesh = Mesh(devices, ("x",))

    def place(leaf):
        if axis == "batch":
            spec = PartitionSpec("x")
        else:
            spec = PartitionSpec(None, "x") if leaf.ndim > 1 and leaf.shape[1] == 2 else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    state, x = hp.phased_pool(), hp.pool_tokens(4, 18)
    placed = jax.tree.map(place, state)
    for t in range(18):
        token = hp.at(x, t)
        state, out = hp.step(hp.POOL, state, *token, active=np.ones(16, bool))
        placed, placed_out = hp.step(
            hp.POOL, placed, *(place(jnp.asarray(a)) for a in token), active=place(jnp.ones(16, bool))
        )
        assert hp.bits_of(placed_out) == hp.bits_of(out)
        hp.assert_bit_equal(placed, state, f"token {t}")


# --- 64-bit mode, default promotion ------------------------------------------------------------------------------------


def _digest():
    """A short life of an int6 state with a channel gate, as one hash over every leaf and output."""
    config = lq.LeapConfig(bits=6, rank=1, window=3)
    x = hp.tokens(5, B=2, T=8, G=1, H=2, K=8, V=6, gate="channel")
    state, outs = hp.run(config, lq.init_state(config, **hp.sizes(x)), x)
    state, ok = hp.rollback(config, state, jnp.array([1, 3]))
    state = lq.put_rows(state, lq.take_rows(state, [1]), [0])
    chunked = hp.chunked(hp.zeros(x), *x, chunk_size=4)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves((state, outs, ok, chunked))]
    described = [(str(leaf.dtype), leaf.shape) for leaf in leaves]
    return hashlib.sha256(repr(described).encode() + b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()


def test_B13_same_bits_with_64_bit_types_and_default_promotion():
    code = "from tests.library import test_transforms as t; print(t._digest())"
    environment = {**os.environ, "JAX_ENABLE_X64": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == _digest()


# --- precision ---------------------------------------------------------------------------------------------------------


def _products(jaxpr):
    """Every dot_general inside a jaxpr, at any depth."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
            if hasattr(inner, "jaxpr"):
                yield from _products(inner.jaxpr)
            elif hasattr(inner, "eqns"):
                yield from _products(inner)


@pytest.mark.parametrize("gate", ["scalar", "channel"])
def test_B10_every_product_is_full_fp32(gate):
    """TF32 on Hopper would cost three digits, and jax_default_matmul_precision may not change a result."""
    token = _token(gate)
    tokens = tuple(a[:, None] for a in token)
    config = lq.LeapConfig(rotation="hadamard", clip="mse")

    def everything(state, dense):
        state, _ = lq.step(config, state, *token)
        state, _ = lq.decode(config, state, *tokens)
        state, _ = lq.prefill(config, state, *tokens)
        return lq.dense_state(config, lq.fold(config, state)), lq.chunked_delta_rule(dense, *tokens)

    state = lq.init_state(config, **SIZES, gate=gate)
    jaxpr = jax.make_jaxpr(everything)(state, jnp.zeros((2, 4, 8, 10)))
    products = list(_products(jaxpr.jaxpr))
    assert len(products) > 20
    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert all(product.params["precision"] == highest for product in products)
    x = hp.tokens(6, B=2, T=9, G=2, H=4, K=8, V=10, gate=gate)
    start = jnp.zeros((2, 4, 8, 10))
    expected = hp.chunked(start, *x)
    with jax.default_matmul_precision("bfloat16"):
        hp.assert_bit_equal(hp.chunked(start, *x), expected)


@pytest.mark.gpu
def test_B10_no_tf32_on_the_card():
    """64 unquantized steps at real size, token by token and chunked: TF32 would be 1e-3 away."""
    x = hp.tokens(7, T=64, H=2, K=128, V=128)
    expected, expected_outs = oracle.exact(hp.zeros(x), *x)
    state, outs = hp.decode(hp.UNQUANTIZED, lq.init_state(hp.UNQUANTIZED, **hp.sizes(x)), *x)
    assert hp.relative(hp.dense_state(hp.UNQUANTIZED, state), expected) < 2e-6
    assert hp.relative(outs, expected_outs) < 2e-6
    S, outs = hp.chunked(hp.zeros(x), *x)
    assert hp.relative(S, expected) < 2e-6 and hp.relative(outs, expected_outs) < 2e-6
