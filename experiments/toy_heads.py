"""Synthetic tokens for one recurrent head: the article's toy, and heads of a known character.

The article gives its generator in words: a 32 x 32 state, L2-normalised keys with two biased channels and four wide
ones, two large biased value channels, decays just under 1, write strengths of 0.05 to 0.15, 4,096 steps. How large, wide
and slow is our choice: the numbers of `ToyHead` were tuned once, by hand, until the article's figures came out together.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array


class Tokens(NamedTuple):
    """Inputs of `method.decode`; every head is a row of the batch: q, k [B, T, 1, K], v [B, T, 1, V], g, beta [B, T, 1]."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array


@dataclasses.dataclass(frozen=True)
class ToyHead:
    """The article's head.

    Attributes:
      key_dim, value_dim: K, V.
      biased_keys, key_bias: The first channels of every key get this mean; the others have mean 0.
      wide_keys, key_width: The next channels have this standard deviation; the others 1. Keys are then normalised.
      biased_values, value_bias: The first channels of every value get this mean; all have standard deviation 1.
      decay: Decays are uniform in this range, drawn anew for each token.
      write: So are write strengths.
    """

    key_dim: int = 32
    value_dim: int = 32
    biased_keys: int = 2
    key_bias: float = 2.5
    wide_keys: int = 4
    key_width: float = 4.5
    biased_values: int = 2
    value_bias: float = 3.0
    decay: tuple[float, float] = (0.9995, 0.9999)
    write: tuple[float, float] = (0.05, 0.15)

    def tokens(self, seeds: int, length: int, seed: int) -> Tokens:
        """Tokens of `seeds` independent heads. Head i depends on (seed, i) only."""
        generators = [np.random.default_rng([seed, i]) for i in range(seeds)]
        width = np.ones(self.key_dim)
        width[self.biased_keys : self.biased_keys + self.wide_keys] = self.key_width
        key_mean, value_mean = np.zeros(self.key_dim), np.zeros(self.value_dim)
        key_mean[: self.biased_keys] = self.key_bias
        value_mean[: self.biased_values] = self.value_bias
        drawn = [
            (
                rng.standard_normal((length, self.key_dim)),
                rng.standard_normal((length, self.key_dim)) * width + key_mean,
                rng.standard_normal((length, self.value_dim)) + value_mean,
                np.log(rng.uniform(*self.decay, length)),
                rng.uniform(*self.write, length),
            )
            for rng in generators
        ]
        return _as_tokens(*(np.stack(column) for column in zip(*drawn, strict=True)))


HEAD_KINDS = ("slow", "fast", "low-rank", "full-rank")


def heads(length: int, seed: int, *, key_dim: int = 128, value_dim: int = 128, rank: int = 6) -> Tokens:
    """One head of each of `HEAD_KINDS`, as the rows of one batch.

    slow: decay 0.9999, keys and values with a few strong directions. fast: the same with decay 0.9. low-rank: keys and
    values from subspaces of dimension `rank`, so the state has that rank, more than four compensators hold. full-rank:
    white keys and values. The last two decay by 0.999.
    """
    rng = np.random.default_rng([seed, 77])
    spectrum = 1.0 / np.sqrt(1 + np.arange(key_dim))  # of the slow and fast heads' keys
    columns = []
    for kind, decay in zip(HEAD_KINDS, (0.9999, 0.9, 0.999, 0.999), strict=True):
        k = rng.standard_normal((length, key_dim))
        v = rng.standard_normal((length, value_dim))
        if kind == "low-rank":
            k = k[:, :rank] @ rng.standard_normal((rank, key_dim))
            v = v[:, :rank] @ rng.standard_normal((rank, value_dim))
        elif kind != "full-rank":
            k = k * spectrum @ np.linalg.qr(rng.standard_normal((key_dim, key_dim)))[0]
            v[:, :2] += 3.0
        g = np.full(length, np.log(decay))
        columns.append((rng.standard_normal((length, key_dim)), k, v, g, rng.uniform(0.05, 0.15, length)))
    return _as_tokens(*(np.stack(column) for column in zip(*columns, strict=True)))


def slow_head(
    seeds: int, length: int, seed: int, *, decay: float = 0.9999, key_dim: int = 128, value_dim: int = 128
) -> Tokens:
    """White keys and values, weak writes, one fixed decay: a head on which rounding noise can outgrow forgetting."""
    rng = np.random.default_rng([seed, 78])
    return _as_tokens(
        rng.standard_normal((seeds, length, key_dim)),
        rng.standard_normal((seeds, length, key_dim)),
        rng.standard_normal((seeds, length, value_dim)),
        np.full((seeds, length), np.log(decay)),
        rng.uniform(0.02, 0.06, (seeds, length)),
    )


LONG_KINDS = ("0.999", "0.9999", "0.99999", "0.9999, biased", "never forgets", "stops", "stops, then fades")


def long_heads(length: int, seed: int, *, key_dim: int = 128, value_dim: int = 128, stop: int = 1024) -> Tokens:
    """Heads on which rounding noise may grow for ever, one of each of `LONG_KINDS`, as rows.

    The numbers are decays per token under weak writes of white keys and values ("biased": with a few strong directions);
    "never forgets" has decay 1. The last two are written for `stop` tokens and then never again: one keeps its state as it
    is, the other forgets it by 0.001 % per token.
    """
    rng = np.random.default_rng([seed, 79])
    decays = {"never forgets": 1.0, "stops": 1.0, "stops, then fades": 0.99999}
    columns = []
    for kind in LONG_KINDS:
        q, k = rng.standard_normal((2, length, key_dim))
        v, beta = rng.standard_normal((length, value_dim)), rng.uniform(0.02, 0.06, length)
        if kind.endswith("biased"):
            k[:, :2] += 2.5
            v[:, :2] += 3.0
        if kind.startswith("stops"):
            beta[stop:] = 0
        decay = decays[kind] if kind in decays else float(kind.split(",")[0])
        columns.append((q, k, v, np.full(length, np.log(decay)), beta))
    return _as_tokens(*(np.stack(column) for column in zip(*columns, strict=True)))


def _as_tokens(q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray) -> Tokens:
    """[B, T, ...] in float64, not normalised -> what a method takes, with one head per row."""
    q = q / np.linalg.norm(q, axis=-1, keepdims=True) * q.shape[-1] ** -0.5
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    return Tokens(*(jnp.asarray(x[:, :, None], jnp.float32) for x in (q, k, v, g, beta)))
