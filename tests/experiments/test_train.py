"""The training loop on a tiny model: it learns, and a killed run ends where an unkilled one does."""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import tasks, train_data, train_step
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


def command(directory: Path, output: Path, *more: str) -> list[str]:
    flags = dict(
        corpus_dir=directory, output_dir=output, steps=6, batch=2, segment=256, max_age=128, max_stream=512, layers=4,
        hidden_size=32, mlp_size=32, head_size=16, key_heads=1, attention_window=16, dtype="float32", workers=1, log_every=1,
        checkpoint_seconds=0, eval_streams=1, eval_tokens=512,
    )  # fmt: skip
    return [sys.executable, "-m", "experiments.train", *(f"--{name}={value}" for name, value in flags.items()), *more]


def run_to_end(arguments: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        arguments, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}, timeout=600
    )


def test_b17_a_killed_training_run_ends_like_an_unkilled_one(text_directory, tmp_path):
    whole = run_to_end(command(text_directory, tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    process = subprocess.Popen(
        command(text_directory, tmp_path / "killed"), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    log = tmp_path / "killed" / "train.jsonl"
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if log.exists() and len(log.read_text().splitlines()) >= 3:
            break
        time.sleep(0.05)
    process.kill()
    process.wait()
    again = run_to_end(command(text_directory, tmp_path / "killed"))
    assert again.returncode == 0, again.stderr

    def losses(name: str) -> list[tuple[int, float]]:
        rows = [json.loads(line) for line in (tmp_path / name / "train.jsonl").read_text().splitlines()]
        return [(row["step"], row["loss"]) for row in rows]

    assert [step for step, _ in losses("killed")] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(losses("killed"), losses("whole"), rtol=1e-5)
    for name in ("whole", "killed"):
        for file in ("README.md", "training.png", "results.jsonl", "model/model.safetensors", "model/config.json"):
            assert (tmp_path / name / file).stat().st_size > 0
    qwen35.from_pretrained(tmp_path / "killed" / "model")

    other = run_to_end(command(text_directory, tmp_path / "whole", "--seed=1"))
    assert other.returncode != 0 and "seed: 0 there, 1 now" in other.stdout + other.stderr


@pytest.fixture(scope="module")
def tiny():
    config = qwen35.Config(
        vocab_size=264, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, attention_window=16, tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    return config, *train_step.init_train_state(config, jax.random.key(0), batch=2, longest_half_life=256.0)


def test_the_training_forward_is_prefill(tiny):
    config, merge, state = tiny
    tokens = jax.random.randint(jax.random.key(1), (2, 64), 0, 256)
    model = merge(state.params)
    trained, _ = train_step.forward(model, tokens, train_step.empty_cache(config, 2))
    served, _ = qwen35.prefill(model, tokens, qwen35.init_cache(config, batch=2, method="exact"))
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


def test_a_run_by_the_clock_ends_in_time(text_directory, tmp_path):
    run = run_to_end(command(text_directory, tmp_path / "run", "--minutes=0.05"))
    assert run.returncode == 0, run.stderr
    facts, *_ = (json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines())
    assert facts["steps"] >= 1 and facts["seconds"] < 10
    log = [json.loads(line) for line in (tmp_path / "run" / "train.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == facts["steps"]
    qwen35.from_pretrained(tmp_path / "run" / "model")
