"""The method's error on heads of known kind, against the same method with the exact SVD and against the float64 truth."""

import dataclasses

import numpy as np

import leapquant_jax as lq
from tests.library import helpers as hp
from tests.library import oracle

KINDS = ("slow", "fast", "low rank", "full rank", "nearly idle")
K, V, LENGTH = 32, 24, 512


def _heads():
    """One head of each kind, [1, 512, 5, ...]."""
    rng = np.random.default_rng(0)
    q, k, v, g, beta = hp.tokens(1, T=LENGTH, G=5, H=5, K=K, V=V)
    for h, half_life in enumerate((3000, 5, 100, 200, 1_000_000)):
        g[:, :, h] = -np.log(2) / half_life
    k[:, :, 2] = oracle.l2norm(rng.standard_normal((LENGTH, 3)) @ rng.standard_normal((3, K)))
    v[:, :, 2] = rng.standard_normal((LENGTH, 3)) @ rng.standard_normal((3, V))
    beta[:, :, 4] = 0.0025
    return q, k, v, g, beta


def test_the_warm_started_fit_costs_less_than_a_quarter_over_the_svd():
    """leapquant-int8, state error after every 128 tokens, each kind within 1.25x of the exact-SVD oracle."""
    x = _heads()
    config = lq.get_method("leapquant-int8").config
    configs = {"subspace": config, "svd": dataclasses.replace(config, fit="svd", refit_gain=0)}
    states = {name: lq.init_state(c, **hp.sizes(x)) for name, c in configs.items()}
    errors = {name: [] for name in configs}
    S = np.zeros((1, 5, K, V))
    for start in range(0, LENGTH, 128):
        part = hp.span(x, start, start + 128)
        S, _ = oracle.exact(S, *part)
        for name, c in configs.items():
            states[name], _ = hp.decode(c, states[name], *part)
            dense = np.asarray(hp.dense_state(c, states[name]))
            errors[name].append([hp.relative(dense[0, h], S[0, h]) for h in range(5)])
    error = {name: np.sqrt(np.mean(np.square(e), axis=0)) for name, e in errors.items()}
    for h, kind in enumerate(KINDS):
        ratio = error["subspace"][h] / error["svd"][h]
        assert ratio < 1.25, f"{kind}: {ratio:.3f} times the error with the SVD"
        assert error["subspace"][h] < (0.05 if kind == "nearly idle" else 0.02), f"{kind}: {error['subspace'][h]:.4f}"
    assert error["subspace"][2] < 0.2 * error["subspace"][3]  # three patterns fit into four compensators
