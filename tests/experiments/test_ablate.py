"""The ablation: its axes say what they mean, finished work is kept, and the report needs the saved results alone."""

import json

import jax
import numpy as np
import pytest

import leapquant_jax as lq
from experiments import ablate, ablate_report, ablation_axes, playback, report, toy_heads, traces
from experiments.ablation_axes import AXES, Point, leap
from tests.experiments.test_replay import some_trace

pytestmark = pytest.mark.usefixtures("fast_compilation")
POINTS = {axis: AXES[axis]() for axis in AXES}


def test_axes_are_those_of_the_paper():
    grid = {tuple(map(int, p.labels)) for p in POINTS["window_by_rank"]}
    assert grid == {(w, r) for w in (1, 4, 8, 16, 32) for r in (0, 1, 2, 4, 8, 16)}
    assert {p.labels for p in POINTS["records"]} >= {("8", d, "float16") for d in ("float32", "float16", "bfloat16")}
    assert len(POINTS["fits"]) == 7 and len(POINTS["rotation_and_clip"]) == 12
    # A name stands for one configuration: configurations are measured once, by name.
    methods = [method for points in POINTS.values() for p in points for method in (p.method, p.against) if method]
    assert len({method.name for method in methods}) == len(set(methods)) < 100


def test_equal_bytes_are_equal():
    sizes = dict(batch=1, num_heads=1, key_dim=128, value_dim=128)
    for point in POINTS["equal_bytes"]:
        state = jax.eval_shape(lambda method=point.method: method.init(**sizes))
        assert f"{point.method.state_bytes(state)['at_rest']:,}" == point.labels[0], point.labels


def test_the_named_methods_are_those_of_the_ablation():
    """All smooth with exponent 1; 6 bits clip; 4 bits clip and rotate."""
    for bits in (4, 6, 8):
        assert lq.get_method(f"leapquant-int{bits}").config == leap(bits, **ablation_axes.NAMED[bits]).config


def test_a_cold_fit_is_worse_than_a_warm_one():
    """One iteration from fixed directions at every fold, against one from the factors of the fold before."""
    tokens = toy_heads.ToyHead().tokens(2, 128, 0)
    rows = [traces.Row(0, "toy")] * 2
    single = [lq.Trace(*(x[i : i + 1] for x in tokens), dense=np.zeros((1, 1, 32, 32), np.float32)) for i in range(2)]
    batch = traces.TraceBatch.stack(rows, single)
    expected = playback.expectations(batch, 128)
    warm, cold = (
        playback.play(leap(rank=1, smoothing=0, refit_gain=0, fit=fit), batch, expected) for fit in ("subspace", "cold")
    )
    assert (warm.output_error < cold.output_error).all()


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """A run of three cheap methods on two axes, and one on short long heads."""
    step, bf16, fp8 = (lq.get_method(f"step-{name}") for name in ("int8", "bf16", "fp8"))
    monkeypatch.setitem(
        AXES, "parts", lambda: [Point("parts", ("8", "a"), step), Point("parts", ("8", "b"), bf16, step)]
    )
    monkeypatch.setitem(AXES, "rotation_and_clip", lambda: [Point("rotation_and_clip", ("8", "x", "y"), fp8, step)])
    monkeypatch.setattr(ablation_axes, "long_methods", lambda: [bf16])
    monkeypatch.setattr(ablate, "_BLOCK", 16)
    folder = tmp_path / "traces"
    folder.mkdir()
    for layer in (0, 2):
        traces.save_trace(folder, some_trace(layer, 31, layer), prompt="code", metadata={})
    return ablate.Settings(
        trace_dir=str(folder), axes=("parts", "rotation_and_clip"), long_tokens=64, output_dir=str(tmp_path / "run")
    )


def test_ablate_saves_resumes_and_regenerates(settings, tmp_path, monkeypatch):
    text = ablate.run(settings)
    header, rows, *records = report.read_jsonl(tmp_path / "run" / "results.jsonl")
    assert [row["layer"] for row in rows["rows"]] == [0, 2] and header["config"]["axes"] == list(settings.axes)
    errors = {r["name"]: r for r in records if r["measure"] == "errors"}
    assert set(errors) == {"step-int8", "step-bf16", "step-fp8"}
    assert all(np.shape(r["state_error"]) == np.shape(r["output_error"]) == (2, 2) for r in errors.values())
    assert "Parts, one by one" in text and "Heads that hardly forget" in text

    # From the saved results alone.
    made = [tmp_path / "run" / name for name in ("table.md", "parts.png", "rotation_and_clip.png", "long.png")]
    for file in made:
        file.unlink()
    played: list[str] = []
    monkeypatch.setattr(playback, "play", lambda method, *_: played.append(method.name) or pytest.fail())
    again = ablate.Settings(report_only=True, output_dir=settings.output_dir)
    assert ablate.run(again) == text and all(file.stat().st_size for file in made)

    # Of a run that was stopped, what is there, and what is not.
    saved = tmp_path / "run" / "results.jsonl"
    whole = saved.read_text()
    report.write_jsonl(
        saved, [r for r in report.read_jsonl(saved) if r.get("name") != "step-fp8" or r["measure"] == "point"]
    )
    assert "Not run, because the run was stopped before: rotation_and_clip 8, x, y." in ablate.run(again)
    saved.write_text(whole)

    # A finished configuration is not measured again; a lost one is, a damaged one is named.
    assert ablate.run(settings) == text and not played
    lost = tmp_path / "run" / "items" / "traces_step-fp8.json"
    lost.unlink()
    with pytest.raises(pytest.fail.Exception):
        ablate.run(settings)
    assert played == ["step-fp8"]
    lost.write_text("[{")
    with pytest.raises(ValueError, match=r"traces_step-fp8\.json is damaged: delete it"):
        ablate.run(settings)


def test_divergence():
    """Beyond 100 %, or still growing; a plateau below it is none."""
    assert ablate_report.diverges(np.linspace(0, 1.2, 10)) and ablate_report.diverges(np.linspace(0, 0.9, 10))
    assert ablate_report.diverges(np.array([0.1, 0.2, np.nan])) and not ablate_report.diverges(np.full(10, 0.57))
    assert not ablate_report.diverges(np.linspace(0, 0.01, 10))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"axes": ("tea",)}, "--axes must name some of parts"),
        ({"axes": ()}, "--axes must name some of parts"),
        ({"num_tokens": -1}, "--num_tokens must not be negative"),
        ({"long_tokens": -1}, "--long_tokens must not be negative"),
    ],
)
def test_bad_settings(changes, match):
    with pytest.raises(ValueError, match=match):
        ablate.Settings(**changes)


def test_report_without_results(tmp_path):
    with pytest.raises(FileNotFoundError, match="run without --report_only first"):
        ablate.run(ablate.Settings(report_only=True, output_dir=str(tmp_path)))
    assert json.dumps(vars(ablate.Settings()))  # the run's configuration is plain JSON
