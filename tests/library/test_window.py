"""Inside a window: reads by eq. 10, exact rollback, and what the records cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import leapquant_jax as lq
from tests.library import helpers as hp
from tests.library import oracle

GATES = ["scalar", "channel"]


@pytest.mark.parametrize("gate", GATES)
def test_eq_10_reads_equal_the_materialised_state(gate):
    """Quantization off, over two windows and a tail: outputs, states and the oracle agree to fp32 rounding."""
    x = hp.tokens(0, B=2, T=37, G=2, H=4, K=8, V=6, gate=gate, half_life=8)
    start = np.random.default_rng(1).standard_normal((2, 4, 8, 6)).astype(np.float32)
    _, outs, states = oracle.exact(start, *x, history=True)
    state = hp.init_from(hp.UNQUANTIZED, start, **hp.sizes(x))
    for t in range(37):
        state, out = hp.step(hp.UNQUANTIZED, state, *hp.at(x, t))
        dense = np.asarray(hp.dense_state(hp.UNQUANTIZED, state))
        assert hp.relative(dense, states[:, t]) < 1e-6
        assert hp.relative(out, outs[:, t]) < 1e-6
        queries = np.repeat(x[0][:, t], 2, axis=1)
        assert hp.relative(out, np.einsum("bhkv,bhk->bhv", dense, queries)) < 1e-6
        np.testing.assert_array_equal(state.position, (t + 1) % 16)


@pytest.mark.parametrize(
    ("options", "gate"),
    [
        (dict(rank=1), "scalar"),
        (dict(rank=0, rotation=True), "scalar"),
        (dict(rank=1, rotation=True, bits=6), "channel"),
        (dict(rank=1, smoothing=1), "scalar"),
        (dict(bits=4, rank=1), "channel"),
        (dict(bits=6, rank=0, smoothing=0, record_dtype="bfloat16"), "channel"),
    ],
    ids=str,
)
def test_decode_equals_the_oracle_over_several_folds(options, gate):
    x = hp.tokens(1, B=2, T=23, G=2, H=4, K=8, V=6, gate=gate)
    config = lq.LeapConfig(
        window=5, fit="svd" if options["rank"] else "subspace",
        **{k: v if k != "rotation" else "hadamard" for k, v in options.items()},
    )  # fmt: skip
    state, outs = hp.decode(config, lq.init_state(config, **hp.sizes(x)), *x)
    expected, expected_outs = oracle.windowed(*x, window=5, **options)
    # The same roundings happen in fp32 and in float64: heads agree to fp32, but for two in which a number lay at a tie.
    distance, size = (np.linalg.norm(x, axis=(-2, -1)) for x in (hp.dense_state(config, state) - expected, expected))
    errors = np.sort((distance / size).ravel())
    assert errors[-3] < 1e-6 and errors[-1] < 2e-3
    assert hp.relative(outs, expected_outs) < 6e-4
    truth, _ = oracle.exact(hp.zeros(x), *x)
    assert hp.relative(expected, truth) > 2e-3  # or else the comparison above would say nothing


def test_the_output_uses_the_record_as_stored():
    """One token from S = 0 at a full ring of fp16: the output is S^T q of the state that will be read again."""
    x = hp.pool_tokens(2, 1)
    state, out = hp.step(hp.POOL, lq.init_state(hp.POOL, **hp.POOL_SIZES), *hp.at(x, 0), active=np.ones(16, bool))
    dense = np.asarray(hp.dense_state(hp.POOL, state), np.float64)
    q = np.repeat(x[0][:, 0], 2, axis=1).astype(np.float64)
    assert hp.relative(out, np.einsum("bhkv,bhk->bhv", dense, q)) < 3e-7  # the unrounded record would be 2e-4 away


def test_large_corrections_fit_the_ring():
    """u beyond fp16's 65,504, and below its smallest: the record's power-of-two scale takes it."""
    x = list(hp.pool_tokens(3, 3))
    sizes = np.logspace(-25, 25, 16).astype(np.float32)
    x[2] = x[2] * sizes[:, None, None, None]
    expected, outs = oracle.exact(np.zeros((16, 2, 8, 6)), *x)
    state, got = hp.run(hp.POOL, lq.init_state(hp.POOL, **hp.POOL_SIZES), x)
    for row in range(16):
        assert hp.relative(hp.dense_state(hp.POOL, state)[row], expected[row]) < 1e-3
        assert hp.relative(got[row], outs[row]) < 1e-3
    np.testing.assert_array_equal(np.log2(state.ring_scales) % 1, 0)
    assert np.abs(np.asarray(state.ring_values, np.float32)).max() <= 1


def test_A24_long_decode_by_record_dtype():
    """8,192 tokens on an unrounded boundary: what the records alone cost, and that nothing grows."""
    x = hp.tokens(4, T=8192, H=1, K=4, V=3, half_life=300)
    errors = {}
    for dtype in ("float32", "float16", "bfloat16"):
        config = lq.LeapConfig(bits=None, boundary_dtype="float32", rank=0, smoothing=0, record_dtype=dtype)
        state, errors[dtype] = lq.init_state(config, **hp.sizes(x)), []
        S = np.zeros((1, 1, 4, 3))
        for start in range(0, 8192, 1024):
            part = hp.span(x, start, start + 1024)
            state, _ = hp.decode(config, state, *part)
            S, _ = oracle.exact(S, *part)
            errors[dtype].append(hp.relative(hp.dense_state(config, state), S))
    assert max(errors["float32"]) < 1e-5, errors["float32"]
    assert max(errors["float16"]) < 1e-3, errors["float16"]
    assert max(errors["bfloat16"]) < 1e-2, errors["bfloat16"]
    assert np.median(errors["bfloat16"]) > 3 * np.median(errors["float16"])  # METHOD.md: 6-8 times
    for series in errors.values():
        assert np.mean(series[4:]) < 3 * np.mean(series[:4])


# --- rollback ----------------------------------------------------------------------------------------------------------


def test_A21_a_rejected_draft_leaves_no_trace():
    """Row n drafts 4 junk tokens at window position n; those that stayed in their window continue bit by bit."""
    state, draft, real = hp.phased_pool(), hp.pool_tokens(5, 4), hp.pool_tokens(6, 12)
    draft = tuple(a * np.float32(100) if i == 2 else a for i, a in enumerate(draft))
    expected, expected_outs = hp.run(hp.POOL, state, real)
    drafted, _ = hp.run(hp.POOL, state, draft)
    rolled, ok = hp.rollback(hp.POOL, drafted, jnp.full(16, 4, jnp.int32))
    np.testing.assert_array_equal(ok, np.arange(16) + 4 < 16)  # the others folded: too late
    hp.assert_bit_equal(hp.rows_of(rolled, ~np.asarray(ok)), hp.rows_of(drafted, ~np.asarray(ok)))
    np.testing.assert_array_equal(rolled.position[:12], np.arange(12))
    continued, outs = hp.run(hp.POOL, rolled, real)
    assert hp.bits_of(outs[:12]) == hp.bits_of(expected_outs[:12])
    # Dead ring entries may still hold junk, so compare what is read: the whole state after the next fold.
    for a, b in zip(
        (continued.codes, continued.row_scales, continued.column_scales, continued.position),
        (expected.codes, expected.row_scales, expected.column_scales, expected.position),
        strict=True,
    ):
        assert hp.bits_of(a[:12]) == hp.bits_of(b[:12])
    dense = [np.asarray(hp.dense_state(hp.POOL, s))[:12] for s in (continued, expected)]
    assert hp.bits_of(dense[0]) == hp.bits_of(dense[1])


def test_A21_a_rejected_draft_of_nans_leaves_no_trace():
    state, real = hp.phased_pool(), hp.pool_tokens(6, 2)
    _, expected = hp.run(hp.POOL, state, real)
    nans = tuple(np.full_like(a, np.nan) for a in hp.pool_tokens(5, 1))
    drafted, _ = hp.run(hp.POOL, state, nans)
    rolled, ok = hp.rollback(hp.POOL, drafted, jnp.ones(16, jnp.int32))
    np.testing.assert_array_equal(ok, np.arange(16) < 15)
    _, outs = hp.run(hp.POOL, rolled, real)
    assert hp.bits_of(outs[:15]) == hp.bits_of(expected[:15])


def test_A22_nothing_dropped_changes_nothing():
    state = hp.phased_pool()
    dropped = np.array([0, 1, 4, 0] * 4, np.int32)
    rolled, ok = hp.rollback(hp.POOL, state, dropped)
    np.testing.assert_array_equal(ok, dropped <= np.arange(16))
    kept = (dropped == 0) | ~np.asarray(ok)
    hp.assert_bit_equal(hp.rows_of(rolled, kept), hp.rows_of(state, kept))
    np.testing.assert_array_equal(rolled.position, np.arange(16) - np.where(np.asarray(ok), dropped, 0))


@pytest.mark.parametrize("number", [-1, 17, 2**31 - 1, -(2**31)])
def test_A22_an_impossible_number_is_refused_per_row(number):
    state = hp.phased_pool()
    rolled, ok = hp.rollback(hp.POOL, state, np.full(16, number, np.int32))
    assert not np.asarray(ok).any()
    hp.assert_bit_equal(rolled, state)


def test_A23_random_programs_against_a_list():
    """500 random operations on each of 16 rows; the model of a row is the list of its states since the last fold."""
    config = lq.LeapConfig(bits=None, boundary_dtype="float32", rank=0, smoothing=0, record_dtype="float32", window=6)
    sizes = dict(batch=16, num_heads=1, num_key_heads=1, key_dim=4, value_dim=3)
    rng = np.random.default_rng(7)
    take, put = jax.jit(lq.take_rows), jax.jit(lq.put_rows)
    state = lq.init_state(config, **sizes)
    saved, saved_model = state, None
    model = [[np.zeros((4, 3))] for _ in range(16)]
    for turn in range(500):
        operation = rng.choice(["append", "truncate", "save", "restore", "fold"], p=[0.55, 0.25, 0.09, 0.09, 0.02])
        chosen = rng.random(16) < 0.6
        if operation == "append":
            q, k, v, g, beta = (a[:, 0] for a in hp.tokens(1000 + turn, B=16, T=1, H=1, K=4, V=3, half_life=5))
            state, _ = hp.step(config, state, q, k, v, g, beta, active=chosen)
            for row in np.flatnonzero(chosen):
                token = (a[row, 0].astype(np.float64) for a in (q, k, v, g, beta))
                model[row].append(oracle.exact_token(model[row][-1], *token)[0])
                if len(model[row]) == 7:
                    model[row] = model[row][-1:]
        elif operation == "truncate":
            number = np.where(chosen, rng.integers(0, 4, 16), 0).astype(np.int32)
            state, ok = hp.rollback(config, state, number)
            for row in range(16):
                possible = number[row] < len(model[row])
                assert bool(ok[row]) == possible
                if possible and number[row]:
                    del model[row][-number[row] :]
        elif operation == "save":
            saved, saved_model = state, [list(rows) for rows in model]
        elif operation == "restore" and saved_model:
            # each chosen row takes over what another row was when saved
            source = rng.permutation(16)
            state = put(state, take(saved, source), np.where(chosen, np.arange(16), -1))
            model = [list(saved_model[source[row]]) if chosen[row] else model[row] for row in range(16)]
        elif operation == "fold":
            state = hp.fold(config, state)
            model = [rows[-1:] for rows in model]
        np.testing.assert_array_equal(state.position, [len(rows) - 1 for rows in model])
        expected = np.stack([rows[-1] for rows in model])[:, None]
        np.testing.assert_allclose(hp.dense_state(config, state), expected, atol=2e-5)
