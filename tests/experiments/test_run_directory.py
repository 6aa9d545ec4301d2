"""A run's folder: never another run's, and complete checkpoints whatever a kill leaves behind (B17, B18)."""

import json

import jax
import numpy as np
import pytest

import leapquant_jax as lq
from experiments import run_directory
from experiments.run_directory import RunDirectory
from models import qwen35


def contents(path):
    return {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_same_configuration_continues_and_records_every_start(tmp_path):
    RunDirectory.open(tmp_path / "run", {"num_tokens": 512, "methods": ("exact",)})
    run = RunDirectory.open(tmp_path / "run", {"num_tokens": 512, "methods": ("exact",)})
    stored = json.loads((tmp_path / "run" / "run.json").read_text())
    assert len(stored["sessions"]) == len(run.sessions) == 2
    assert {"command", "started", "device", "jax", "python"} <= set(stored["sessions"][0])


def test_another_runs_folder_is_refused_untouched(tmp_path):
    RunDirectory.open(tmp_path, {"num_tokens": 512})
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"num_tokens: 512 there, 1024 now.*choose another --output_dir"):
        RunDirectory.open(tmp_path, {"num_tokens": 1024})
    assert contents(tmp_path) == before


def test_foreign_folder_and_file_are_refused_untouched(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"no run of ours.*choose another --output_dir"):
        RunDirectory.open(tmp_path, {})
    with pytest.raises(ValueError, match="is a file"):
        RunDirectory.open(tmp_path / "thesis.tex", {})
    (tmp_path / "run.json").write_text('{"half": ')
    with pytest.raises(ValueError, match=r"choose another --output_dir"):
        RunDirectory.open(tmp_path, {})
    assert {str(name) for name in contents(tmp_path)} == {"thesis.tex", "run.json"}


@pytest.fixture(scope="module")
def cache():
    """A linear layer for every method, and so with other dtypes; more than ten, so that "10" sorts before "2"."""
    methods = lq.list_methods()
    config = qwen35.Config(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=len(methods), num_attention_heads=1,
        num_key_value_heads=1, head_dim=8, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=9, layer_types=("linear_attention",) * len(methods),
    )  # fmt: skip
    empty = qwen35.init_cache(config, batch=2, method=methods)
    leaves, treedef = jax.tree.flatten(empty)
    rng = np.random.default_rng(0)
    return treedef.unflatten([x + rng.integers(1, 5, x.shape).astype(x.dtype) for x in leaves])


def test_a_cache_comes_back_as_it_was(tmp_path, cache):
    """B18: same types, order, tree and bits, int8, packed, fp8 and 16-bit leaves alike."""
    run = RunDirectory.open(tmp_path, {})
    tally = np.arange(6, dtype=np.int64).reshape(2, 3)
    with run.checkpoints(minimum_seconds=0) as manager:
        assert run_directory.restore_latest(manager, {"cache": cache, "tally": tally})[0] == 0
        run_directory.save(manager, 3, {"cache": cache, "tally": tally})
    blank = {"cache": jax.tree.map(lambda x: x * 0, cache), "tally": tally * 0}
    with run.checkpoints(minimum_seconds=0) as manager:
        done, restored = run_directory.restore_latest(manager, blank)
    assert done == 3
    assert jax.tree.structure(restored) == jax.tree.structure(blank)
    for old, new in zip(jax.tree.leaves({"cache": cache, "tally": tally}), jax.tree.leaves(restored), strict=True):
        assert old.dtype == new.dtype
        np.testing.assert_array_equal(np.asarray(old).view(np.uint8), np.asarray(new).view(np.uint8))


def test_half_written_checkpoints_are_ignored_and_cleaned(tmp_path):
    """B17: a leftover of a save that was killed is no checkpoint, and does not block the next save of that step."""
    run = RunDirectory.open(tmp_path, {})
    with run.checkpoints(minimum_seconds=0) as manager:
        run_directory.save(manager, 1, {"x": np.ones(3)})
    leftover = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
    (leftover / "state").mkdir(parents=True)
    with run.checkpoints(minimum_seconds=0) as manager:
        done, tree = run_directory.restore_latest(manager, {"x": np.zeros(3)})
        assert (done, tree["x"].tolist()) == (1, [1, 1, 1])
        assert not leftover.exists()
        run_directory.save(manager, 2, {"x": np.full(3, 2.0)})
    with run.checkpoints(minimum_seconds=0) as manager:
        assert run_directory.restore_latest(manager, {"x": np.zeros(3)})[0] == 2


def test_truncated_checkpoint_says_what_to_delete(tmp_path):
    run = RunDirectory.open(tmp_path, {})
    with run.checkpoints(minimum_seconds=0) as manager:
        run_directory.save(manager, 5, {"x": np.ones(1000)})
    for file in (tmp_path / "checkpoints" / "5" / "state").rglob("*"):
        if file.is_file() and file.stat().st_size:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with run.checkpoints(minimum_seconds=0) as manager, pytest.raises(ValueError, match=r"checkpoints/5 .*delete"):
        run_directory.restore_latest(manager, {"x": np.zeros(1000)})


def test_saves_no_more_often_than_asked(tmp_path):
    run = RunDirectory.open(tmp_path, {})
    with run.checkpoints(minimum_seconds=1000) as manager:
        saved = [run_directory.save(manager, i, {"x": np.ones(1)}, force=i == 4) for i in range(1, 5)]
    assert saved == [True, False, False, True]


def test_an_empty_array_comes_back_empty(tmp_path):
    """A run without answers has arrays without entries."""
    tree = {"some": np.arange(3.0), "none": np.zeros((0, 2), bool)}
    run = RunDirectory.open(tmp_path, {})
    with run.checkpoints(minimum_seconds=0) as manager:
        run_directory.save(manager, 1, tree)
    with run.checkpoints(minimum_seconds=0) as manager:
        done, back = run_directory.restore_latest(manager, tree)
    assert done == 1 and back["none"].shape == (0, 2) and back["none"].dtype == bool
    np.testing.assert_array_equal(back["some"], tree["some"])
