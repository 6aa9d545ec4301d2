"""The accuracy experiment: what it counts, that a kill loses and repeats nothing (B17), what bad input does."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from experiments import (
    accuracy,
    accuracy_records,
    accuracy_report,
    lockstep,
    metrics,
    report,
    streams,
    tally,
    tasks,
)
from experiments import settings as settings_flags
from experiments.run_directory import RunDirectory
from models import qwen35
from tests.experiments.synthetic_runs import SyntheticRun

ROOT = Path(__file__).resolve().parents[2]
METHODS = ("step-int8", "leapquant-int8")


@pytest.fixture
def settings(model_dir, tmp_path):
    return accuracy.Settings(
        model_dir=str(model_dir), methods=METHODS, num_streams=2, num_tokens=512, segment=32,
        output_dir=str(tmp_path / "run"), checkpoint_seconds=0,
    )  # fmt: skip


def numbers(directory):
    """All results of a run, without its first line, which has the commands and times."""
    return report.read_jsonl(directory / "results.jsonl")[1:]


@pytest.fixture
def programs(tmp_path):
    """Compiled programs are shared with the programs that this test starts."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    settings_flags.keep_compiled_programs(tmp_path / "programs")
    compilation_cache.reset_cache()
    yield tmp_path / "programs"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_a_killed_run_ends_with_the_numbers_of_an_unkilled_one(settings, programs, tmp_path):
    """B17: SIGKILL inside a save and at a random moment; the third start finishes. Every number is the same."""
    job = accuracy.prepare(settings)
    accuracy.run(settings)
    whole = Path(settings.output_dir)

    killed = tmp_path / "killed"
    command = [
        sys.executable, "-m", "experiments.accuracy", f"--model_dir={settings.model_dir}",
        f"--methods={','.join(METHODS)}", "--num_streams=2", "--num_tokens=512", "--segment=32",
        "--checkpoint_seconds=0", f"--output_dir={killed}", f"--compilation_cache={programs}",
    ]  # fmt: skip
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}

    def start() -> subprocess.Popen:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def wait_for(process: subprocess.Popen, happened) -> None:
        deadline = time.monotonic() + 300
        while not happened():
            assert process.poll() is None, process.communicate()[1].decode()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def steps() -> list[int]:
        return sorted(int(p.name) for p in (killed / "checkpoints").glob("*") if p.name.isdigit())

    def saving() -> bool:
        return bool(steps()) and any("tmp" in p.name for p in (killed / "checkpoints").glob("*"))

    for moment in ("inside a save", "at random"):
        process = start()
        before = max(steps(), default=0)
        wait_for(process, lambda before=before: max(steps(), default=0) > before)
        if moment == "inside a save":
            wait_for(process, saving)
        else:
            time.sleep(random.random())
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed: give it more tokens"
        process.communicate()
        assert not (killed / "results.jsonl").exists()

    process = start()
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()[-2000:]
    assert "leapquant-int8" in output.decode()
    assert numbers(killed) == numbers(whole)
    assert len(RunDirectory.open(killed, job.config).sessions) == 4  # this one included

    # A finished run is only reported again.
    before = numbers(whole)
    accuracy.run(settings)
    assert numbers(whole) == before
    check_records(whole)


def check_records(directory):
    """Every measure is there for every method, and live arrays are the bytes that are claimed (A29, A30, A36)."""
    results = accuracy_report.Results.read(directory)
    assert results.methods == ["exact", *METHODS]
    for name in results.methods:
        size = results.one("bytes_per_element", name)
        assert size["live"] == size["total"] >= size["at_rest"]
        last = results.find("state_error", name)[-1]
        assert last["position"] == 512 and {"mean", "median", "worst_layer", "worst_head"} <= set(last)
        by_layer = results.find("state_error_by_layer", name)
        assert [r["layer"] for r in by_layer] == [0] and {"median", "worst_head", "worst"} <= set(by_layer[0])
        for group in (streams.TEXT, streams.RECALL):
            assert results.one("quality", name, group=group)["tokens"] == 2 * 511
        assert results.find("recall_by_age", name) and results.find("recall", name, beyond_window=True)
    exact, step, leap = (results.find("state_error", name)[-1]["mean"] for name in results.methods)
    assert exact == 0 < leap < step
    quality = results.one("quality", "exact", group=streams.TEXT)
    assert quality["nll_difference"] == 0 and quality["top1_agreement"] == 1 and quality["kl"] == 0

    text = accuracy.write_report(directory)
    assert text == (directory / "table.md").read_text() and "leapquant-int8" in text
    assert all((directory / f"{name}.png").stat().st_size for name in ("error_by_position", "recall_by_age"))


@pytest.mark.parametrize("segment", [16, 48, 512])
def test_tally_does_not_depend_on_the_segments(segment):
    """NLL, agreement and answers are those of the whole streams at once, also for an answer across two segments."""
    rng = np.random.default_rng(0)
    recall = tasks.recall_streams(3, 528, seed=1)
    num_tokens = 528 // segment * segment
    keep = recall.answers.position + recall.answers.length <= num_tokens
    answers = tasks.Answers(**{name: value[keep] for name, value in vars(recall.answers).items()})
    target = np.roll(recall.tokens, -1, axis=1)
    # Right for about two thirds of the tokens, so that half-right answers occur.
    predicted = np.where(rng.random(target.shape) < 0.67, target, 0)
    nll, kl = rng.random((2, *target.shape), np.float32)
    agrees = rng.random(target.shape) < 0.98

    count = tally.empty_tally(
        num_streams=3, num_tokens=num_tokens, num_answers=len(answers), num_positions=1, num_layers=1, num_heads=1
    )
    for start in range(0, num_tokens, segment):
        at = slice(start, start + segment)
        count = tally.add_segment(
            count, start, nll=nll[:, at], kl=kl[:, at], right=(predicted == target)[:, at], agrees=agrees[:, at],
            answers=answers, num_tokens=num_tokens,
        )  # fmt: skip
    graded = tasks.grade(recall, np.roll(predicted, 1, axis=1))[keep]
    np.testing.assert_array_equal(count.answers_right, graded)
    assert graded.any() and not graded.all()
    for sums, values in ((count.nll, nll), (count.kl, kl)):
        whole = values[:, : num_tokens - 1].sum(axis=1, dtype=np.float64)
        np.testing.assert_allclose(sums.sum(axis=1), whole, rtol=1e-6)
    np.testing.assert_array_equal(count.agreements.sum(axis=1), agrees[:, : num_tokens - 1].sum(axis=1))
    assert tally.tokens_per_octave(num_tokens).sum() == num_tokens - 1
    np.testing.assert_array_equal(count.divergence, 1 + np.argmin(agrees[:, : num_tokens - 1], axis=1))


def test_token_metrics():
    rng = np.random.default_rng(0)
    logits, reference = rng.normal(size=(2, 5, 3, 7)).astype(np.float32)
    targets = rng.integers(0, 7, (5, 3)).astype(np.int32)
    found = lockstep.compare(jnp.asarray(logits), jnp.asarray(reference), jnp.asarray(targets))
    log_p, log_r = (x - np.log(np.exp(x.astype(np.float64)).sum(-1, keepdims=True)) for x in (logits, reference))
    np.testing.assert_allclose(found.nll, -np.take_along_axis(log_p, targets[..., None], -1)[..., 0], rtol=1e-5)
    np.testing.assert_allclose(found.kl, (np.exp(log_r) * (log_r - log_p)).sum(-1), rtol=1e-4)
    np.testing.assert_array_equal(found.right, logits.argmax(-1) == targets)
    np.testing.assert_array_equal(found.agrees, logits.argmax(-1) == reference.argmax(-1))


def test_bad_heads_stand_out_of_their_layer():
    errors = np.random.default_rng(0).uniform(0.005, 0.02, (24, 32))
    errors[20] *= 10  # a layer that is worse as a whole has no bad head ...
    assert not list(metrics.bad_heads(errors))
    errors[17, 5] = 0.12  # ... and a head of a good layer may be bad though it is better than that layer
    ((layer, head, times),) = metrics.bad_heads(errors)
    assert (layer, head) == (17, 5) and times > 5
    errors[3, 1] = np.nan
    assert [(layer, head) for layer, head, _ in metrics.bad_heads(errors)] == [(3, 1), (17, 5)]


@pytest.fixture(scope="module")
def short_streams():
    return streams.make_streams(3, 4096, seed=0)


@pytest.mark.parametrize("bad", [None, 1024, 4096])
def test_the_report_names_one_bad_head_of_768(short_streams, tmp_path, bad):
    """A36: the mean of its layer hides it, the report must not, even if the head is bad only for a while."""
    positions = [256, 1024, 4096]
    run = SyntheticRun(["exact", "leapquant-int8"], short_streams, positions, num_layers=24, num_heads=32)
    errors = np.random.default_rng(0).uniform(0.005, 0.02, (3, 24, 6, 32)).astype(np.float32)
    if bad:
        errors[positions.index(bad), 17, :, 5] = 0.15
    run.change("leapquant-int8", state_errors=errors)
    directory = run.write(tmp_path / "run", list(accuracy_records.records(run, run.progress)))
    text = accuracy.run(accuracy.Settings(report_only=True, output_dir=str(directory)))
    named = f"leapquant-int8: layer 18 head 5 is at 15.0 % after {bad or 0:,} tokens, 1"  # layer 0 is attention
    assert text.count(named) == text.count("Bad heads") == bool(bad)

    by_layer = text.split("## State error of each layer")[1].split("##")[0]
    rows = [line.split("|")[1:-1] for line in by_layer.splitlines() if line.startswith("| leapquant-int8")]
    assert [int(row[1]) for row in rows] == list(range(1, 25)) and "at 1,024" in by_layer and "at 4,096" in by_layer
    heads = errors.mean(axis=2, dtype=np.float64)[1:, 17]
    for cell, values in zip(rows[17][2:], heads, strict=False):
        assert cell.strip() == f"{report.percent(np.median(values))} / {report.percent(values.max())}"


def test_the_report_has_first_divergence_and_nll_by_position(short_streams, tmp_path):
    """Issue 4, item 2: NLL by octave of position as a difference, and the first greedy divergence with an interval."""
    run = SyntheticRun(["exact", "step-int8"], short_streams, [4096], num_layers=1, num_heads=1)
    nll = np.zeros_like(run.progress.tallies[0].nll)
    nll[:3, 11] = 0.25 * 2048  # of the text streams, at positions 2048 to 4095
    run.change("step-int8", nll=nll, divergence=np.array([700, 800, 900, 50, -1, -1]))
    directory = run.write(tmp_path / "run", list(accuracy_records.records(run, run.progress)))
    text = accuracy.write_report(directory)
    assert "| step-int8 | 800 [700, 900] | never [50, never] |" in text
    row = next(line for line in text.split("| text")[1].splitlines() if line.startswith("| step-int8"))
    assert [cell.strip() for cell in row.split("|")[2:-1]] == ["+0.0000"] * 5 + ["**+0.2500**"]


def test_measured_positions_grow_with_the_logarithm():
    short, long = (metrics.measuring_positions(n, 128) for n in (2048, 65536))
    assert {1024, 4096, 16384, 65536} <= set(long) and 2048 in short
    assert len(long) < len(short) + 4 * 5 + 3


def test_bootstrap_interval():
    rng = np.random.default_rng(0)
    low, high = metrics.bootstrap_interval(rng.normal(1.0, 0.1, 32))
    assert 0.9 < low < 1.0 < high < 1.1
    assert metrics.bootstrap_interval(np.zeros(4)) == (0.0, 0.0)
    assert all(np.isnan(metrics.bootstrap_interval(np.ones(1))))


def check_refused(match, **changes):
    with pytest.raises((ValueError, FileNotFoundError), match=match):
        accuracy.prepare(accuracy.Settings(**changes))


def test_bad_input_is_refused_before_any_work(model_dir, tmp_path):
    good = {"model_dir": str(model_dir), "output_dir": str(tmp_path / "run"), "num_tokens": 512}
    check_refused("--num_tokens must be at least 256, got 0", **good | {"num_tokens": 0})
    check_refused("multiple of --segment", **good | {"num_tokens": 500})
    check_refused("--num_streams must be at least 1", **good | {"num_streams": 0})
    check_refused("unknown method 'int8': choose from exact", **good | {"methods": ("int8",)})
    check_refused("--model_dir .* holds no config.json", **good | {"model_dir": str(tmp_path)})
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    check_refused("--text_file .* too short", **good | {"text_file": str(empty)})
    check_refused("--text_file .* does not exist", **good | {"text_file": str(tmp_path / "none.txt")})

    truncated = tmp_path / "truncated"
    truncated.mkdir()
    (truncated / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    check_refused("missing checkpoint files", **good | {"model_dir": str(truncated)})
    weights = (model_dir / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    check_refused("not a complete safetensors file", **good | {"model_dir": str(truncated)})
    assert not (tmp_path / "run").exists()


def test_another_runs_folder_stops_the_program(settings):
    job = accuracy.prepare(settings)
    RunDirectory.open(settings.output_dir, {**job.config, "num_tokens": 1024})
    before = {file: file.read_bytes() for file in Path(settings.output_dir).iterdir()}
    with pytest.raises(SystemExit, match=r"^accuracy: .* holds another run, which differs in num_tokens"):
        accuracy.run(settings)
    assert {file: file.read_bytes() for file in Path(settings.output_dir).iterdir()} == before


@pytest.mark.parametrize("name", METHODS)
def test_a_segment_read_layer_by_layer_is_decoding(model_dir, name):
    """The same states and predictions as `decode_step` token by token, up to rounding in fp32."""
    _, model = qwen35.from_pretrained(model_dir)
    tokens = jax.random.randint(jax.random.key(1), (2, 64), 0, 256)
    method = accuracy.chosen_methods((name,))[1]
    sizes = dict(batch=2, max_length=64)
    logits, cache = qwen35.prefill(
        model, tokens, qwen35.init_cache(model.config, method=lockstep.TokenByToken(method), **sizes)
    )
    stepwise = qwen35.init_cache(model.config, method=method, **sizes)
    for t in range(64):
        expected, stepwise = qwen35.decode_step(model, tokens[:, t], stepwise)
        np.testing.assert_allclose(logits[:, t], expected, atol=2e-3)
    for a, b in zip(qwen35.recurrent_states(cache), qwen35.recurrent_states(stepwise), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3 * float(jnp.abs(b).max()))
