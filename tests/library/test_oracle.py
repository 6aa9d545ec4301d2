"""The oracle itself, checked by hand: everything else is judged by it."""

import numpy as np

from tests.library import oracle


def test_one_token_by_hand():
    # S = [[1, 0], [0, 2]], decay 1/2, k = e0, v = (3, 4), beta = 1/2: u = (v - (1/2, 0)) / 2 = (1.25, 2)
    S, out = oracle.exact_token(
        np.diag([1.0, 2.0]), np.array([1.0, 1.0]), np.array([1.0, 0.0]), np.array([3.0, 4.0]), np.log(0.5), 0.5
    )
    np.testing.assert_allclose(S, [[1.75, 2.0], [0.0, 1.0]])
    np.testing.assert_allclose(out, [1.75, 3.0])


def test_a_full_erase_leaves_only_the_new_write():
    S, _ = oracle.exact_token(np.full((2, 3), 7.0), np.ones(2), np.array([0.0, 1.0]), np.arange(3.0), -np.inf, 1.0)
    np.testing.assert_array_equal(S, [[0, 0, 0], [0, 1, 2]])


def test_channel_decay_acts_on_key_rows():
    S, _ = oracle.exact_token(np.ones((2, 3)), np.ones(2), np.zeros(2), np.zeros(3), np.log([0.5, 0.25]), 1.0)
    np.testing.assert_allclose(S, [[0.5] * 3, [0.25] * 3])


def test_quantize_by_hand():
    # one column: largest 127, so the scale is 1 and the codes are the values rounded to even
    rounded = oracle.quantize(np.array([[127.0], [0.5], [1.5], [-2.5]]), smoothing=0)
    np.testing.assert_array_equal(rounded.codes[:, 0], [127, 0, 2, -2])
    # smoothing divides row i by sqrt(mean |R_ij|): 4 -> 2
    np.testing.assert_allclose(oracle.quantize(np.array([[4.0, 4.0], [1.0, 1.0]])).rows, [2, 1])


def test_packing_by_hand():
    assert oracle.pack_bits([1, -1, 7], 4) == [0x71, 0x0F]  # halves (1, -1) and (7, 0): 7|1 and 0|15
    assert oracle.pack_bits([1, -1, 31, -31], 6) == [0xF1, 0x1F, 0b10_01_11_00]
    assert oracle.bytes_per_head(128, 128) == 19456


def test_unquantized_window_is_the_recurrence():
    rng = np.random.default_rng(0)
    shapes = dict(q=(1, 9, 1, 4), k=(1, 9, 1, 4), v=(1, 9, 2, 3))
    q, k, v = (rng.standard_normal(s) for s in shapes.values())
    k = oracle.l2norm(k)
    g, beta = -rng.random((1, 9, 2, 4)), rng.random((1, 9, 2))
    exact, outs = oracle.exact(np.zeros((1, 2, 4, 3)), q, k, v, g, beta)
    windowed, more = oracle.windowed(
        q, k, v, g, beta, window=4, rank=0, boundary_dtype="float32", record_dtype="float32"
    )
    np.testing.assert_allclose(windowed, exact, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(more, outs, rtol=1e-5, atol=1e-6)
