"""Requests in one batch do not know of each other: ragged lengths, mixed window positions, any batch size, vmap."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import leapquant_jax as lq
from tests.library import helpers as hp

WIDTH = 5  # a second batch size, shared by the tests below


def test_A25_rows_at_every_phase_equal_themselves_alone():
    """Phases 0..15, 64 steps; row 7 retires after 20 and another request takes its slot."""
    state, x = hp.phased_pool(), hp.pool_tokens(1, 64)
    fresh = lq.init_state(hp.POOL, **{**hp.POOL_SIZES, "batch": 1})
    phases = np.arange(16)
    outs = []
    for t in range(64):
        if t == 20:
            state, phases = lq.reset_rows(state, fresh, [7]), np.where(np.arange(16) == 7, 0 - t, phases)
        state, out = hp.step(hp.POOL, state, *hp.at(x, t), active=np.ones(16, bool))
        outs.append(out)
        np.testing.assert_array_equal(state.position, (phases + t + 1) % 16)
        if t < 20:
            assert np.sum(np.asarray(state.position) == 0) == 1  # exactly one row folds at each step
    for row in (0, 6, 7, 15):
        only = np.broadcast_to((np.arange(16) == row)[:, None], (16, 64))
        start, first = hp.phased_pool(), 0
        if row == 7:
            start, first = lq.reset_rows(start, fresh, [7]), 20
        alone, alone_outs = hp.run(hp.POOL, start, hp.span(x, first, 64), active=only[:, first:])
        hp.assert_bit_equal(hp.rows_of(alone, [row]), hp.rows_of(state, [row]), f"row {row}")
        assert hp.bits_of(alone_outs[row]) == hp.bits_of(np.stack(outs, 1)[row, first:])


@pytest.mark.parametrize("width", [1, WIDTH])
def test_A27_a_row_has_the_same_bits_in_any_batch(width):
    state, x = hp.phased_pool(), hp.pool_tokens(2, 20)
    big, outs = hp.run(hp.POOL, state, x)
    rows = np.arange(10, 10 + width)
    small, small_outs = hp.run(hp.POOL, lq.take_rows(state, rows), tuple(a[rows] for a in x))
    assert hp.bits_of(small_outs) == hp.bits_of(outs[rows])
    hp.assert_bit_equal(small, hp.rows_of(big, rows))


def test_A05_ragged_prompts_in_chunks_equal_each_row_alone():
    """Lengths 5, 16, 17, 200 and 0, prefilled in chunks of 64: whole chunks of a row may be padding."""
    lengths = np.array([5, 16, 17, 200, 0])
    x = hp.tokens(3, B=WIDTH, T=256)
    more = hp.tokens(4, B=WIDTH, T=20)
    start = lq.init_state(hp.POOL, **{**hp.POOL_SIZES, "batch": WIDTH})

    def serve(lengths):
        state, outs = start, []
        for first in range(0, 256, 64):
            mask = np.arange(first, first + 64)[None] < lengths[:, None]
            chunk = hp.span(x, first, first + 64)
            chunk = tuple(np.where(mask.reshape(*mask.shape, *(1,) * (a.ndim - 2)), a, np.nan) for a in chunk)
            state, out = hp.prefill(hp.POOL, state, *(a.astype(np.float32) for a in chunk), mask=mask)
            outs.append(out)
        return state, *hp.run(hp.POOL, state, more), np.concatenate(outs, 1)

    filled, together, decoded, outs = serve(lengths)
    np.testing.assert_array_equal(filled.position, lengths % 16)
    hp.assert_bit_equal(hp.rows_of(filled, [4]), hp.rows_of(start, [4]))  # nothing but padding: still the fresh state
    for row in range(WIDTH):
        _, alone, alone_decoded, alone_outs = serve(np.where(np.arange(WIDTH) == row, lengths, 0))
        hp.assert_bit_equal(hp.rows_of(alone, [row]), hp.rows_of(together, [row]), f"row {row}")
        assert hp.bits_of(alone_decoded[row]) == hp.bits_of(decoded[row])
        assert hp.bits_of(alone_outs[row]) == hp.bits_of(outs[row])
        assert not outs[row, lengths[row] :].any() and np.isfinite(outs[row]).all()


def test_A07_prefill_of_any_cut_stays_within_one_rounding_per_cut():
    """Positions agree however a prompt is cut; the states differ by where they were rounded."""
    x = hp.tokens(3, B=WIDTH, T=64)
    start = lq.init_state(hp.POOL, **{**hp.POOL_SIZES, "batch": WIDTH})
    exact, _ = hp.exact_decode(hp.zeros(x), *x)
    whole, _ = hp.prefill(hp.POOL, start, *x, mask=np.ones((WIDTH, 64), bool))
    cut = start
    for first, last in ((0, 37), (37, 38), (38, 64)):
        pad = [(0, 0), (0, 64 - last + first)]
        part = tuple(np.pad(a, pad + [(0, 0)] * (a.ndim - 2)) for a in hp.span(x, first, last))
        mask = np.broadcast_to(np.arange(64)[None] < last - first, (WIDTH, 64))
        cut, _ = hp.prefill(hp.POOL, cut, *part, mask=mask)
    one_by_one, _ = hp.run(hp.POOL, start, x)
    for state in (whole, cut, one_by_one):
        np.testing.assert_array_equal(state.position, np.zeros(WIDTH))
        assert hp.relative(hp.dense_state(hp.POOL, state), exact) < 0.01


def test_prefill_refuses_padding_on_the_left():
    x, start = hp.tokens(3, B=WIDTH, T=64), lq.init_state(hp.POOL, **{**hp.POOL_SIZES, "batch": WIDTH})
    mask = np.ones((WIDTH, 64), bool)
    mask[2, 0] = False
    with pytest.raises(ValueError, match="right"):
        lq.prefill(hp.POOL, start, *x, mask=mask)


# --- vmap ---------------------------------------------------------------------------------------------------------------


def test_vmap_of_step_equals_the_batch():
    state, x = hp.phased_pool(), hp.pool_tokens(5, 3)
    lanes = lambda tree: jax.tree.map(lambda a: a.reshape(4, 4, *a.shape[1:]), tree)  # noqa: E731
    stepped = jax.jit(jax.vmap(lambda s, *token: lq.step(hp.POOL, s, *token, active=jnp.ones(4, bool))))
    batched, lanes_state = state, lanes(state)
    for t in range(3):
        batched, out = hp.step(hp.POOL, batched, *hp.at(x, t), active=np.ones(16, bool))
        lanes_state, lanes_out = stepped(lanes_state, *(lanes(a) for a in hp.at(x, t)))
        assert hp.bits_of(lanes_out) == hp.bits_of(lanes(out))
    hp.assert_bit_equal(lanes_state, lanes(batched))


@pytest.fixture
def count_folds(monkeypatch):
    """Counts, at run time, how often the body of a fold is executed."""
    module = sys.modules["leapquant_jax.fold"]
    calls, compress = [], module.compress

    def counted(*args, **kwargs):
        jax.debug.callback(lambda: calls.append(1))
        return compress(*args, **kwargs)

    monkeypatch.setattr(module, "compress", counted)

    def count():
        jax.effects_barrier()
        number = len(calls)
        calls.clear()
        return number

    return count


@pytest.mark.parametrize("vmapped", [False, True])
def test_B08_folds_run_only_when_rows_are_full(count_folds, vmapped, monkeypatch):
    """14 rows and a window of 7: groups of two rows. Aligned rows fold in 7 groups at every 7th token and not before;
    spread over all phases one group folds per token. Under vmap a `cond` would fold all rows at every token."""
    monkeypatch.setattr(sys.modules["leapquant_jax.fold"], "_SMALLEST_GROUP_BYTES", 0)
    config = lq.LeapConfig(window=7, rank=0, bits=6 if vmapped else 8)  # of no other test: traced while counting
    sizes = {**hp.POOL_SIZES, "batch": 14}
    state, x = lq.init_state(config, **sizes), hp.tokens(6, B=14, T=14)
    step = lambda state, *token: lq.step(config, state, *token)  # noqa: E731
    if vmapped:
        lanes = lambda tree: jax.tree.map(lambda a: a.reshape(14, 1, *a.shape[1:]), tree)  # noqa: E731
        step, state, x = jax.vmap(step), lanes(state), tuple(a[:, None] for a in x)
        x = tuple(jnp.moveaxis(a, 2, 1) for a in x)  # [lanes, T, B = 1, ...]
    step = jax.jit(step)
    for t in range(14):
        state, _ = step(state, *hp.at(x, t))
        assert count_folds() == (7 if t % 7 == 6 else 0)
    position = jnp.arange(14, dtype=jnp.int32).reshape(state.position.shape) // 2  # two rows at each phase
    state = jax.tree.map(lambda a: a, state)
    state = type(state)(**{**vars(state), "position": position})
    for t in range(14):
        state, _ = step(state, *hp.at(x, t))
        assert count_folds() == 1
