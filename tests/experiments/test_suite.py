"""The suite: its verdicts fail a method that forgets, spare one that does not, and judge nothing that was not learned."""

import dataclasses

import numpy as np
import pytest

from experiments import accuracy_records, lockstep, metrics, report, streams, suite, suite_records, tasks
from tests.experiments.synthetic_runs import SyntheticRun

NUM_STREAMS, PER_STREAM = 6, 40


def some_answers() -> tasks.Answers:
    """The same number of each kind in each stream, of ages 64 to 4095."""
    kinds = len(tasks.KINDS)
    stream, kind, _ = np.indices((NUM_STREAMS, kinds, PER_STREAM)).reshape(3, -1)
    age = np.resize([64, 200, 700, 4095], len(stream))
    return tasks.Answers(stream=stream, position=np.full(len(stream), 5000), length=1 + 0 * stream, age=age, kind=kind)


def verdicts(
    right: np.ndarray, exact: np.ndarray | None = None, answers: tasks.Answers | None = None
) -> dict[str, str]:
    """By kind, and "suite", of a method against an `exact` that knows everything."""
    answers = answers or some_answers()
    exact = np.ones(len(answers), bool) if exact is None else exact
    found = suite_records.score(["exact", "method"], [exact, right], answers, NUM_STREAMS, window=32)
    of_method = [r for r in found if r["method"] == "method" and "verdict" in r]
    return {r.get("kind", "suite"): r["verdict"] for r in of_method}


def forgets(kind: str, share: float, per_stream: bool = False) -> np.ndarray:
    """bool [A]: all right but a share of one kind: of every stream, or of the streams (whole ones)."""
    answers, rng = some_answers(), np.random.default_rng(0)
    gone = rng.random(len(answers)) < share
    if per_stream:
        gone = answers.stream < share * NUM_STREAMS
    return ~((answers.kind == tasks.KINDS.index(kind)) & gone)


def test_a_method_that_forgets_one_task_fails():
    found = verdicts(forgets("copy", 0.3))
    assert found == {**dict.fromkeys(tasks.KINDS, "pass"), "copy": "fail", "parity": "control", "suite": "fail"}
    assert verdicts(forgets("copy", 0.0))["suite"] == "pass"
    assert verdicts(forgets("copy", 0.02))["copy"] == "pass"  # within the margin
    assert verdicts(forgets("parity", 1.0))["suite"] == "pass"  # a control is never judged


def test_what_cannot_be_told_is_unclear():
    """A tenth of all answers lost: in every stream it is a failure, in one stream of six it may be chance."""
    assert verdicts(forgets("chain", 0.17))["chain"] == "fail"
    found = verdicts(forgets("chain", 0.17, per_stream=True))
    assert found["chain"] == found["suite"] == "unclear"


def test_few_answers_promise_nothing():
    """Five right answers of five are no proof, nor are many in two streams."""
    answers = some_answers()
    few = np.arange(len(answers)) % PER_STREAM < 4
    two = answers.stream < 2
    for kept in (few, two):
        some = tasks.Answers(**{name: values[kept] for name, values in vars(answers).items()})
        assert verdicts(np.ones(len(some), bool), answers=some)["suite"] == "unclear"


def test_what_exact_cannot_do_is_not_judged():
    exact = np.random.default_rng(1).random(len(some_answers())) < 0.15
    found = verdicts(np.zeros_like(exact), exact)
    assert set(found.values()) == {"not learned", "control"} and found["suite"] == "not learned"
    only_counter = some_answers().kind == tasks.KINDS.index("counter")
    guess = np.random.default_rng(1).random(len(only_counter)) < 0.3  # less than 20 points above a chance of 12.5 %
    assert verdicts(guess & ~only_counter, ~only_counter | guess)["counter"] == "not learned"


def test_young_answers_do_not_count():
    """What the attention still sees says nothing about the state."""
    answers = some_answers()
    young = dataclasses.replace(answers, age=np.where(answers.age == 64, 20, answers.age))
    assert verdicts(answers.age != 64)["register"] == "fail"
    assert verdicts(answers.age != 64, answers=young)["register"] == "pass"
    records = suite_records.score(["exact"], [np.ones(len(young), bool)], young, NUM_STREAMS, window=32)
    by_age = [r["min_age"] for r in records if r["measure"] == "task_by_age" and r["kind"] == "copy"]
    assert by_age == [128, 512, 2048]
    (copy,) = (r for r in records if r["measure"] == "task" and r["kind"] == "copy")
    assert copy["count"] == NUM_STREAMS * PER_STREAM * 3 / 4 and copy["accuracy"] == 1 and copy["difference"] == 0


def test_intervals_are_over_streams():
    """Answers of one stream are one observation: a thousand of them do not narrow the interval."""
    rng = np.random.default_rng(0)
    shares = rng.uniform(0.2, 0.8, 12)
    few, many = (metrics.ratio_interval(shares * n, np.full(12, n)) for n in (1, 1000))
    np.testing.assert_allclose(few, many)
    expected = 1.96 * shares.std() / np.sqrt(12)
    np.testing.assert_allclose(np.subtract(few, shares.mean()), [-expected, expected], rtol=0.15)
    # A stream weighs as much as it has answers; empty ones do not count.
    low, high = metrics.ratio_interval([90, 90, 0, 0], [100, 100, 1, 0])
    assert low < 0.9 and high == 0.9
    assert np.isnan(metrics.ratio_interval([1, 0], [1, 0])).all()
    low, high = metrics.median_interval([5, 7, 9, np.inf, np.inf, np.inf])
    assert low < 10 and high == np.inf


def test_report_shows_the_failures(tmp_path):
    """step-int8 and step-int4 fail, leapquant-int8 passes, and exact is the measure of all."""
    names = ["exact", "step-int8", "step-int4", "leapquant-int8"]
    recall = streams.make_streams(6, 8192, seed=0, with_text=False)
    run = SyntheticRun(names, recall, [1024, 8192], num_layers=2, num_heads=3)
    rng, count = np.random.default_rng(0), len(recall.answers)
    run.change("step-int8", answers_right=rng.random(count) < 0.4)
    run.change("step-int4", answers_right=np.zeros(count, bool))
    run.change("leapquant-int8", answers_right=rng.random(count) < 0.995)
    records = [*accuracy_records.records(run, run.progress), *suite_records.records(run, run.progress)]
    directory = run.write(tmp_path / "run", records)
    text = suite.run(suite.Settings(report_only=True, output_dir=str(directory)))
    table = {
        line.split("|")[1].strip(): line for line in text.split("## Accuracy")[0].splitlines() if line.startswith("|")
    }
    assert table["step-int8"].count("**fail**") >= 5 and table["step-int4"].count("**fail**") == 6
    for name in ("exact", "leapquant-int8"):
        assert "fail" not in table[name] and table[name].split("|")[3].strip() == "pass", table[name]
    assert "parity (control)" in text and "parity" not in table["method"]
    assert all((directory / f"{name}.png").stat().st_size > 10_000 for name in ("accuracy_by_age", "difference"))


def test_a_run_resumes_and_regenerates(model_dir, tmp_path, monkeypatch):
    settings = suite.Settings(
        model_dir=str(model_dir), methods=("step-bf16",), num_streams=2, num_tokens=256, segment=64,
        output_dir=str(tmp_path / "run"), checkpoint_seconds=0,
    )  # fmt: skip
    run_segment, done = lockstep.Lockstep.run_segment, []

    def dies(self, progress, index, tick):
        if index == 2 and 2 not in done:
            done.append(index)
            raise KeyboardInterrupt
        done.append(index)
        return run_segment(self, progress, index, tick)

    monkeypatch.setattr(lockstep.Lockstep, "run_segment", dies)
    with pytest.raises(KeyboardInterrupt):
        suite.run(settings)
    text = suite.run(settings)
    assert done == [0, 1, 2, 2, 3]
    records = report.read_jsonl(tmp_path / "run" / "results.jsonl")[1:]
    assert {r["measure"] for r in records} >= {"task", "task_by_age", "suite", "quality", "state_error"}
    assert {r["verdict"] for r in records if r["measure"] == "task"} == {"not learned", "control"}
    assert {r.get("group") for r in records if r["measure"] == "quality"} == {streams.RECALL}

    monkeypatch.setattr(lockstep.Lockstep, "run_segment", None)
    assert suite.run(dataclasses.replace(settings, report_only=True)) == text
    with pytest.raises(SystemExit, match=r"^suite: .* holds another run, which differs in seed"):
        suite.run(dataclasses.replace(settings, seed=1))


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--num_streams must be at least 2, got 1"):
        suite.Settings(num_streams=1)
    with pytest.raises(SystemExit, match=r"^suite: there is no .*: run without --report_only first"):
        suite.run(suite.Settings(report_only=True, output_dir=str(tmp_path)))
