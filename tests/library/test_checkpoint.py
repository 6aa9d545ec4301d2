"""States through disk: exact to the bit, in the middle of a window, on other devices; and every way a file can be wrong."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import leapquant_jax as lq
from tests.library import helpers as hp

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def running():
    """The pool with its rows at positions 0..15."""
    return hp.phased_pool()


@pytest.fixture(scope="module")
def template():
    return jax.eval_shape(lambda: lq.init_state(hp.POOL, **hp.POOL_SIZES))


def test_A38_round_trip_in_the_middle_of_a_window(tmp_path, running, template):
    """What is restored is really used: the next tokens are the same bits as without the detour."""
    lq.save_state(tmp_path / "a", hp.POOL, running, metadata={"num_tokens": 21})
    restored = lq.load_state(tmp_path / "a", hp.POOL, template)
    hp.assert_bit_equal(restored, running)
    x = hp.pool_tokens(1, 10)
    a, b = hp.run(hp.POOL, running, x), hp.run(hp.POOL, restored, x)
    hp.assert_bit_equal(a, b)
    checkpoint = lq.read_checkpoint(tmp_path / "a")
    assert checkpoint.metadata == {"num_tokens": 21}
    assert next(iter(checkpoint.arrays)) == ".codes" and checkpoint.method["window"] == 16


def test_A18_a_snapshot_continues_in_another_slot_of_another_batch(tmp_path, running, template):
    """Rows at all 16 window positions go through disk into a permuted batch and decode the same bits."""
    lq.save_state(tmp_path / "a", hp.POOL, running)
    restored = lq.load_state(tmp_path / "a", hp.POOL, template)
    order = np.random.default_rng(0).permutation(16)
    x = hp.pool_tokens(2, 20)
    busy, _ = hp.run(hp.POOL, running, x)  # the slots hold other requests by now
    moved = lq.put_rows(busy, lq.take_rows(restored, order), np.arange(16))
    _, outs = hp.run(hp.POOL, running, x)
    _, again = hp.run(hp.POOL, moved, tuple(a[order] for a in x))
    assert hp.bits_of(again) == hp.bits_of(outs[order])


@pytest.mark.parametrize("name", lq.list_methods())
def test_every_method_round_trips(tmp_path, name):
    method = lq.get_method(name)
    sizes = dict(batch=1, num_heads=2, num_key_heads=1, key_dim=8, value_dim=9)
    like = jax.eval_shape(lambda: method.init(**sizes))
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda x: jnp.asarray(np.frombuffer(rng.bytes(x.size * x.dtype.itemsize), x.dtype).reshape(x.shape)), like
    )
    lq.save_state(tmp_path / "a", name, state)
    hp.assert_bit_equal(lq.load_state(tmp_path / "a", method, like), state)


def test_B18_a_list_of_11_layers_keeps_order_and_types(tmp_path):
    """Paths like [10] sort before [2]; a hybrid cache of tuples, dataclasses, None, counters and empty arrays."""
    methods = ["exact" if n % 4 == 3 else "leapquant-int8" for n in range(11)]
    sizes = dict(batch=1, num_heads=1, num_key_heads=1, key_dim=8, value_dim=9)
    layers = [(jnp.full((1, 3), n, jnp.bfloat16), None, lq.get_method(m).init(**sizes)) for n, m in enumerate(methods)]
    cache = {"layers": layers, "length": jnp.array([48], jnp.int32), "empty": jnp.zeros((0, 3))}
    lq.save_state(tmp_path / "a", methods, cache)
    restored = lq.load_state(tmp_path / "a", methods, jax.eval_shape(lambda: cache))
    hp.assert_bit_equal(restored, cache)
    assert [type(layer[2]) for layer in restored["layers"]] == [type(layer[2]) for layer in layers]
    with pytest.raises(ValueError, match="was saved with"):
        lq.load_state(tmp_path / "a", ["exact"] * 11, cache)
    assert "['layers'][10][0]" in lq.read_checkpoint(tmp_path / "a").arrays  # without a template: a dict by path


def test_B16_typed_keys_keep_their_implementation(tmp_path):
    record = {"key": jax.random.key(7, impl="rbg"), "keys": jax.random.split(jax.random.key(1), 3), "turn": np.int32(4)}
    lq.save_state(tmp_path / "a", "exact", record)
    with jax.default_prng_impl("rbg"):
        restored = lq.load_state(tmp_path / "a", "exact", record)
        for name in ("key", "keys"):
            assert restored[name].dtype == record[name].dtype
            assert hp.bits_of(jax.random.key_data(restored[name])) == hp.bits_of(jax.random.key_data(record[name]))
    np.testing.assert_array_equal(jax.random.normal(restored["key"], (10,)), jax.random.normal(record["key"], (10,)))


# --- B15: other numbers of devices -------------------------------------------------------------------------------------


def _in_another_process(code: str, devices: int) -> None:
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_B15_from_four_devices_to_one_and_back(tmp_path, running, template):
    assert jax.device_count() == 4, "tests/conftest.py asks for four"
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), PartitionSpec("rows"))
    lq.save_state(tmp_path / "four", hp.POOL, jax.device_put(running, sharding))
    _in_another_process(
        f"""
        import jax
        import leapquant_jax as lq
        from tests.library import helpers as hp
        assert jax.device_count() == 1
        like = jax.eval_shape(lambda: lq.init_state(hp.POOL, **hp.POOL_SIZES))
        state = lq.load_state({str(tmp_path / "four")!r}, hp.POOL, like)
        assert all(len(x.sharding.device_set) == 1 for x in jax.tree.leaves(state))
        lq.save_state({str(tmp_path / "one")!r}, hp.POOL, state)
        """,
        devices=1,
    )
    hp.assert_bit_equal(lq.load_state(tmp_path / "one", hp.POOL, template), running)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), template)
    restored = lq.load_state(tmp_path / "one", hp.POOL, placed)
    hp.assert_bit_equal(restored, running)
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(restored))


# --- what can be wrong -------------------------------------------------------------------------------------------------


def test_nothing_is_overwritten(tmp_path, running, template):
    lq.save_state(tmp_path / "a", hp.POOL, running)
    for occupied in (tmp_path / "a", tmp_path):
        with pytest.raises(ValueError, match="exists already and is left as it is: pass a new directory"):
            lq.save_state(occupied, hp.POOL, lq.init_state(hp.POOL, **hp.POOL_SIZES))
    hp.assert_bit_equal(lq.load_state(tmp_path / "a", hp.POOL, template), running)


@pytest.mark.parametrize(
    "change", [dict(window=8), dict(rank=2), dict(bits=6), dict(clip="mse"), dict(record_dtype="bfloat16")], ids=str
)
def test_A38_another_config_is_named(tmp_path, running, template, change):
    lq.save_state(tmp_path / "a", hp.POOL, running)
    other = dataclasses.replace(hp.POOL, **change)
    name = next(iter(change))
    with pytest.raises(ValueError, match=f"was saved with .*{name}.* not with .*{name}"):
        lq.load_state(tmp_path / "a", other, template)
    expected = jax.eval_shape(lambda: lq.init_state(other, **hp.POOL_SIZES))
    if name != "clip":  # even without a config, the shapes tell
        with pytest.raises(ValueError, match="does not fit: it holds"):
            lq.load_state(tmp_path / "a", None, expected)


@pytest.mark.parametrize("change", [dict(num_heads=4), dict(batch=15), dict(key_dim=16), dict(gate="channel")], ids=str)
def test_A38_other_sizes_are_named(tmp_path, running, change):
    lq.save_state(tmp_path / "a", hp.POOL, running)
    like = jax.eval_shape(lambda: lq.init_state(hp.POOL, **{**hp.POOL_SIZES, **change}))
    with pytest.raises(ValueError, match=r"does not fit: it holds \.\w+ \w+ \(.*\), but \.\w+ \w+ \(.*\) is expected"):
        lq.load_state(tmp_path / "a", hp.POOL, like)
    with pytest.raises(ValueError, match="but nothing more is expected"):
        lq.load_state(tmp_path / "a", hp.POOL, ())


# orbax leaves a reader behind that finds its event loop closed
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_A38_every_truncated_file_is_an_error_or_harmless(tmp_path, running, template):
    lq.save_state(tmp_path / "a", hp.POOL, running)
    files = sorted(f for f in (tmp_path / "a").rglob("*") if f.is_file())
    refused = 0
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        try:
            hp.assert_bit_equal(lq.load_state(tmp_path / "a", hp.POOL, template), running)
        except ValueError as error:
            assert "is damaged or not one of ours" in str(error)
            refused += 1
        file.write_bytes(content)
    assert refused >= 3  # the document, the index and the data
    hp.assert_bit_equal(lq.load_state(tmp_path / "a", hp.POOL, template), running)


def test_A38_a_tampered_document_is_refused(tmp_path, running, template):
    lq.save_state(tmp_path / "a", hp.POOL, running)
    file = tmp_path / "a" / "document" / "metadata"
    original = json.loads(file.read_text())

    def tampered(change):
        document = json.loads(file.read_text())
        change(document)
        file.write_text(json.dumps(document))
        with pytest.raises(ValueError) as error:
            lq.load_state(tmp_path / "a", hp.POOL, template)
        file.write_text(json.dumps(original))
        return str(error.value)

    assert "'window': 8" in tampered(lambda d: d["method"].update(window=8))
    assert "'rank': 2" in tampered(lambda d: d["method"].update(rank=2))
    assert "schema version 99, this library reads 2" in tampered(lambda d: d.update(version=99))
    assert "differs from its shape, dtype or checksum" in tampered(lambda d: d["leaves"][0].update(crc32=1))
    assert "damaged" in tampered(lambda d: d["leaves"].pop())
    assert "damaged" in tampered(lambda d: d["leaves"][0].update(stored_shape=[16, 4, 6, 8]))
    hp.assert_bit_equal(lq.load_state(tmp_path / "a", hp.POOL, template), running)


def test_missing_and_foreign_directories(tmp_path, template):
    with pytest.raises(ValueError, match=r"there is no checkpoint at .* pass a directory that save_state wrote"):
        lq.load_state(tmp_path / "nothing", hp.POOL, template)
    with pytest.raises(ValueError, match="damaged or not one of ours"):
        lq.load_state(tmp_path, hp.POOL, template)


def test_bad_arguments_write_nothing(tmp_path, running):
    with pytest.raises(ValueError, match="unknown method 'int8'"):
        lq.save_state(tmp_path / "a", "int8", running)
    with pytest.raises(ValueError, match="metadata must be what JSON can hold"):
        lq.save_state(tmp_path / "a", hp.POOL, running, metadata={"x": object()})
    assert not any(tmp_path.iterdir())
