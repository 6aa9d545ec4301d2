"""Policies: planning under a budget, the deepest-layer case, files, and layers whose heads are stored differently."""

import dataclasses
import functools
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import leapquant_jax as lq
from leapquant_jax.measure import head_errors
from tests.library import helpers, oracle

SIZE = 32  # key and value dim of the synthetic heads
BEST = {"rotation": "hadamard", "clip": "mse"}
PLAIN = lq.LeapConfig(bits=None, boundary_dtype="float16", rank=0, smoothing=0)
EIGHT, WIDE, SIX, FOUR = (
    lq.LeapConfig(rank=2), lq.LeapConfig(rank=0, **BEST), lq.LeapConfig(bits=6, rank=2, **BEST),
    lq.LeapConfig(bits=4, rank=2, **BEST),
)  # fmt: skip
CANDIDATES = (EIGHT, WIDE, SIX, FOUR, PLAIN)
pytestmark = pytest.mark.usefixtures("fast_compilation")
AT_REST = (1536, 1280, 1280, 1024, 2048)  # bytes of a head


def trace(layer, ranks, seed=0, T=512):
    """A layer with a head per entry: keys and values from a subspace of that dimension (SIZE is a flat spectrum)."""
    rng = np.random.default_rng([layer, seed])
    draw = rng.standard_normal
    q, k, v = (
        np.stack([draw((T, rank)) @ (draw((rank, SIZE)) if rank < SIZE else np.eye(SIZE)) for rank in ranks], axis=1)[
            None
        ]
        for _ in range(3)
    )
    q, k = oracle.l2norm(q) / math.sqrt(SIZE), oracle.l2norm(k)
    g = np.full((1, T, len(ranks)), math.log(0.999))
    arrays = (q, k, v, g, rng.uniform(0.05, 0.15, g.shape))
    dense = jnp.zeros((1, len(ranks), SIZE, SIZE), jnp.float32)
    return lq.Trace(*(jnp.asarray(x, jnp.float32) for x in arrays), dense=dense, layer=layer)


@pytest.fixture(scope="module")
def note_4(fast_compilation):
    """Layers as in note 4: compensators hold all of layer 0, and barely help in layer 30. Layer 15 has one head of each."""
    traces = [trace(0, (2, 2)), trace(15, (2, SIZE)), trace(30, (SIZE, SIZE))]
    return lq.measure_candidates(traces, CANDIDATES, measure="output")


def only(measured, *layers):
    return dataclasses.replace(measured, errors={layer: measured.errors[layer] for layer in layers})


def stored(policy):
    return [choice.groups[0].config for choice in policy.layers]


def test_the_deepest_layer_of_note_4(note_4):
    """At no more bytes than LeapQuant in both layers and a low-rank one, the deepest layer's error falls 5 times."""
    measured = dataclasses.replace(note_4, errors={0: note_4.errors[0], 1: note_4.errors[0], 30: note_4.errors[30]},
                                   sizes={0: note_4.sizes[0], 1: note_4.sizes[0], 30: note_4.sizes[30]})  # fmt: skip
    first, deepest = (np.sqrt(note_4.errors[layer].mean(axis=1)) for layer in (0, 30))
    assert deepest[0] > 0.8 * deepest[1] and first[1] > 10 * first[0]  # the case: compensators help layer 0 alone
    policy = lq.plan(measured, measured.bytes_of("leapquant-int8")["at_rest"])
    limit = measured.bytes_of("leapquant-int8")["at_rest"]
    plans = itertools.product(range(len(CANDIDATES)), repeat=3)
    affordable = [p for p in plans if sum(2 * AT_REST[c] for c in p) <= limit]
    total = {
        p: sum(measured.errors[layer][c].sum() for layer, c in zip((0, 1, 30), p, strict=True)) for p in affordable
    }
    best = min(total, key=lambda p: total[p])
    assert stored(policy) == [CANDIDATES[c] for c in best] and stored(policy)[2] == PLAIN
    assert sum(choice.at_rest for choice in policy.layers) <= measured.bytes_of("leapquant-int8")["at_rest"]
    assert policy.layers[2].error < 0.2 * deepest[0]
    for choice in policy.layers:
        assert choice.error < 1.5 * np.sqrt(measured.errors[choice.layer][0].mean())


def test_bits_or_compensators_at_equal_bytes(note_4):
    """8 bits alone against 6 bits with compensators: each layer gets what suits it, and the other would be far worse."""
    measured = only(note_4, 0, 30).only([WIDE, SIX])
    assert AT_REST[CANDIDATES.index(WIDE)] == AT_REST[CANDIDATES.index(SIX)] == 1280
    assert stored(lq.plan(measured, 4 * 1280)) == [SIX, WIDE]
    errors = {layer: np.sqrt(error[:, 0]) for layer, error in measured.errors.items()}
    assert errors[0][0] > 10 * errors[0][1] and errors[30][1] > 2 * errors[30][0]


def test_a_plan_is_the_best_of_all(note_4):
    """Every budget against trying every combination: the error is the least, and no byte is spent for nothing."""
    squared = [error.sum(axis=1) for error in note_4.errors.values()]
    options = [
        (2 * sum(AT_REST[c] for c in combination), sum(e[c] for e, c in zip(squared, combination, strict=True)))
        for combination in itertools.product(range(len(CANDIDATES)), repeat=3)
    ]
    for limit in range(6 * min(AT_REST), 6 * max(AT_REST) + 999, 777):
        policy = lq.plan(note_4, limit)
        found = (sum(c.at_rest for c in policy.layers), sum(2 * c.error**2 for c in policy.layers))
        least = min(error for size, error in options if size <= limit)
        assert found[1] == pytest.approx(least, rel=1e-9)
        assert found[0] == min(size for size, error in options if error <= least * (1 + 1e-9))
        again = lq.plan(note_4, math.sqrt(found[1] / 6) * (1 + 1e-9))  # as an error budget
        assert sum(c.at_rest for c in again.layers) == found[0]


def test_heads_by_themselves(note_4):
    """A layer with a low-rank and a flat head: planned by head it is better at the same bytes."""
    measured = only(note_4, 15).only([EIGHT, FOUR, PLAIN])
    budget = AT_REST[3] + AT_REST[4]
    by_layer, by_head = (lq.plan(measured, budget, by=by) for by in ("layer", "head"))
    (choice,) = by_head.layers
    np.testing.assert_allclose(np.sqrt(measured.squared_errors(choice)), choice.head_errors)
    assert choice.at_rest == budget and choice.error < 0.4 * by_layer.layers[0].error
    assert {group.heads: group.config for group in choice.groups} == {(0,): FOUR, (1,): PLAIN}
    worst, by_layer = (lq.plan(measured, lq.Budget(worst_head=0.003), by=by).layers[0] for by in ("head", "layer"))
    assert max(worst.head_errors) <= 0.003 and worst.at_rest < by_layer.at_rest


def test_no_head_worse(note_4):
    """The error as a whole may fall while a head's rises; the guard forbids that."""
    limit = 10240
    free, guarded = (lq.plan(note_4, lq.Budget(bytes=limit, no_worse_than=x)) for x in (None, EIGHT))
    before = {layer: np.sqrt(error[0]) for layer, error in note_4.errors.items()}
    assert any((np.array(c.head_errors) > before[c.layer]).any() for c in free.layers)
    assert all((np.array(c.head_errors) <= before[c.layer]).all() for c in guarded.layers)
    one = trace(7, (2, 2), T=64)
    guard = lq.LeapConfig(rank=0, smoothing=0)
    named = lq.plan_policy([one], lq.Budget(bytes=3000, no_worse_than=guard), candidates=(PLAIN,))  # too large
    assert stored(named) == [guard]  # which was added


def test_active_bytes(note_4):
    """A budget of total bytes counts the ring too."""
    limit = note_4.bytes_of("leapquant-int8")["total"]
    policy = lq.plan(note_4, lq.Budget(bytes=limit, count="total"))
    assert note_4.bytes_of("leapquant-int8")["at_rest"] < sum(c.total for c in policy.layers) <= limit


def test_prompts_and_lengths():
    """Prompts of one layer are averaged, whatever their lengths; a diverging candidate is never chosen."""
    traces = [trace(0, (2, 2), seed, T) for seed, T in ((0, 128), (1, 128), (2, 64))]
    together = lq.measure_candidates(traces, (PLAIN,)).errors[0]  # of the detail, the default
    pair, single = (lq.measure_candidates(some, (PLAIN,)).errors[0] for some in (traces[:2], traces[2:]))
    np.testing.assert_allclose(together, (2 * pair + single) / 3, rtol=1e-5)
    huge = dataclasses.replace(traces[2], dense=traces[2].dense + jnp.float32(1e6))  # beyond fp16
    measured = lq.measure_candidates([huge], (PLAIN,))
    assert (measured.errors[0] == np.inf).all()
    with pytest.raises(ValueError, match="no candidate has a finite error"):
        lq.plan(measured, 10**9)
    other = dataclasses.replace(measured, candidates=(PLAIN, WIDE), errors={0: np.array([[np.inf] * 2, [0.1] * 2])})
    assert stored(lq.plan(other, 10**9)) == [WIDE]


def test_errors_are_what_they_say():
    """Against NumPy: outputs and states of one trace, and the output's energy outside four directions."""
    one = trace(1, (SIZE, 2), T=128)
    found = head_errors(PLAIN, one)
    state, outs = helpers.decode(PLAIN, lq.init_state(PLAIN, **one.sizes), *one.tokens)
    dense, truth = helpers.exact_decode(one.dense, *one.tokens)
    noise, power = (np.sum(np.asarray(x, np.float64) ** 2, axis=(1, 3)) for x in (outs - truth, truth))
    np.testing.assert_allclose(found.output, np.sqrt(noise / power), rtol=1e-3)
    np.testing.assert_allclose(
        found.final[0, 0], helpers.relative(lq.dense_state(PLAIN, state)[0, 0], dense[0, 0]), rtol=1e-3
    )
    energies = np.linalg.svd(np.asarray(truth, np.float64)[0, :, 0], compute_uv=False) ** 2
    np.testing.assert_allclose(found.detail[0, 0], np.sqrt(noise[0, 0] / energies[4:].sum()), rtol=1e-3)
    np.testing.assert_allclose(
        found.detail[0, 1] / found.output[0, 1], 1000**0.5, rtol=1e-3
    )  # of rank 2: no detail at all


def test_plan_policy_is_both_steps():
    one = trace(7, (2, 2), T=64)
    policy = lq.plan_policy([one], 10**6, candidates=(PLAIN,), measure="state", default=EIGHT)
    assert stored(policy) == [PLAIN] and policy.measure == "state" and policy.method(8).config == EIGHT
    state = lq.init_state(PLAIN, **one.sizes)
    sizes = lq.state_bytes(PLAIN, state)
    assert (policy.layers[0].at_rest, policy.layers[0].total) == (sizes["at_rest"], sizes["total"])


def test_default_candidates():
    """They fit the head, cost what the documentation says, and hold the methods that have a name."""
    of_qwen = lq.default_candidates(128, 128)
    sizes = [
        lq.state_bytes(
            c, jax.eval_shape(lambda c=c: lq.init_state(c, batch=1, num_heads=1, key_dim=128, value_dim=128))
        )
        for c in of_qwen
    ]
    assert min(s["at_rest"] for s in sizes) == 11264 and max(s["at_rest"] for s in sizes) == 32768
    named = {getattr(lq.get_method(f"leapquant-int{bits}"), "config") for bits in (8, 6, 4)}  # noqa: B009
    assert named <= set(of_qwen) and len(of_qwen) <= 12
    quantized = [c for c in of_qwen if c.bits is not None]  # not offered: what loses recall at a smaller error
    assert all(c.smoothing == 1 and (c.bits == 4 or c.rotation is None) for c in quantized)
    for config in lq.default_candidates(12, 5):
        config.check_dims(12, 5)


def mixed_policy():
    groups = (lq.HeadGroup(FOUR, (0, 2)), lq.HeadGroup(PLAIN, (1, 3)))
    return lq.Policy(
        (
            lq.LayerChoice(layer=0, groups=(lq.HeadGroup(EIGHT),), at_rest=10, total=20, head_errors=(0.1, 0.25)),
            lq.LayerChoice(layer=2, groups=groups),
        ),
        default=WIDE,
    )


def test_saved_and_loaded(tmp_path):
    policy = mixed_policy()
    policy.save(tmp_path / "policy.json")
    again = lq.Policy.load(tmp_path / "policy.json")
    assert again == policy and hash(again) == hash(policy) and again.name == policy.name
    assert policy.layers[0].worst_head == 1 and math.isnan(policy.layers[1].error)
    assert policy.name != dataclasses.replace(policy, default=None).name
    assert [p.name for p in tmp_path.iterdir()] == ["policy.json"]


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda f: f.pop("format"), "no policy: expected an object"),
        (lambda f: f.update(version=2), "policy of version 2, this library reads version 1: plan it again"),
        (lambda f: f.pop("measure"), r"the policy lacks \['measure'\]"),
        (lambda f: f.update(extra=1), r"unknown \['extra'\]"),
        (lambda f: f.update(measure="vibes"), "measure must be"),
        (lambda f: f.update(title=None), "title must be a string"),
        (lambda f: f.update(layers={}), "layers must be a list"),
        (lambda f: f["layers"].append("x"), "a layer must be an object"),
        (lambda f: f["layers"].reverse(), "ascending"),
        (lambda f: f["layers"][0].update(layer="0"), "index >= 0"),
        (lambda f: f["layers"][0].update(at_rest=1.5), "layer 0: at_rest must be a number of bytes"),
        (lambda f: f["layers"][0].update(head_errors=["a"]), "head_errors must be numbers"),
        (lambda f: f["layers"][0]["groups"][0]["config"].update(bits=7), "layer 0, config: bits must be one of"),
        (lambda f: f["layers"][0]["groups"][0]["config"].pop("clip"), r"layer 0, config lacks \['clip'\]"),
        (lambda f: f["layers"][0].update(groups=[]), "layer 0 has no group of heads"),
        (lambda f: f["layers"][1]["groups"][0].update(heads=[0]), "every head from 0 on exactly once"),
        (lambda f: f["layers"][1]["groups"][0].update(heads=[2, 0]), "ascending"),
        (lambda f: f["default"].update(rank=-1), "default, config: rank"),
    ],
)
def test_damaged_files(damage, match, tmp_path):
    path = tmp_path / "policy.json"
    mixed_policy().save(path)
    fields = json.loads(path.read_text())
    damage(fields)
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=match) as raised:
        lq.Policy.load(path)
    assert "policy.json" in str(raised.value)


def test_files_that_are_no_policy(tmp_path):
    with pytest.raises(FileNotFoundError):
        lq.Policy.load(tmp_path / "none.json")
    (tmp_path / "cut.json").write_text('{"format": "leapq')
    with pytest.raises(ValueError, match=r"cut\.json is not JSON"):
        lq.Policy.load(tmp_path / "cut.json")


def test_bad_input(note_4):
    one = trace(0, (2,), T=64)
    for budget, match in (
        (10, "need at least 6,144 bytes at_rest, the budget is 10"),
        (1e-9, "smallest error is .*, the budget is 1e-09"),
        (1.5, "budget must be an int"),
        (True, "budget must be an int"),
        ("leapquant-int9", "unknown method"),
        (lq.Budget(error=0.1, no_worse_than=lq.LeapConfig()), "which was not measured: add it"),
        (lq.Budget(worst_head=1e-9), "no candidate has an error below worst_head"),
    ):
        with pytest.raises(ValueError, match=match):
            lq.plan(note_4, budget)
    for arguments, match in (
        ({}, "budget is empty"),
        ({"bytes": 1, "error": 0.1}, "give bytes or error"),
        ({"bytes": 0}, "bytes must be positive"),
        ({"error": math.nan}, "error must be positive"),
        ({"bytes": 1, "count": "ring"}, "count must be"),
    ):
        with pytest.raises(ValueError, match=match):
            lq.Budget(**arguments)
    with pytest.raises(ValueError, match='by must be "layer" or "head"'):
        lq.plan(note_4, 10**9, by="row")
    for traces, options, match in (
        ([], {}, "no traces"),
        ([one], {"candidates": ()}, "no candidates"),
        ([one], {"candidates": (lq.LeapConfig(rank=SIZE),)}, "rank"),
        ([one], {"measure": "vibes"}, "measure must be"),
        ([one, trace(0, (2, 2), T=64)], {}, "traces of layer 0 differ"),
        ([dataclasses.replace(one, v=one.v[..., :-1])], {}, "v has shape"),
    ):
        with pytest.raises(ValueError, match=match):
            lq.plan_policy(traces, 10**9, **options)
    with pytest.raises(ValueError, match=r"no choice for layer 1, only for \[0\]"):
        lq.Policy.of({0: EIGHT}).method(1)
    with pytest.raises(ValueError, match="the policy is empty"):
        lq.Policy.of({})


# Heads stored differently: four value heads on two key heads, and no group has all value heads of one key head.
MIXED = lq.MixedMethod(
    (
        lq.HeadGroup(lq.LeapConfig(bits=4, rank=0, window=4), (0, 2, 3)),
        lq.HeadGroup(dataclasses.replace(PLAIN, window=4), (1,)),
    )
)


@functools.partial(jax.jit, static_argnums=0)
def run_all(method, tokens, mask):
    """Every entry of the protocol: decoded, its outputs, prefilled, and one more step of the first row alone."""
    sizes = helpers.sizes(tokens)
    state, outs = method.decode(method.init(**sizes), *tokens)
    prefilled, prefill_outs = method.prefill(method.init(dense=method.dense_state(state), **sizes), *tokens, mask=mask)
    stepped, out = method.step(state, *helpers.at(tokens, 0), active=jnp.array([True, False]))
    states = tuple(map(method.dense_state, (state, prefilled, stepped)))
    return state, states, (outs, prefill_outs, out[:, None])


def test_mixed_heads_are_the_methods_of_their_groups():
    """Each group has what its config gives on all heads; state_bytes is what is held."""
    tokens = helpers.tokens(5, B=2, T=6, G=2, H=4)
    mask = np.arange(6) < np.array([[6], [5]])
    state, states, outs = run_all(MIXED, tokens, mask)
    for group in MIXED.groups:
        _, expected_states, expected_outs = run_all(lq.LeapMethod(group.config), tokens, mask)
        heads = np.array(group.heads)
        for found, expected in zip(states, expected_states, strict=True):
            np.testing.assert_allclose(found[:, heads], expected[:, heads], rtol=1e-5, atol=1e-6)
        for found, expected in zip(outs, expected_outs, strict=True):
            np.testing.assert_allclose(found[:, :, heads], expected[:, :, heads], rtol=1e-5, atol=1e-6)
    assert MIXED.state_bytes(state)["total"] == sum(x.nbytes for x in jax.tree.leaves(state))
    assert [part.num_key_heads for part in state.parts] == [3, 1]
    whole = lq.MixedMethod((lq.HeadGroup(WIDE, (0, 1)), lq.HeadGroup(PLAIN, (2, 3))))
    assert [part.num_key_heads for part in whole.init(**helpers.sizes(tokens)).parts] == [1, 1]  # keys are held once


def test_mixed_groups_must_fit():
    with pytest.raises(ValueError, match="every head from 0 on exactly once"):
        lq.MixedMethod((lq.HeadGroup(EIGHT, (0, 2)),))
    with pytest.raises(ValueError, match="every head from 0 on exactly once"):
        lq.MixedMethod((lq.HeadGroup(EIGHT),))
    with pytest.raises(ValueError, match="num_heads is 2, but the groups name 4 heads"):
        MIXED.init(batch=1, num_heads=2, key_dim=8, value_dim=8)
    with pytest.raises(ValueError, match="tuple of head indices"):
        lq.HeadGroup(EIGHT, [0, 1])  # pyright: ignore[reportArgumentType]
