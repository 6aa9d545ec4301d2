"""One fold: the rounding error bound, the compensator fit, and the states that break naive code (METHOD.md section 6)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import leapquant_jax as lq
from leapquant_jax import fit
from leapquant_jax.quantize import quantize
from tests.library import helpers as hp
from tests.library import oracle

K, V = 32, 24
CONFIGS = {
    "int8": lq.LeapConfig(),
    "int6": lq.LeapConfig(bits=6, rank=2, smoothing=1.0),
    "int4": lq.LeapConfig(bits=4, rank=0, smoothing=0),
    "int8-bf16": lq.LeapConfig(rank=2, compensator_dtype="bfloat16"),
}


def of_spectrum(rng, sigma, key_dim=K, value_dim=V):
    """A random state with these singular values."""
    sigma = np.asarray(sigma, np.float64)
    left = np.linalg.qr(rng.standard_normal((key_dim, len(sigma))))[0]
    right = np.linalg.qr(rng.standard_normal((value_dim, len(sigma))))[0]
    return (left * sigma) @ right.T


@functools.cache
def hard_states():
    """Named states, [N, K, V] fp32, one per head."""
    rng = np.random.default_rng(0)
    full = rng.standard_normal((K, V))
    zero_row, zero_column, one_element = full.copy(), full.copy(), np.zeros((K, V))
    zero_row[3] = 0
    zero_column[:, 5] = 0
    one_element[7, 11] = 1e-30
    rows = np.exp(rng.uniform(-8, 8, K))
    states = {
        "full": full, "loud rows": full * rows[:, None], "low rank": of_spectrum(rng, [1, 0.5, 0.2]),
        "rank one": of_spectrum(rng, [2.0]), "decaying": of_spectrum(rng, 0.5 ** np.arange(20)),
        "zero": np.zeros((K, V)), "zero row": zero_row, "zero column": zero_column, "one tiny element": one_element,
        "1e-20": full * 1e-20, "1e10": full * 1e10, "one element": np.eye(K, V) * (np.arange(K) == 4)[:, None],
    }  # fmt: skip
    return list(states), np.stack(list(states.values())).astype(np.float32)


@functools.cache
def folded(name):
    """(config, names, dense float64, state, rounded residual float64, half steps) for all hard states."""
    config = CONFIGS[name]
    names, dense = hard_states()
    state = hp.init_from(config, dense[None], **_sizes(len(names)))
    low_rank = np.zeros(dense.shape)
    if config.rank:
        keys, values = (np.asarray(x[0]).astype(np.float64) for x in (state.compensator_keys, state.compensator_values))
        low_rank = np.einsum("hrk,hrv->hkv", keys, values)
    rows = np.ones((len(names), K)) if state.row_scales is None else np.asarray(state.row_scales[0], np.float64)
    columns = np.asarray(state.column_scales[0], np.float64)
    steps = rows[:, :, None] * columns[:, None, :]
    codes = np.asarray(state.codes[0]).astype(np.int64)
    if config.bits == 8:
        codes = codes.swapaxes(1, 2)
    else:  # read the packed bytes with the oracle's layout: they must be the packing of the rounded codes
        codes = np.clip(np.rint(_over(dense - low_rank, steps)), -config.largest_code, config.largest_code)
    return config, names, dense.astype(np.float64), state, low_rank, codes * steps, steps


def _over(a, b):
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)


def _sizes(heads, gate="scalar"):
    return dict(batch=1, num_heads=heads, num_key_heads=heads, key_dim=K, value_dim=V, gate=gate)


@pytest.mark.parametrize("name", CONFIGS)
def test_one_fold_errs_by_half_a_step_against_the_rounded_compensators(name):
    config, names, dense, state, low_rank, residual, steps = folded(name)
    for h, head in enumerate(names):
        R = dense[h] - low_rank[h]
        if head == "one tiny element":
            continue
        # fp32 forms R once: its own rounding counts beside the half step
        slack = 0.5 * steps[h] * (1 + 1e-4) + 3e-7 * np.abs(dense[h]).max()
        assert (np.abs(R - residual[h]) <= slack).all(), head
        total = np.asarray(hp.dense_state(config, state)[0, h], np.float64)
        assert (np.abs(dense[h] - total) <= slack).all(), head


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_scales_and_codes_equal_the_oracle(name):
    config, names, dense, state, low_rank, _, _ = folded(name)
    h = names.index("full")
    expected = oracle.quantize((dense[h] - low_rank[h]).astype(np.float32), config.bits, config.smoothing)
    np.testing.assert_allclose(state.column_scales[0, h], expected.columns, rtol=1e-5)
    if config.smoothing:
        np.testing.assert_allclose(state.row_scales[0, h], expected.rows, rtol=1e-5)
    packed = [oracle.pack_bits(codes.astype(int), config.bits) for codes in expected.codes.T]
    assert np.mean(np.array(packed) != np.asarray(state.codes[0, h]).astype(int) % 256) < 2e-3  # only ties differ


def test_A15_zeros_stay_zero_and_scales_finite():
    for name in CONFIGS:
        config, names, dense, state, *_ = folded(name)
        total = np.asarray(hp.dense_state(config, state)[0])
        for leaf in jax.tree.leaves(state):
            assert np.isfinite(np.asarray(leaf, np.float32)).all()
        if config.bits == 8:
            assert np.asarray(state.codes).min() >= -127  # never -128
        assert not total[names.index("zero")].any()
        assert not total[names.index("zero row")][3].any() or config.rank  # a compensator may touch it by 1e-8
        assert np.abs(total[names.index("zero row")][3]).max() < 1e-6
        assert np.abs(total[names.index("zero column")][:, 5]).max() < 1e-6
        for head in ("1e-20", "1e10"):  # no floor that swallows a small state, no overflow of a large one
            assert hp.relative(total[names.index(head)], dense[names.index(head)]) < 0.2, (name, head)
        tiny = total[names.index("one tiny element")].copy()
        assert abs(tiny[7, 11] / np.float32(1e-30) - 1) < 0.01, name
        tiny[7, 11] = 0
        assert not tiny.any()


def test_A15_only_one_non_zero_column():
    dense = np.zeros((K, V), np.float32)
    dense[:, 2] = np.arange(K)
    rounded = quantize(lq.LeapConfig(rank=0), jnp.asarray(dense))
    codes = np.asarray(rounded.codes)
    assert codes[2, 1:].all() and not np.delete(codes, 2, axis=0).any()
    assert np.isfinite(rounded.row_scales).all() and np.isfinite(rounded.column_scales).all()


def test_scale_is_per_value_column():
    """A loud value column must not cost its neighbours precision; a loud key row is what smoothing is for."""
    rng = np.random.default_rng(1)
    dense = rng.standard_normal((K, V)).astype(np.float32)
    dense[:, 0] *= 1000
    config = lq.LeapConfig(rank=0, smoothing=0)
    state = hp.init_from(config, dense[None, None], **_sizes(1))
    total = np.asarray(hp.dense_state(config, state)[0, 0])
    assert hp.relative(total[:, 1:], dense[:, 1:]) < 0.01


def test_low_rank_head_gains_from_rounded_compensators():
    """Against unrounded compensators a low-rank head is 4x (fp16) to 32x (bf16) worse."""
    for name, worst in (("int8", 2e-5), ("int8-bf16", 2e-4)):
        _, names, dense, state, *_ = folded(name)
        for head in ("low rank", "rank one"):
            h = names.index(head)
            if name == "int8-bf16" and head == "low rank":
                continue  # rank 3, two compensators
            total = np.asarray(hp.dense_state(CONFIGS[name], state)[0, h])
            assert hp.relative(total, dense[h]) < worst, (name, head)


# --- the fit -----------------------------------------------------------------------------------------------------------

SPECTRA = {
    "flat": np.ones(24), "slow": 0.9 ** np.arange(24), "fast": 0.5 ** np.arange(24), "steep": 0.1 ** np.arange(12.0),
    "gap": [1, *[1e-2] * 3, *[1e-4] * 20], "two levels": [1, 1, *[1e-2] * 2, *[1e-3] * 20], "rank 3": [1, 0.5, 0.2],
    "rank 1": [1.0], "close": [1] * 4 + [0.9] * 20, "zero": [0.0],
}  # fmt: skip


@pytest.fixture(scope="module")
def spectra():
    rng = np.random.default_rng(2)
    return np.stack([of_spectrum(rng, s) for s in SPECTRA.values()]).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("iterations", "method", "dtype"))
def _fit(dense, previous, *, iterations=1, method="subspace", dtype="float16"):
    return fit.fit_compensators(
        dense, previous, rank=4, method=method, iterations=iterations, dtype=dtype
    )  # fmt: skip


def _left_over(dense, factors):
    keys, values = (np.asarray(x).astype(np.float64) for x in factors)
    return np.linalg.norm(dense - np.einsum("hrk,hrv->hkv", keys, values), axis=(1, 2))


def test_fit_is_close_to_the_svd(spectra):
    """Cold at once; warm after a few windows; in fp16 and against the best rank-4 approximation, stored alike."""
    best = _best(spectra)
    cold = _left_over(spectra, _fit(spectra, None))
    warm, ratios = jnp.zeros((len(spectra), 4, V), jnp.float16), []
    for _ in range(4):
        factors = _fit(spectra, warm)
        warm = factors[1]
        ratios.append(_left_over(spectra, factors) / np.maximum(best, 1e-30))
    for name, c, w, b in zip(SPECTRA, cold, ratios[-1], best, strict=True):
        if name == "zero":
            assert c == 0
            continue
        assert c <= 1.2 * b, f"cold {name}: {c / b:.3f} of the SVD"
        assert w <= 1.2, f"warm {name}: {w:.3f} of the SVD"
    assert np.median(ratios[-1][: len(SPECTRA) - 1]) < 1.02


def _best(dense):
    left_over = []
    for S in dense.astype(np.float64):
        keys, values = (oracle.round_to(x, "float16") for x in oracle.svd_compensators(S, 4))
        keys, values = (np.pad(x, ((0, 4 - len(x)), (0, 0))) for x in (keys, values))
        left_over.append(np.linalg.norm(S - keys.T @ values))
    return np.array(left_over)


def test_svd_fit_is_the_best_rank_r_approximation(spectra):
    keys, values = _fit(spectra, None, method="svd", dtype="float32")
    best = np.sqrt((np.linalg.svd(spectra.astype(np.float64), compute_uv=False)[:, 4:] ** 2).sum(1))
    np.testing.assert_allclose(_left_over(spectra, (keys, values)), best, rtol=1e-4, atol=1e-6)
    norms = [np.linalg.norm(np.asarray(x), axis=-1) for x in (keys, values)]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-3, atol=1e-6)  # sigma split evenly over both factors


def test_note_4_the_longest_row_is_a_bad_start():
    """25 parallel rows of energy 11 (275 together) and one orthogonal, longer row of energy 16.

    Power iteration from the longest row never leaves it: 16 of 291. A block fit takes both directions.
    """
    S = np.zeros((K, V), np.float32)
    S[:25, 0], S[30, 1] = np.sqrt(11), 4
    start = S[np.argmax(np.linalg.norm(S, axis=1))]
    for _ in range(10):
        start = S.T @ (S @ start)
        start /= np.linalg.norm(start)
    assert np.isclose(np.linalg.norm(S @ start) ** 2, 16)

    for factors in (_fit(S[None], None), _fit(S[None], jnp.zeros((1, 4, V), jnp.float16))):
        captured = 291 - _left_over(S[None], factors)[0] ** 2
        assert captured > 290.99
    # Even a start that holds nothing but the longest row, as after a window in which it was the only pattern.
    stale = jnp.zeros((1, 4, V), jnp.float16).at[0, 0].set(start.astype(np.float16))
    assert 291 - _left_over(S[None], _fit(S[None], stale))[0] ** 2 > 290.99


def test_a_large_head_fits_half_precision_factors():
    """Sigma is split evenly: 1e8 in fp16 is 1e4 on both sides, and even 1e12 stays finite."""
    S = np.stack([of_spectrum(np.random.default_rng(3), [size, 1]) for size in (1e8, 1e12)]).astype(np.float32)
    factors = _fit(S, None)
    assert all(np.isfinite(np.asarray(f, np.float32)).all() for f in factors)
    assert _left_over(S, factors)[0] < 1e-3 * 1e8
    assert _left_over(S, factors)[1] <= 1.001 * 1e12


# --- heads do not touch each other, and nothing drifts -------------------------------------------------------------------


@pytest.mark.parametrize("fit_method", ["subspace", "svd"])
def test_a_nan_head_stays_alone(fit_method):
    config = lq.LeapConfig(rank=2, fit=fit_method)
    dense = np.random.default_rng(4).standard_normal((1, 4, K, V)).astype(np.float32)
    clean = hp.init_from(config, dense, **_sizes(4))
    dense[0, 2, 5, 7] = np.nan
    broken = hp.init_from(config, dense, **_sizes(4))
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(broken), strict=True):
        if a.ndim > 1:
            assert hp.bits_of(np.delete(np.asarray(a), 2, 1)) == hp.bits_of(np.delete(np.asarray(b), 2, 1))
    total = np.asarray(hp.dense_state(config, broken))
    assert np.isnan(total[0, 2]).any() and np.isfinite(np.delete(total, 2, 1)).all()


def test_A14_a_poisoned_row_is_alone_is_flagged_and_is_gone_after_a_reset():
    x = hp.pool_tokens(5, 40)
    start = lq.init_state(hp.POOL, **hp.POOL_SIZES)
    clean, clean_outs = hp.run(hp.POOL, start, x)
    x[2][2, 10, 0, 0] = np.nan
    broken, outs = hp.run(hp.POOL, start, x)
    others = np.arange(16) != 2
    hp.assert_bit_equal(hp.rows_of(broken, others), hp.rows_of(clean, others))
    assert hp.bits_of(outs[others]) == hp.bits_of(clean_outs[others])
    np.testing.assert_array_equal(lq.finite_rows(broken), others)
    fresh = lq.init_state(hp.POOL, **{**hp.POOL_SIZES, "batch": 1})
    reset = lq.reset_rows(broken, fresh, [2])
    assert np.asarray(lq.finite_rows(reset)).all()
    again, more = hp.run(hp.POOL, reset, hp.pool_tokens(6, 20))
    expected, expected_outs = hp.run(hp.POOL, start, hp.pool_tokens(6, 20))
    assert hp.bits_of(more[2]) == hp.bits_of(expected_outs[2])
    hp.assert_bit_equal(hp.rows_of(again, [2]), hp.rows_of(expected, [2]))


@pytest.mark.parametrize("rank", [0, 2, 4])
def test_nothing_drifts_when_nothing_happens(rank):
    """alpha = 1, beta = 0 is a fixed point of the recurrence; 100 folds round again each time but must go nowhere."""
    config = lq.LeapConfig(window=1, rank=rank)
    dense = np.random.default_rng(6).standard_normal((1, 4, K, V)).astype(np.float32)
    state = hp.init_from(config, dense, **_sizes(4))
    zero = jnp.zeros((1, 4, K))
    idle = (zero + 1 / K, zero + 1 / K, jnp.ones((1, 4, V)), jnp.zeros((1, 4)), jnp.zeros((1, 4)))

    @jax.jit
    def hundred(state):
        return jax.lax.scan(lambda state, _: lq.step(config, state, *idle), state, None, length=100)

    first = hp.relative(hp.dense_state(config, state), dense)
    state, outs = hundred(state)
    last = np.asarray(hp.dense_state(config, state))
    assert np.isfinite(outs).all() and first < 0.01
    assert abs(np.sum(last**2) / np.sum(dense**2) - 1) < 0.01
    assert hp.relative(last, dense) < 3 * first


def test_fold_closes_a_window_early_and_is_idempotent():
    state = hp.phased_pool()
    before = np.asarray(hp.dense_state(hp.POOL, state))
    folded_state = hp.fold(hp.POOL, state)
    np.testing.assert_array_equal(folded_state.position, np.zeros(16))
    assert hp.relative(hp.dense_state(hp.POOL, folded_state), before) < 0.01
    hp.assert_bit_equal(hp.rows_of(folded_state, [0]), hp.rows_of(state, [0]))  # nothing to fold in row 0
    hp.assert_bit_equal(hp.fold(hp.POOL, folded_state), folded_state)


def test_B12_rounding_is_to_even_then_clipped():
    column = np.array([-1e9, -128, -127.5, -0.5, 0.5, 1.5, 2.5, 127.5, 1e9, np.nan], np.float32)[:, None]
    from leapquant_jax.quantize import _round

    codes = jax.jit(_round)(jnp.asarray(column), jnp.ones(1), jnp.float32(127))
    np.testing.assert_array_equal(codes[:, 0], [-127, -127, -127, 0, 0, 2, 2, 127, 127, 0])


def test_mse_clip_never_errs_more_and_adds_no_energy():
    dense = np.random.default_rng(8).standard_t(2, (3, K, V)).astype(np.float32)
    errors = {}
    for clip in (None, "mse"):
        config = lq.LeapConfig(bits=4, rank=0, smoothing=0, clip=clip)
        state = hp.init_from(config, dense[None], **_sizes(3))
        total = np.asarray(hp.dense_state(config, state)[0], np.float64)
        errors[clip] = ((total - dense) ** 2).sum(1), np.asarray(state.column_scales[0])
        gained = (total**2).sum(1) / (dense.astype(np.float64) ** 2).sum(1) - 1
        assert (gained > 0.01).any() if clip is None else (gained < 1e-6).all()  # the plain scale does add some
    assert (errors["mse"][0] <= errors[None][0] * (1 + 1e-5)).all()
    assert (errors["mse"][1] < errors[None][1]).any()
