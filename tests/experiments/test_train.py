"""The training loop on a tiny model: it learns, and a killed run ends where an unkilled one does."""

import hashlib
import itertools
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import app
from absl.testing import flagsaver
from jax.experimental.compilation_cache import compilation_cache
from safetensors.numpy import load_file

from experiments import tasks, train, train_data, train_step
from models import qwen35

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def text_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    text = np.frombuffer((b"the quick brown fox jumps over the lazy dog; " * 2000), np.uint8)
    text.tofile(directory / "train.bin")
    facts = {"bytes": text.size, "sha256": hashlib.sha256(text).hexdigest()}
    (directory / "manifest.json").write_text(json.dumps({"train": facts, "sources": {}, "python": "3.12"}))
    return directory


@pytest.fixture(scope="module")
def programs(tmp_path_factory, fast_compilation):
    """Compiled programs are shared by all runs, also by the one that is killed."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield {**{name.upper(): str(value) for name, value in settings.items()}, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def arguments(directory: Path, output: Path, *more: str) -> list[str]:
    flags = dict(
        corpus_dir=directory, output_dir=output, steps=6, batch=2, segment=256, max_age=128, max_stream=512, layers=2,
        hidden_size=32, mlp_size=32, head_size=16, key_heads=1, attention_window=16, dtype="float32", workers=1, log_every=1,
        checkpoint_seconds=0, eval_streams=1, eval_tokens=512,
    )  # fmt: skip
    return [*(f"--{name}={value}" for name, value in flags.items()), *more]


def train_here(monkeypatch, flags: list[str]) -> None:
    """The program in this process, which has imported and compiled everything already."""
    monkeypatch.setattr(sys, "argv", ["experiments.train", *flags])  # names the module whose flags are recorded
    with flagsaver.flagsaver(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        train.flags.FLAGS(sys.argv)
        train.main(sys.argv[:1])


def read_log(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "train.jsonl").read_text().splitlines()]


def test_b17_a_killed_training_run_ends_like_an_unkilled_one(text_directory, programs, tmp_path, monkeypatch):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train_here(monkeypatch, arguments(text_directory, whole))

    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.train", *arguments(text_directory, killed)], cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, **programs, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not ((killed / "train.jsonl").exists() and len(read_log(killed)) >= 3):
        assert process.poll() is None, process.communicate()[1].decode()[-2000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert not (killed / "README.md").exists(), "the run ended before it could be killed: give it more steps"
    train_here(monkeypatch, arguments(text_directory, killed))

    log = {name: [(row["step"], row["loss"]) for row in read_log(tmp_path / name)] for name in ("whole", "killed")}
    assert [step for step, _ in log["killed"]] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(log["killed"], log["whole"], rtol=1e-5)
    for directory in (whole, killed):
        for file in ("README.md", "training.png", "results.jsonl", "model/model.safetensors", "model/config.json"):
            assert (directory / file).stat().st_size > 0
    weights = [load_file(directory / "model" / "model.safetensors") for directory in (killed, whole)]
    for name, tensor in weights[0].items():
        np.testing.assert_allclose(tensor, weights[1][name], atol=1e-5)

    with pytest.raises(app.UsageError, match="seed: 0 there, 1 now"):
        train_here(monkeypatch, arguments(text_directory, whole, "--seed=1"))


def test_a_run_by_the_clock_ends_in_time(text_directory, programs, tmp_path, monkeypatch):
    """By a clock that moves when looked at, the trial says 600 steps; training looks at it at every step, and is slower."""
    ticks = itertools.count()
    monkeypatch.setattr(train, "time", types.SimpleNamespace(perf_counter=lambda: 0.02 * next(ticks)))
    train_here(monkeypatch, arguments(text_directory, tmp_path, "--minutes=0.02"))
    facts, *_ = (json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines())
    planned = json.loads((tmp_path / "steps.json").read_text())["steps"]
    assert planned == 600 and 1 <= facts["steps"] < planned / 4 and facts["seconds"] < 1.1 * 60 * 0.02
    assert read_log(tmp_path)[-1]["step"] == facts["steps"]
    qwen35.from_pretrained(tmp_path / "model")


@pytest.fixture(scope="module")
def tiny(programs):
    del programs
    config = qwen35.Config(
        vocab_size=264, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, layer_types=("full_attention", "linear_attention"), attention_window=16,
        tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    key = jax.random.key(0, impl="unsafe_rbg")  # compiles faster
    return config, *train_step.init_train_state(config, key, batch=2, longest_half_life=256.0)


def test_the_training_forward_is_prefill(tiny):
    config, merge, state = tiny
    tokens = jax.random.randint(jax.random.key(1), (2, 64), 0, 256)
    model = merge(state.params)
    trained, _ = jax.jit(train_step.forward)(model, tokens, train_step.empty_cache(config, 2))
    served, _ = jax.jit(qwen35.prefill)(model, tokens, qwen35.init_cache(config, batch=2, method="exact"))
    np.testing.assert_allclose(trained, served, atol=2e-4)


def test_the_loss_falls_and_the_state_is_carried(tiny):
    _, merge, state = tiny
    step = train_step.make_train_step(merge, answer_share=0.3, weight_decay=0.0)
    tokens = jnp.tile(jnp.arange(65, dtype=jnp.int32)[None] % 7, (2, 1))
    task = age = jnp.zeros((2, 65), jnp.int32)
    fresh = jnp.array([True, False])
    state = jax.tree.map(jnp.copy, state)
    losses = []
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        for _ in range(8):
            state, metrics = step(state, tokens, task, age, fresh, jnp.float32(1e-2))
            losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_array_equal(state.cache.lengths, [64, 8 * 64])


def test_the_parallel_feed_equals_the_plain_one(text_directory):
    plan = train_data.Plan(batch=3, segment=256, steps=4, max_age=128, max_stream=512, seed=3)
    text = np.fromfile(text_directory / "train.bin", np.uint8)
    plain = train_data.segments(plan, text)
    parallel = train_data.parallel_segments(plan, str(text_directory), workers=2, depth=2)
    resumed = train_data.segments(plan, text, first_step=2)
    for step in range(4):
        a, b = next(plain), next(parallel)
        for x, y in zip(jax.tree.leaves(vars(a)), jax.tree.leaves(vars(b)), strict=True):
            np.testing.assert_array_equal(x, y)
        if step >= 2:
            np.testing.assert_array_equal(a.tokens, next(resumed).tokens)


def test_answer_metrics_are_sums_by_kind_and_age():
    rng = np.random.default_rng(0)
    nll, right = rng.random((3, 50), np.float32), rng.random((3, 50)) < 0.5
    task = rng.integers(0, 1 + len(tasks.KINDS), (3, 50)).astype(np.int32)
    age = np.where(task > 0, rng.choice([40, 1023, 1024, 5000, 8192, 16000], (3, 50)), 0).astype(np.int32)
    of_kind = jax.nn.one_hot(task - 1, len(tasks.KINDS), dtype=jnp.float32)
    found = train_step.answer_metrics(jnp.asarray(nll), jnp.asarray(right), of_kind, jnp.asarray(age))
    for kind in range(len(tasks.KINDS)):
        for group, (first, last) in enumerate(train_step.AGE_GROUPS.values()):
            chosen = (task == 1 + kind) & (first <= age) & (age <= last)
            for name, values in (("count", np.ones((3, 50))), ("right", right), ("nll", nll)):
                np.testing.assert_allclose(found[name][kind, group], values[chosen].sum(), rtol=1e-5)
