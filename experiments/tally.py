"""What a run remembers of the tokens it has seen: sums per stream, one bit per answer, state errors at some positions.

A tally is a pytree of NumPy arrays, so it is saved together with the caches and cannot disagree with them. `add_segment`
is pure. Sums are float64, per stream and octave of position, and added in the same order however often a run is killed.
"""

import dataclasses

import jax
import numpy as np

from experiments.metrics import octave
from experiments.tasks import Answers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tally:
    """Of one method; N streams, O octaves of position, A answers, P measured positions, L linear layers, H heads.

    Attributes:
      nll: float64 [N, O], sum of -log p(token), by the position of the predicted token.
      kl: float64 [N, O], sum of KL(exact || method).
      agreements: int64 [N, O], tokens for which the most probable one is that of `exact`.
      divergence: int64 [N], position of the first token for which it is not; -1 while there is none.
      answers_right: bool [A], whether every token of the answer was the most probable one.
      last_right: bool [N], whether the last token seen so far was; an answer may lie across two segments.
      state_errors: float32 [P, L, N, H], relative to the exact state; NaN until measured.
    """

    nll: np.ndarray
    kl: np.ndarray
    agreements: np.ndarray
    divergence: np.ndarray
    answers_right: np.ndarray
    last_right: np.ndarray
    state_errors: np.ndarray


def empty_tally(
    *, num_streams: int, num_tokens: int, num_answers: int, num_positions: int, num_layers: int, num_heads: int
) -> Tally:
    """The tally of a run that has seen nothing."""
    octaves = num_octaves(num_tokens)
    return Tally(
        nll=np.zeros((num_streams, octaves)),
        kl=np.zeros((num_streams, octaves)),
        agreements=np.zeros((num_streams, octaves), np.int64),
        divergence=np.full(num_streams, -1, np.int64),
        answers_right=np.zeros(num_answers, bool),
        last_right=np.zeros(num_streams, bool),
        state_errors=np.full((num_positions, num_layers, num_streams, num_heads), np.nan, np.float32),
    )


def num_octaves(num_tokens: int) -> int:
    """Octaves of the positions 1 .. num_tokens - 1 (position 0 is given, not predicted)."""
    return int(octave(np.array(num_tokens - 1))) + 1


def tokens_per_octave(num_tokens: int) -> np.ndarray:
    """int64 [O]: predicted tokens of one stream in each octave."""
    return np.bincount(octave(np.arange(1, num_tokens)), minlength=num_octaves(num_tokens))


def add_segment(
    tally: Tally,
    start: int,
    nll: np.ndarray,
    kl: np.ndarray,
    right: np.ndarray,
    agrees: np.ndarray,
    answers: Answers,
    num_tokens: int,
) -> Tally:
    """Adds the predictions made while reading tokens start .. start + S - 1, which are of the tokens one further on.

    Args:
      tally: The sums over what came before.
      start: First token read; at least one token comes after it.
      nll, kl: float [N, S].
      right, agrees: bool [N, S]; whether the most probable token was the right one, and the one of `exact`.
      answers: Those of all streams.
      num_tokens: T; a prediction of a token beyond the streams' end is ignored.

    Returns:
      The new tally.
    """
    count = min(nll.shape[1], num_tokens - 1 - start)
    nll, kl, right, agrees = (x[:, :count] for x in (nll, kl, right, agrees))
    position = np.arange(start + 1, start + 1 + count)
    bins = octave(position)
    sums = {"nll": tally.nll.copy(), "kl": tally.kl.copy(), "agreements": tally.agreements.copy()}
    for name, values in (("nll", nll), ("kl", kl), ("agreements", agrees)):
        for value in np.unique(bins):
            sums[name][:, value] += values[:, bins == value].sum(axis=1, dtype=sums[name].dtype)

    new = (tally.divergence < 0) & ~agrees.all(axis=1)
    divergence = np.where(new, position[np.argmin(agrees, axis=1)], tally.divergence)

    # Column j of `seen` is the token at position start + j.
    seen = np.concatenate([tally.last_right[:, None], right], axis=1)
    last = answers.position + answers.length - 1 - start
    here = (last >= 1) & (last <= count)
    graded = tally.answers_right.copy()
    graded[here] = True
    for back in range(int(answers.length.max(initial=1))):
        column = last - back
        part = here & (back < answers.length)
        graded[part] &= seen[answers.stream[part], column[part]]
    return dataclasses.replace(
        tally, **sums, divergence=divergence, answers_right=graded, last_right=seen[:, -1].copy()
    )


def add_state_errors(tally: Tally, index: int, errors: np.ndarray) -> Tally:
    """Enters the errors [L, N, H] measured at the `index`-th position."""
    state_errors = tally.state_errors.copy()
    state_errors[index] = errors
    return dataclasses.replace(tally, state_errors=state_errors)
