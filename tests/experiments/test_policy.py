"""The policy experiment: what the committed results say, the program on a small trace, bad input."""

from pathlib import Path

import numpy as np
import pytest

import leapquant_jax as lq
from experiments import policy, policy_study, report

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "policy"
TRACES = ROOT / "tests" / "data" / "traces"
CANDIDATES = (
    lq.LeapConfig(bits=None, boundary_dtype="float16", rank=0, smoothing=0), lq.LeapConfig(bits=4, rank=0, clip="mse"),
)  # fmt: skip


def records(name, **fields):
    found = report.read_jsonl(RESULTS / name / "results.jsonl")
    return [r for r in found if all(r.get(key) == value for key, value in fields.items())]


def test_the_deepest_layer_of_note_4():
    """Compensators gain little in layer 30 and 15 times in layer 0; the plan fixes layer 30 at no more bytes."""
    errors = {(r["config"], r["layer"]): r["error"] for r in records("note4", measure="candidate")}
    assert errors["8b r4", 30] > 0.8 * errors["8b r0", 30] and 15 * errors["8b r4", 0] < errors["8b r0", 0]
    method, by_layer, by_head = records("note4", measure="plan", budget="leapquant-int8")
    assert by_layer["at_rest"] <= method["at_rest"] >= by_head["at_rest"]
    deepest = {choice["layer"]: choice["error"] for choice in by_layer["choices"]}
    assert deepest[30] < 0.05 * errors["8b r4", 30] and deepest[0] < 1.05 * errors["8b r4", 0]
    assert by_head["error"] < by_layer["error"] < method["error"]


def test_the_trained_model():
    """Its three layers are alike, so that plans by layer are the methods; by head they are better, also on new prompts."""
    for budget in ("leapquant-int8", "leapquant-int6", "leapquant-int4"):
        method, by_layer, by_head = records("tiny-hybrid", measure="plan", budget=budget)
        assert by_layer["at_rest"] <= method["at_rest"] >= by_head["at_rest"]
        assert by_layer["error"] <= method["error"] and by_head["error"] < 0.85 * method["error"]
    unseen = records("tiny-hybrid", measure="held_out", by="head")
    assert len(unseen) == 9 and all(r["error"] < r["method_error"] for r in unseen)


def test_committed_policies_load():
    files = [path for path in RESULTS.glob("*/*.json") if path.name != "run.json"]
    assert len(files) == 12  # two studies, three budgets, by layer and by head
    for path in files:
        loaded = lq.Policy.load(path)
        assert loaded.title == path.stem and all(choice.head_errors for choice in loaded.layers)


def test_the_program(tmp_path, monkeypatch):
    monkeypatch.setattr(lq, "default_candidates", lambda key_dim, value_dim: CANDIDATES)
    settings = policy.Settings(
        trace_dir=str(TRACES), budgets=("window-bf16",), num_tokens=64, output_dir=str(tmp_path / "run")
    )
    text = policy.run(settings)
    assert text == (tmp_path / "run" / "table.md").read_text() and "planned by head" in text
    assert (tmp_path / "run" / "frontier.png").stat().st_size > 10_000
    saved = lq.Policy.load(tmp_path / "run" / "window-bf16-by-head.json")
    assert saved.layers[0].layer == 2 and saved.title == "window-bf16-by-head"


def test_prompts_count_alike():
    one = lq.Measurements(CANDIDATES, {0: np.array([[0.1], [0.2]])}, {0: {}}, "output")
    other = lq.Measurements(CANDIDATES, {0: np.array([[0.3], [0.2]])}, {0: {}}, "output")
    np.testing.assert_allclose(policy_study._together([one, other]).errors[0], [[0.2], [0.2]])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_tokens": 0}, "--num_tokens must be at least 1"),
        ({"budgets": ()}, "--budgets must name at least one method"),
        ({"budgets": ("step-int8",)}, "--budgets takes methods with a window"),
        ({"budgets": ("leapquant-int7",)}, "unknown method"),
    ],
)
def test_bad_settings(changes, match):
    with pytest.raises(ValueError, match=match):
        policy.Settings(**changes)


def test_no_traces(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no traces"):
        policy.run(policy.Settings(trace_dir=str(tmp_path), output_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
