"""Bytes: what is claimed is what is allocated, and no fp32 copy of the state hides in the compiled step."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import leapquant_jax as lq
from tests.library import oracle

GIB = 2**30
HEAD = dict(batch=1, num_heads=1, num_key_heads=1, key_dim=128, value_dim=128)


def _nbytes(state):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def _abstract(method, **sizes):
    return jax.eval_shape(lambda: method.init(**sizes))


@pytest.mark.parametrize(
    ("name", "at_rest"), [("leapquant-int8", 19456), ("leapquant-int6", 16384), ("leapquant-int4", 12288)]
)
def test_A29_bytes_of_a_128_x_128_head_at_rest(name, at_rest):
    """Codes, both scales and the fp16 factors: 1.1875, 1.00 and 0.75 bytes per element."""
    method = lq.get_method(name)
    report = method.state_bytes(_abstract(method, **HEAD))
    bits, rank = method.config.bits, method.config.rank
    assert report["at_rest"] == at_rest == oracle.bytes_per_head(128, 128, bits=bits, rank=rank)
    assert report["codes"] == 128 * 128 * bits // 8


@pytest.mark.parametrize(
    ("gate", "num_key_heads", "per_head"),
    [
        # ring: 16 x (k, u) of 2 bytes, one fp32 power-of-two scale and the log decays of each token
        ("scalar", 32, 19456 + 8192 + 64 + 64),
        ("scalar", 16, 19456 + 4096 + 2048 + 64 + 64),  # k once per key head
        ("channel", 32, 19456 + 8192 + 64 + 4096),
    ],
)
def test_A29_active_bytes(gate, num_key_heads, per_head):
    method = lq.get_method("leapquant-int8")
    sizes = dict(batch=256, num_heads=32, num_key_heads=num_key_heads, key_dim=128, value_dim=128, gate=gate)
    state = _abstract(method, **sizes)
    report = method.state_bytes(state)
    positions = 4 * 256
    assert report["total"] == 256 * 32 * per_head + positions == _nbytes(state)
    if num_key_heads == 16:  # Qwen3.5: below the 1.6875 bytes per element of the paper
        per_request = 24 * report["total"] / 256
        assert per_request <= 20.25 * 2**20 and report["total"] / (256 * 32 * 128 * 128) < 1.6


CONFIGS = [
    (lq.LeapConfig(bits=bits, rank=rank, window=window), gate, key_heads)
    for (bits, rank, window), gate, key_heads in [
        ((8, 0, 16), "scalar", 4), ((8, 2, 4), "scalar", 2), ((8, 4, 16), "channel", 4), ((8, 8, 32), "channel", 1),
        ((6, 0, 4), "channel", 2), ((6, 6, 16), "scalar", 4), ((6, 4, 32), "scalar", 1), ((4, 0, 16), "channel", 4),
        ((4, 6, 16), "scalar", 2), ((4, 8, 5), "channel", 2),
    ]
] + [
    (lq.LeapConfig(bits=None, boundary_dtype="bfloat16", rank=0, smoothing=0), "scalar", 2),
    (lq.LeapConfig(smoothing=0, record_dtype="float32", compensator_dtype="float32"), "channel", 4),
]  # fmt: skip


@pytest.mark.parametrize(("config", "gate", "key_heads"), CONFIGS)
def test_A30_one_function_equals_the_allocation(config, gate, key_heads):
    sizes = dict(batch=3, num_heads=4, num_key_heads=key_heads, key_dim=33, value_dim=12)
    state = lq.init_state(config, **sizes, gate=gate)
    report = lq.state_bytes(config, state)
    assert report["total"] == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert report["total"] == report["codes"] + report["scales"] + report["compensators"] + report["ring"]
    assert report["at_rest"] == report["total"] - report["ring"]
    assert report == lq.state_bytes(config, jax.eval_shape(lambda: lq.init_state(config, **sizes, gate=gate)))
    if config.bits:
        per_head = oracle.bytes_per_head(
            33, 12, bits=config.bits, rank=config.rank, smoothing=bool(config.smoothing),
            compensator_bytes=jnp.dtype(config.compensator_dtype).itemsize,
        )  # fmt: skip
        assert report["at_rest"] == 3 * 4 * per_head


@pytest.mark.parametrize("name", lq.list_methods())
def test_A30_every_method_reports_its_allocation(name):
    method = lq.get_method(name)
    state = method.init(batch=2, num_heads=4, num_key_heads=2, key_dim=32, value_dim=12)
    report = method.state_bytes(state)
    assert report["total"] == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert set(report) == {"codes", "scales", "compensators", "ring", "at_rest", "total"}
    expected = {"exact": 4, "step-bf16": 2, "step-fp16": 2, "step-int8": 1, "step-fp8": 1, "step-int4": 0.5}
    if name in expected:
        assert report["codes"] == expected[name] * 2 * 4 * 32 * 12


def test_A30_qwen_9b_per_request():
    """24 layers x 32 heads of 128 x 128: fp32 50.33 MB, bf16 25.17, int8 14.94 at rest."""
    sizes = dict(batch=1, num_heads=32, num_key_heads=16, key_dim=128, value_dim=128)
    megabytes = {
        name: 24 * lq.get_method(name).state_bytes(_abstract(lq.get_method(name), **sizes))["at_rest"] / 1e6
        for name in ("exact", "step-bf16", "leapquant-int8")
    }
    assert {k: round(v, 2) for k, v in megabytes.items()} == {
        "exact": 50.33, "step-bf16": 25.17, "leapquant-int8": 14.94,
    }  # fmt: skip


# --- the compiled step -------------------------------------------------------------------------------------------------

BATCH, HEADS = 512, 2  # large enough for groups of B / P rows


def _materialised(text):
    """(dtype, shape) of every array that the compiled program really writes: fusions count, their insides do not."""
    inside = set(re.findall(r"calls=%?([\w.\-]+)", text))
    computation, found = "", []
    for line in text.splitlines():
        header = re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header:
            computation = header.group(1)
        array = re.search(r"= (\w+)\[([\d,]*)\]\S* ([\w\-]+)\(", line)
        views = ("parameter", "get-tuple-element", "bitcast", "constant")
        if array and computation not in inside and array.group(3) not in views:
            found.append((array.group(1), [int(n) for n in array.group(2).split(",") if n]))
    return found


@pytest.mark.parametrize("name", ["leapquant-int8", "leapquant-int6", "leapquant-int4"])
def test_A29_the_compiled_step_holds_no_fp32_copy(name):
    """Nothing of 4-byte elements is as large as the state; the fold works on its group of B / P rows; what the step
    needs beside the state is below 10 % of an fp32 copy of a 24-layer state (the layers run one after the other)."""
    method = lq.get_method(name)
    state = _abstract(method, batch=BATCH, num_heads=HEADS, num_key_heads=1, key_dim=128, value_dim=128)
    shapes = ((BATCH, 1, 128), (BATCH, 1, 128), (BATCH, HEADS, 128), (BATCH, HEADS), (BATCH, HEADS))
    token = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled = jax.jit(method.step, donate_argnums=0).lower(state, *token).compile()
    copy = BATCH * HEADS * 128 * 128
    arrays = _materialised(compiled.as_text())
    assert any(math.prod(shape) == copy // 16 for _, shape in arrays), "the fold's group is not where this test looks"
    largest = max(math.prod(shape) for dtype, shape in arrays if dtype in ("f32", "s32", "u32", "f64"))
    assert largest < copy / 4, [a for a in arrays if math.prod(a[1]) >= copy / 4]
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 0.10 * 24 * 4 * copy
    assert memory.temp_size_in_bytes < (0.4 if name == "leapquant-int8" else 0.7) * 4 * copy  # of this one layer
    assert memory.alias_size_in_bytes >= method.state_bytes(state)["total"]  # B19: updated in place


def test_A29_live_buffers_of_a_running_batch():
    """After decoding, the process holds the state's bytes and nothing else of the state."""
    config = lq.LeapConfig(rank=0)
    sizes = dict(batch=4, num_heads=2, num_key_heads=1, key_dim=128, value_dim=128)
    step = jax.jit(functools.partial(lq.step, config), donate_argnums=0)
    rng = np.random.default_rng(0)
    token = [rng.standard_normal(s).astype(np.float32) * 0.1 for s in ((4, 1, 128), (4, 1, 128), (4, 2, 128))]
    token += [np.full((4, 2), -0.01, np.float32), np.full((4, 2), 0.5, np.float32)]
    before = {id(a) for a in jax.live_arrays()}
    state = jax.tree.map(jnp.array, lq.init_state(config, **sizes))
    for _ in range(17):
        state, out = step(state, *token)
    new = [a for a in jax.live_arrays() if id(a) not in before and not a.is_deleted()]
    assert sum(a.nbytes for a in new) <= lq.state_bytes(config, state)["total"] + out.nbytes + 4096
