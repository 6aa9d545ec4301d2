"""Moving requests between slots: every leaf moves, padding touches nothing, a reused slot remembers nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import leapquant_jax as lq
from tests.library import helpers as hp

FRESH = {**hp.POOL_SIZES, "batch": 1}


def _unique(state):
    """The state with values in every leaf that differ from row to row (and a mark of the leaf)."""
    leaves, treedef = jax.tree.flatten(state)
    filled = []
    for n, leaf in enumerate(leaves):
        rows = (np.arange(leaf.shape[0]) + n).reshape(-1, *(1,) * (leaf.ndim - 1))
        filled.append(jnp.asarray(np.broadcast_to(rows % 16, leaf.shape).astype(leaf.dtype)))
    return jax.tree.unflatten(treedef, filled)


@pytest.fixture(scope="module", params=["step-int4", "leapquant-int8", "leapquant-int6", "exact"])
def pool(request):
    sizes = dict(num_heads=2, num_key_heads=1, key_dim=8, value_dim=9, gate="channel")
    method = lq.get_method(request.param)
    return _unique(method.init(batch=16, **sizes)), method.init(batch=1, **sizes)


def test_A17_every_leaf_follows(pool):
    state, fresh = pool
    leaves = len(jax.tree.leaves(state))
    copied = lq.put_rows(state, lq.take_rows(state, [3]), [5])
    selected = lq.take_rows(state, np.array([5, 3]))
    reset = lq.reset_rows(state, fresh, jnp.array([3]))
    merged = lq.concatenate_rows(selected, fresh)
    order = np.arange(16)
    order[5] = 3
    hp.assert_bit_equal(copied, hp.rows_of(state, order))
    hp.assert_bit_equal(selected, hp.rows_of(state, [5, 3]))
    hp.assert_bit_equal(hp.rows_of(reset, [3]), fresh)
    hp.assert_bit_equal(hp.rows_of(reset, np.delete(np.arange(16), 3)), hp.rows_of(state, np.delete(np.arange(16), 3)))
    hp.assert_bit_equal(hp.rows_of(merged, [0, 1]), selected)
    hp.assert_bit_equal(hp.rows_of(merged, [2]), fresh)
    assert all(leaf.shape[0] == 3 for leaf in jax.tree.leaves(merged)) and len(jax.tree.leaves(merged)) == leaves


@pytest.mark.parametrize("sentinel", [-1, -2, -16, -(2**31)])
def test_B11_the_padding_sentinel_writes_nothing_and_reads_zeros(pool, sentinel):
    state, fresh = pool
    taken = lq.take_rows(state, [sentinel, 2])
    hp.assert_bit_equal(hp.rows_of(taken, [1]), hp.rows_of(state, [2]))
    assert not any(np.asarray(leaf[0], np.float32).any() for leaf in jax.tree.leaves(taken))
    hp.assert_bit_equal(lq.put_rows(state, taken, [sentinel, 2]), state)  # above all the last row
    hp.assert_bit_equal(lq.reset_rows(state, fresh, [sentinel]), state)
    compiled = jax.jit(lq.put_rows)(state, taken, jnp.array([sentinel, 2]))
    hp.assert_bit_equal(compiled, state)


def test_no_indices_are_nothing():
    state = lq.init_state(hp.POOL, **hp.POOL_SIZES)
    assert lq.take_rows(state, []).batch == 0
    hp.assert_bit_equal(lq.put_rows(state, lq.take_rows(state, []), []), state)


@pytest.mark.parametrize("junk", [1e6, np.nan, np.inf])
def test_A01_a_reused_slot_remembers_nothing(junk):
    state = hp.phased_pool()

    def spoil(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return leaf.at[3].set(jnp.asarray(9 if leaf.ndim == 1 else 127, leaf.dtype))
        return leaf.at[3].set(jnp.asarray(min(junk, 6e4) if leaf.dtype == jnp.float16 else junk, leaf.dtype))

    spoiled = jax.tree.map(spoil, state)
    reset = lq.reset_rows(spoiled, lq.init_state(hp.POOL, **FRESH), [3])
    others = np.delete(np.arange(16), 3)
    hp.assert_bit_equal(hp.rows_of(reset, others), hp.rows_of(state, others))
    x = hp.pool_tokens(1, 40)
    continued, outs = hp.run(hp.POOL, reset, x)
    new, new_outs = hp.run(hp.POOL, lq.init_state(hp.POOL, **hp.POOL_SIZES), x)
    assert hp.bits_of(outs[3]) == hp.bits_of(new_outs[3])
    hp.assert_bit_equal(hp.rows_of(continued, [3]), hp.rows_of(new, [3]))


def test_A02_padded_rows_touch_nothing_and_output_zero():
    """Slots [5, -1, 0, -1, 7, -1, -1, 2] of a pool of 8 are decoded for 33 steps; padding carries NaN inputs."""
    indices = np.array([5, -1, 0, -1, 7, -1, -1, 2])
    live = indices >= 0
    pool = lq.take_rows(hp.phased_pool(), np.arange(8))
    x = hp.tokens(2, B=16, T=33)
    batch = lq.take_rows(pool, np.concatenate([indices, np.full(8, -1)]))
    padded = tuple(np.where(np.pad(live, (0, 8)).reshape(16, *(1,) * (a.ndim - 1)), a, np.nan) for a in x)
    padded = tuple(a.astype(np.float32) for a in padded)
    active = np.broadcast_to(np.pad(live, (0, 8))[:, None], (16, 33))
    batch, outs = hp.run(hp.POOL, batch, padded, active=active)
    assert not np.asarray(outs)[~active[:, 0]].any()  # exactly zero, not NaN * 0
    after = lq.put_rows(pool, lq.take_rows(batch, np.arange(8)), indices)
    hp.assert_bit_equal(hp.rows_of(after, [1, 3, 4, 6]), hp.rows_of(pool, [1, 3, 4, 6]))

    alone = lq.take_rows(pool, np.concatenate([np.maximum(indices, 0), np.zeros(8, int)]))
    alone, expected = hp.run(hp.POOL, alone, x)
    assert hp.bits_of(outs[:8][live]) == hp.bits_of(expected[:8][live])
    hp.assert_bit_equal(hp.rows_of(after, indices[live]), hp.rows_of(alone, np.flatnonzero(live)))


def test_B05_one_active_row_leaves_the_others_and_the_callers_arrays_alone():
    state, x = hp.phased_pool(), hp.pool_tokens(3, 1)
    before = jax.tree.map(lambda a: np.array(a), state)
    for row in (0, 15):  # row 15 folds
        new, out = hp.step(hp.POOL, state, *hp.at(x, 0), active=np.arange(16) == row)
        others = np.arange(16) != row
        hp.assert_bit_equal(hp.rows_of(new, others), hp.rows_of(state, others))
        assert not np.asarray(out)[others].any() and np.asarray(out)[row].any()
        assert new.position[row] == (row + 1) % 16
    hp.assert_bit_equal(jax.tree.map(np.asarray, state), before)


def test_A26_joining_grows_the_batch():
    running = lq.take_rows(hp.phased_pool(), [4, 5, 6])
    fresh = lq.init_state(hp.POOL, **{**hp.POOL_SIZES, "batch": 2})
    merged = lq.concatenate_rows(running, fresh)
    assert all(leaf.shape[0] == 5 for leaf in jax.tree.leaves(merged))
    hp.assert_bit_equal(hp.rows_of(merged, [3, 4]), fresh)
    hp.assert_bit_equal(lq.take_rows(merged, [4]), lq.init_state(hp.POOL, **FRESH))
    with pytest.raises(ValueError, match="index 5 is beyond a batch of 5"):
        lq.take_rows(merged, [5])


def test_moves_are_checked():
    state = lq.init_state(hp.POOL, **hp.POOL_SIZES)
    narrow = lq.init_state(dataclasses.replace(hp.POOL, window=8), **FRESH)
    other = lq.init_state(dataclasses.replace(hp.POOL, rank=0), **FRESH)
    fresh = lq.init_state(hp.POOL, **FRESH)
    for call, message in (
        (lambda: lq.put_rows(state, narrow, [0]), "the states differ"),
        (lambda: lq.concatenate_rows(state, other), "differ in structure: make both with the same method"),
        (lambda: lq.put_rows(state, fresh, [0, 1]), "give one row per index"),
        (lambda: lq.reset_rows(state, state, [0]), "fresh must have batch 1, got 16"),
        (lambda: lq.take_rows(state, [[0]]), "1-D integer array"),
        (lambda: lq.take_rows(state, [0.5]), "1-D integer array"),
        (lambda: lq.take_rows(state, 3), "1-D integer array"),
        (lambda: lq.concatenate_rows(), "at least one state"),
        (lambda: lq.take_rows({"a": jnp.ones(2), "b": jnp.ones(3)}, [0]), "same batch axis"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
