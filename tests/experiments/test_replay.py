"""Record and replay: traces are what the layer used, damage is named, and a broken method is caught."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import leapquant_jax as lq
from experiments import accuracy, playback, probes, prompts, record, recorder, replay, report, traces
from experiments.tokenization import ByteTokenizer
from models import qwen35
from tests.library import helpers as hp

pytestmark = pytest.mark.usefixtures("fast_compilation")
DATA = Path(__file__).resolve().parents[1] / "data" / "traces"
SMALL = lq.LeapConfig(window=4, rank=1)
WIDE, NARROW = (lq.LeapConfig(window=4, rank=0, smoothing=0, bits=bits) for bits in (8, 4))


@pytest.fixture(scope="module")
def recurrent_model(tmp_path_factory):
    """A random model of two recurrent layers, each of 2 key heads and 4 value heads."""
    config = qwen35.Config(
        vocab_size=264, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=8, layer_types=("linear_attention",) * 2, tie_word_embeddings=True,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("model")
    qwen35.save_pretrained(config, qwen35.from_config(config, jax.random.key(0, impl="unsafe_rbg")), directory)
    return directory


def some_trace(seed=0, T=31, layer=0):
    tokens = hp.tokens(seed, B=1, T=T, G=1, H=2, K=8, V=6)
    dense = np.random.default_rng(seed).standard_normal((1, 2, 8, 6)).astype(np.float32)
    return lq.Trace(*map(jnp.asarray, tokens), dense=jnp.asarray(dense), layer=layer)


def test_recorded_inputs_give_the_models_own_states(recurrent_model, tmp_path):
    """Replayed by the exact recurrence from the middle of a prompt, every trace ends in the model's state."""
    settings = record.Settings(
        model_dir=str(recurrent_model), prompts=("prose", "code"), skip_tokens=64, num_tokens=64,
        output_dir=str(tmp_path / "traces"),
    )  # fmt: skip
    files = record.run(settings)
    assert [f.stem for f in files] == [f"layer{i:02d}-{kind}" for i in (0, 1) for kind in ("prose", "code")]

    config, model = qwen35.from_pretrained(recurrent_model, dtype="float32")
    tokens = prompts.make_prompts(("prose", "code"), 128, ByteTokenizer())
    cache = qwen35.init_cache(config, batch=2)
    for part in (tokens[:, :64], tokens[:, 64:]):
        _, cache = qwen35.prefill(model, jnp.asarray(part), cache, last_only=True)
    for index, file in enumerate(files):
        trace, document = traces.load_trace(file)
        assert trace.dense.any() and trace.q.shape == (1, 64, 2, 16)
        assert document["skipped_tokens"] == 64 and document["versions"]["jax"] and len(document["model_sha256"]) == 64
        replayed, _ = hp.exact_decode(trace.dense, *trace.tokens)
        own = qwen35.recurrent_states(cache)[document["layer"]][index % 2]
        assert hp.relative(replayed[0], own) < 1e-6

    one = recorder.select_heads(trace, [1])
    lq.check_trace(one)
    np.testing.assert_array_equal(one.v, trace.v[:, :, 2:])  # the value heads of key head 1
    np.testing.assert_array_equal(one.dense, trace.dense[:, 2:])
    for changes, match in (
        ({"layers": ("2",)}, "--layers must be auto or some of 0, 1"),
        ({"key_heads": ("2",)}, "--key_heads must be all or some of 0 to 1"),
        ({"prompts": ("poetry",)}, "--prompts must name some of prose, code, recall"),
        ({"num_tokens": 65}, "holds another run, which differs in num_tokens"),
        ({"model_dir": str(tmp_path)}, "holds no config.json"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=match):
            record.run(dataclasses.replace(settings, **changes))


def test_recording_changes_nothing():
    """The recorder's state is its method's, bit for bit, and it keeps exactly what it was fed."""
    exact = lq.get_method("exact")
    tokens = tuple(map(jnp.asarray, hp.tokens(0)))

    def run(method):
        return jax.jit(lambda *tokens: method.decode(method.init(**hp.sizes(tokens)), *tokens))(*tokens)

    (state, outs), (recorded, same) = run(exact), run(recorder.Recorder(exact))
    hp.assert_bit_equal((state, outs), (recorded.state, same))
    hp.assert_bit_equal(recorded.tokens, tokens)


def test_prompts_of_the_three_kinds():
    """Code parses, prose does not, and no held-out file is in both."""
    code, prose = prompts.documents("code").tobytes(), prompts.documents("prose").tobytes()
    assert b"\nimport " in code and b"Heaven" in prose and b"Heaven" not in code
    tokens = prompts.make_prompts(prompts.KINDS, 4096, ByteTokenizer())
    assert tokens.shape == (3, 4096) and (tokens[:, 0] == 256).all()
    with pytest.raises(ValueError, match="--prompts must name some of"):
        prompts.make_prompts(("poetry",), 64, ByteTokenizer())


def test_round_trip_and_damage(tmp_path):
    trace = some_trace(layer=3)
    path = traces.save_trace(tmp_path, trace, prompt="code", metadata={"model_sha256": "0"})
    loaded, document = traces.load_trace(path)
    hp.assert_bit_equal(loaded, trace)
    assert document["layer"] == 3 and document["model_sha256"] == "0"

    good = {file: file.read_bytes() for file in tmp_path.iterdir()}
    tensors, description = load_file(path), path.with_suffix(".json")

    def refused(match, error=ValueError):
        with pytest.raises(error, match=match):
            traces.load_trace(path)
        for file, data in good.items():
            file.write_bytes(data)

    path.write_bytes(good[path][:-20])
    refused("not a complete safetensors file")
    path.write_bytes(good[path][:-1] + b"\0")
    refused("SHA-256 differs")
    save_file({name: x for name, x in tensors.items() if name != "beta"}, path)
    refused("missing tensors: beta; unknown tensors: none")
    save_file({**tensors, "z": tensors["q"]}, path)
    refused("missing tensors: none; unknown tensors: z")
    path.unlink()
    refused("missing checkpoint file", FileNotFoundError)
    description.unlink()
    refused("missing checkpoint file", FileNotFoundError)
    description.write_text(description.read_text()[:50])
    refused("not valid JSON")
    description.write_text(json.dumps({"format": "leapquant trace 0"}))
    refused("does not describe a trace of this version")
    description.write_text(json.dumps({"format": document["format"], "layer": 3}))
    refused("lacks prompt, sha256")

    wrong = dataclasses.replace(trace, v=trace.v[:, :-1])
    with pytest.raises(ValueError, match="v has shape"):
        traces.save_trace(tmp_path, wrong, prompt="code", metadata={})
    large = dataclasses.replace(trace, v=trace.v * 1e6)
    with pytest.raises(ValueError, match=r"v reaches .* which float16 cannot hold"):
        traces.save_trace(tmp_path, large, prompt="code", metadata={}, storage="float16")
    with pytest.raises(FileNotFoundError, match=r"holds no traces: make some with python -m experiments\.record"):
        traces.load_batches(tmp_path / "none")


def test_rows_of_a_batch_are_the_single_traces():
    """Traces of different lengths share a batch, and blocks that end one token before a window are no other run."""
    several = [some_trace(seed, T) for seed, T in ((0, 31), (1, 20))]
    rows = [traces.Row(0, "code"), traces.Row(1, "prose")]
    batch = traces.TraceBatch.stack(rows, several)
    method = lq.get_method("step-int8")
    played = playback.play(method, batch, playback.expectations(batch, 16))
    assert list(played.positions) == [15, 31]
    for row, trace in enumerate(several):
        state, outs = jax.jit(lambda *x: method.decode(method.init(dense=x[0], **trace.sizes), *x[1:]))(  # noqa: B023
            trace.dense, *trace.tokens
        )
        exact, exact_outs = hp.exact_decode(trace.dense, *trace.tokens)
        for head in range(2):
            state_error = hp.relative(method.dense_state(state)[0, head], exact[0, head])
            output_error = hp.relative(outs[0, :, head], exact_outs[0, :, head])
            np.testing.assert_allclose(played.errors.state[-1, row, head], state_error, rtol=1e-3)
            np.testing.assert_allclose(played.output_error[row, head], output_error, rtol=1e-3)
    with pytest.raises(ValueError, match="stack equal ones"):
        other = dataclasses.replace(several[0], v=several[0].v[..., :3], dense=several[0].dense[..., :3])
        traces.TraceBatch.stack(rows, [several[0], other])


@dataclasses.dataclass(frozen=True)
class Wrong(lq.ExactMethod):
    """A method with two mistakes: its outputs are 0.1 % off what its state gives, and it hides a byte."""

    def decode(self, state, *tokens, active=None, implementation=None):
        state, outs = super().decode(state, *tokens, active=active, implementation=implementation)
        return state, outs * jnp.float32(1.001)

    def state_bytes(self, state):
        sizes = super().state_bytes(state)
        return sizes | {"total": sizes["total"] - 1}


@pytest.fixture
def trace_dir(tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    for layer, prompt, seed in ((0, "code", 0), (0, "prose", 1), (2, "code", 2)):
        traces.save_trace(folder, some_trace(seed, 31, layer), prompt=prompt, metadata={})
    return folder


def test_replay_reports_checks_resumes_and_regenerates(trace_dir, tmp_path, monkeypatch):
    settings = replay.Settings(trace_dir=str(trace_dir), block=8, output_dir=str(tmp_path / "run"))
    methods = [lq.LeapMethod(SMALL, "leapquant-int8"), lq.get_method("step-int8")]
    text, passed = replay.run(settings, methods)
    assert passed and "FAIL" not in text
    _, *records = report.read_jsonl(tmp_path / "run" / "results.jsonl")
    leap = [r for r in records if r["measure"] == "trace" and r["method"] == "leapquant-int8"]
    assert [(r["layer"], r["prompt"]) for r in leap] == [(0, "code"), (0, "prose"), (2, "code")]
    for r in leap:
        assert r["positions"][-1] == r["tokens"] == 31 and len(r["state_error"]) == 2
        assert 0 < max(r["state_error"]) < 0.1 and max(map(abs, r["energy_gain_per_fold"])) < 0.05
        assert set(r["peak_over_median"]) == {"nothing", "compensators", "smoothing"}
    names = {r["check"] for r in records if r["measure"] == "check" and r["method"] == "leapquant-int8"}
    assert names == {"finite", "bytes", "eq. 10", "half step"}

    # Tables and figures come from the saved results alone, and a finished item is not computed again.
    figures = [tmp_path / "run" / f"{name}.png" for name in ("error_by_position", "heads")]
    for file in (*figures, tmp_path / "run" / "table.md"):
        file.unlink()
    monkeypatch.setattr(playback, "play", None)
    assert replay.run(settings, methods) == (text, True) and all(file.stat().st_size for file in figures)
    with pytest.raises(ValueError, match="differs in block"):
        replay.run(dataclasses.replace(settings, block=16), methods)


@pytest.fixture
def policy_file(tmp_path):
    """Layer 0 holds its second head at 4 bits and the first at 8, layer 2 both at 4."""
    layers = (
        lq.LayerChoice(layer=0, groups=(lq.HeadGroup(NARROW, (1,)), lq.HeadGroup(WIDE, (0,)))),
        lq.LayerChoice(layer=2, groups=(lq.HeadGroup(NARROW),)),
    )
    lq.Policy(layers, title="leapquant-by-head").save(tmp_path / "policy.json")
    return tmp_path / "policy.json"


def test_a_policy_is_one_method_made_of_those_of_its_layers(trace_dir, policy_file, tmp_path, monkeypatch):
    """Every head of every trace reads as under the named method that it is stored by."""
    policy = lq.Policy.load(policy_file)
    methods = [lq.LeapMethod(WIDE, "wide"), lq.LeapMethod(NARROW, "narrow"), policy]
    settings = replay.Settings(trace_dir=str(trace_dir), block=8, output_dir=str(tmp_path / "run"))
    text, passed = replay.run(settings, methods)
    assert passed
    _, *records = report.read_jsonl(tmp_path / "run" / "results.jsonl")

    def found(measure, method):
        return [r for r in records if r["measure"] == measure and r["method"] == method]

    wide, narrow, mixed = (found("trace", method.name) for method in methods)
    assert [(r["layer"], r["prompt"]) for r in mixed] == [(0, "code"), (0, "prose"), (2, "code")]
    errors = [f"{kind}_error{by}" for kind in ("state", "output") for by in ("", "_by_position")]
    for row, played in enumerate(mixed):
        assert played["positions"] == wide[row]["positions"]
        for field in (*errors, "energy_gain_per_fold"):
            named = (narrow if played["layer"] else wide)[row], narrow[row]  # what stores head 0, and head 1
            expected = [np.asarray(one[field])[..., head] for head, one in enumerate(named)]
            # Energies are small differences of sums, which a program for other heads adds up in another order.
            np.testing.assert_allclose(played[field], np.stack(expected, axis=-1), rtol=2e-3, atol=1e-5, err_msg=field)
    assert not mixed[0]["peak_over_median"] and mixed[2]["peak_over_median"] == narrow[2]["peak_over_median"]

    (sizes,) = found("bytes_per_element", policy.name)
    (of_wide,), (of_narrow,) = (found("bytes_per_element", name) for name in ("wide", "narrow"))
    np.testing.assert_allclose(sizes["at_rest"], (of_wide["at_rest"] + 2 * of_narrow["at_rest"]) / 3)  # 2 of 6 heads
    assert {r["check"] for r in found("check", policy.name)} == {"finite", "bytes", "eq. 10", "half step"}
    headline, *others = (line for line in text.splitlines() if line.startswith(f"| {policy.name} "))
    assert f" {sizes['at_rest']:.4g} " in headline and headline.rstrip(" |").endswith("%")  # the energy of a fold
    assert len(others) == 4  # both errors, the flatness of layer 2, the checks

    # A finished item is not computed again; a policy of the same title that stores something else is another run.
    monkeypatch.setattr(playback, "play", None)
    assert replay.run(settings, methods) == (text, True)
    other = dataclasses.replace(policy, layers=(policy.layers[0], dataclasses.replace(policy.layers[0], layer=2)))
    with pytest.raises(ValueError, match="differs in methods"):
        replay.run(settings, [*methods[:2], other])


def test_policies_are_named_by_file(trace_dir, policy_file, tmp_path):
    """As in experiments.accuracy: beside the names of methods, each once, however often it is named."""
    names = (str(policy_file), "step-int8", str(policy_file))
    assert accuracy.chosen_methods(names)[1:] == [lq.get_method("step-int8"), lq.Policy.load(policy_file)]
    with pytest.raises(FileNotFoundError):
        accuracy.chosen_methods([str(tmp_path / "none.json")])
    settings = replay.Settings(
        trace_dir=str(trace_dir), methods=names, block=8, num_tokens=15, output_dir=str(tmp_path / "run")
    )
    text, passed = replay.run(settings)
    assert passed and "| step-int8" in text and "| leapquant-by-head-" in text


def test_what_does_not_fit_the_traces_is_refused_before_any_work(trace_dir, policy_file, tmp_path):
    policy = lq.Policy.load(policy_file)
    three = lq.LayerChoice(layer=0, groups=tuple(lq.HeadGroup(SMALL, (head,)) for head in range(3)))
    wrong_dims, wrong_window = (dataclasses.replace(SMALL, **change) for change in ({"rank": 6}, {"window": 16}))
    settings = replay.Settings(trace_dir=str(trace_dir), block=8, output_dir=str(tmp_path / "run"))
    for method, match in (
        (lq.Policy.of({0: SMALL}), r"policy-\w{8}: .* no choice for layer 2, only for \[0\]: plan it from traces"),
        (lq.Policy((three,), SMALL), "names 3 heads of layer 0, the traces have 2: record the heads .*--key_heads"),
        (lq.Policy.of({0: SMALL}, wrong_dims), r"does not fit the traces, .* rank \(6\) must be below"),
        (lq.Policy.of({0: SMALL}, wrong_window), "--block 8 must be a multiple of the window of policy-"),
        (lq.LeapMethod(wrong_window, "wrong"), "--block 8 must be a multiple of the window of wrong"),
    ):
        with pytest.raises(ValueError, match=match):
            replay.run(settings, [policy, method])
    assert not (tmp_path / "run").exists()


def test_a_broken_method_fails_its_checks(trace_dir, tmp_path):
    settings = replay.Settings(trace_dir=str(trace_dir), block=8, output_dir=str(tmp_path / "run"))
    text, passed = replay.run(settings, [Wrong("wrong"), lq.get_method("step-bf16")])
    _, *records = report.read_jsonl(tmp_path / "run" / "results.jsonl")
    failed = {r["check"] for r in records if r["measure"] == "check" and not r["passed"]}
    assert not passed and failed == {"eq. 10", "bytes"} and text.count("FAIL") == 2


def test_main_exits_with_1_when_a_check_fails(monkeypatch, capsys):
    monkeypatch.setattr(replay, "start", lambda *_: replay.Settings(compilation_cache=""))
    monkeypatch.setattr(replay, "run", lambda _: ("the table", False))
    with pytest.raises(SystemExit) as stop:
        replay.main(["replay"])
    assert stop.value.code == 1 and "a check failed" in capsys.readouterr().err


def test_what_cannot_run_is_said():
    batch = traces.TraceBatch.stack([traces.Row(0, "code")], [some_trace(T=7)])
    expected = playback.expectations(batch, 8)
    (found,) = replay.replay_one(lq.get_method("step-int8"), "mosaic_gpu", batch, expected)
    assert found["measure"] == "skipped" and "no Mosaic GPU kernel" in found["reason"]


@pytest.mark.parametrize("options", [{}, {"rotation": "hadamard", "bits": 4, "clip": "mse"}], ids=["plain", "beyond"])
def test_half_step_bound_finds_a_code_that_is_one_off(options):
    """The check is sharp: a code of one head, moved by one, exceeds the bound, whichever it is."""
    config = dataclasses.replace(SMALL, **options)
    dense = some_trace(5).dense
    folded = hp.init_from(config, dense, **some_trace(5).sizes)
    share = jax.jit(lambda folded: probes.half_step_share(config, folded, dense, dense))
    assert (np.asarray(share(folded)) <= 1.001).all()
    values, keys = folded.codes.shape[2:]
    found = []
    for v, k in itertools.product(range(values), range(keys)):
        codes = folded.codes.at[0, 1, v, k].add(-1 if folded.codes[0, 1, v, k] > 0 else 1)
        untouched, moved = np.asarray(share(dataclasses.replace(folded, codes=codes)))[0]
        assert untouched <= 1.001
        found.append(moved > 1.001)
    # Beside a clipped scale there may be another that explains all codes, moved one included: then none is wrong.
    assert np.mean(found) == 1 if config.clip is None else np.mean(found) > 0.8


def test_the_committed_trace_replays():
    """It starts inside a prompt, from a state that is not empty; 8 bits follow it."""
    (batch,), _ = traces.load_batches(DATA)
    assert (batch.trace.sizes["key_dim"], batch.trace.sizes["value_dim"]) == (128, 128) and batch.trace.dense.any()
    played = playback.play(lq.get_method("window-int8"), batch, playback.expectations(batch, 64))
    assert played.positions[-1] == 191 and played.errors.finite.all()
    assert 0 < played.errors.state[-1].max() < 0.1 and 0 < played.output_error.max() < 0.05
    assert np.asarray(played.errors.read).max() < replay.READ_LIMIT
