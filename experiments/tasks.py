"""Recall tasks woven into text, whose answers only the recurrent state can hold.

A stream is one long run of text with short commands between its lines. A value is written once and asked for later, after
16,000 bytes of other text if need be, and nothing shows it in between: with attention limited to a window, an answer that is
older than the window can only come out of the recurrent state. So accuracy as a function of the answer's *age* measures what
a storage format of that state has lost.

===========  ====================================================  =====================================================
kind         in the stream                                         what it needs
===========  ====================================================  =====================================================
register     ``set q7=4f;`` ... ``get q7=4f;``                     one association, kept; the key is written only once
overwritten  ``set`` 2 to 4 times with new values, then ``get``    the newest value: erase, then write
counter      ``let a=3;`` ``up a;`` ... ``dn a;`` ... ``at a=3;``  a sum of 1 to 6 changes, which stays in 0..7
copy         ``mem k:hvkqzwpr;`` ... ``say k:hvkqzwpr;``           a string, every letter of it
chain        ``set q7=4f;`` ... ``ptr Z3>q7;`` ...                 two hops: the key, then its value. As by a model that
             ``via Z3>q7=4f;``                                     reasons aloud, the first hop is written down too
parity       ``bit=1;`` ``flip;`` 8 to 16 times, ``odd=0;``        a control: with eigenvalues between 0 and 1, a gated
                                                                   delta rule cannot follow it for long. Not in any total
===========  ====================================================  =====================================================

Only the bytes of the answers are scored. Everything is NumPy and a pure function of its seed.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from experiments import corpus
from experiments.weaver import Weaver

KINDS = ("register", "overwritten", "counter", "copy", "chain", "parity")
CONTROLS = ("parity",)
DEFAULT_MIX: Mapping[str, float] = {
    "register": 0.25, "overwritten": 0.2, "counter": 0.15, "copy": 0.15, "chain": 0.2, "parity": 0.05,
}  # fmt: skip
DEFAULT_SHARE = 0.25
LENGTHS = {"register": 2, "overwritten": 2, "counter": 1, "copy": 8, "chain": 5, "parity": 1}  # of an answer, in tokens
CHANCE = {
    "register": 1 / 256, "overwritten": 1 / 256, "counter": 1 / 8, "copy": 0.0, "chain": 0.0, "parity": 1 / 2,
}  # of a guess that knows the task  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Answers:
    """The scored answers of one or more streams; all arrays int32 [A].

    Attributes:
        stream: Index of the stream.
        position: Index of the answer's first token in its stream, so the logits at ``position - 1`` must predict it.
        length: Number of answer tokens, from ``LENGTHS``.
        age: Tokens since the oldest write that the answer depends on: of the value, the string, the counter's start, or
            the last link of a chain. The answer appears nowhere in between.
        kind: Index into ``KINDS``.
    """

    stream: np.ndarray
    position: np.ndarray
    length: np.ndarray
    age: np.ndarray
    kind: np.ndarray

    def __len__(self) -> int:
        return len(self.stream)


@dataclasses.dataclass(frozen=True)
class RecallStreams:
    """Streams of equal length.

    Attributes:
        tokens: int32 [N, T], starting with BOS.
        task: int32 [N, T]: at a token that belongs to an answer, 1 + the answer's kind; 0 everywhere else.
        age: int32 [N, T]: at a token that belongs to an answer, the answer's age in tokens (> 0); 0 everywhere else.
        answers: Every answer that lies inside the streams as a whole.
    """

    tokens: np.ndarray
    task: np.ndarray
    age: np.ndarray
    answers: Answers

    @property
    def score(self) -> np.ndarray:
        """bool [N, T]: True at the tokens whose prediction is scored."""
        return self.task > 0


def recall_streams(
    num_streams: int,
    num_tokens: int,
    seed: int = 0,
    *,
    text: np.ndarray | None = None,
    mix: Mapping[str, float] = DEFAULT_MIX,
    synthetic_share: float = DEFAULT_SHARE,
    min_age: int = 32,
    max_age: int = 16384,
) -> RecallStreams:
    """Makes recall streams, the same for the same arguments on every machine.

    Args:
        num_streams: N.
        num_tokens: T, at least 256.
        seed: Chooses text and tasks. Stream n depends on (seed, n) and on the text only.
        text: uint8 [bytes] to weave the tasks into; the committed held-out text by default.
        mix: The share of each kind in the synthetic tokens; kinds left out do not occur.
        synthetic_share: The share of commands in all tokens, 0 < share <= 0.8.
        min_age: Youngest age asked for.
        max_age: Oldest. Between them, the density over the logarithm of the age grows in proportion to it: old answers
            are what is hard. The true age is a little larger (a command waits for the end of a line), and ages near
            ``num_tokens`` are rare because both ends must fit in.

    Returns:
        The streams and their answers.

    Raises:
        ValueError: If an argument is out of range.
    """
    _check(num_tokens, mix, synthetic_share, min_age, max_age)
    text = corpus.load_held_out_text() if text is None else text
    spans = corpus.text_spans(text, num_streams, num_tokens, seed)
    tokens, task, age = np.zeros((3, num_streams, num_tokens), np.int32)
    rows: list[tuple[int, ...]] = []
    for index in range(num_streams):
        weaver = Weaver(np.random.default_rng([seed, index]), mix, synthetic_share, min_age, max_age)
        tokens[index], found = weaver.weave(spans[index].tobytes(), num_tokens)
        for position, length, answer_age, kind in found:
            number = KINDS.index(kind)
            task[index, position : position + length] = 1 + number
            age[index, position : position + length] = answer_age
            rows.append((index, position, length, answer_age, number))
    columns = np.array(rows, np.int32).reshape(-1, 5).T
    return RecallStreams(tokens, task, age, Answers(*columns))


def grade(streams: RecallStreams, predicted: np.ndarray) -> np.ndarray:
    """Marks each answer right or wrong.

    Args:
        streams: The streams of A answers.
        predicted: Integers [N, T]; ``predicted[n, t]`` is the prediction *of* ``tokens[n, t]`` made before seeing it. With
            ``logits`` [N, T, vocabulary] of the whole streams: ``np.roll(logits.argmax(-1), 1, axis=1)``.

    Returns:
        bool [A]: True where every token of the answer was predicted.
    """
    if predicted.shape != streams.tokens.shape:
        raise ValueError(
            f"predicted must have the shape of the tokens {streams.tokens.shape}, but has {predicted.shape}."
        )
    wrong_before = np.cumsum(predicted != streams.tokens, axis=1)
    answers = streams.answers  # none begins at position 0, which is BOS
    first, last = answers.position - 1, answers.position + answers.length - 1
    return wrong_before[answers.stream, first] == wrong_before[answers.stream, last]


def accuracy_by_age(answers: Answers, correct: np.ndarray, *, kinds: tuple[str, ...] = KINDS) -> list[dict]:
    """Accuracy for each kind in octaves of age.

    Args:
        answers: A answers.
        correct: bool [A], from ``grade``.
        kinds: The kinds wanted.

    Returns:
        One row per kind and octave that has answers: kind, min_age (a power of two: ages in [min_age, 2 min_age)), count,
        correct (how many) and accuracy.
    """
    octave = np.floor(np.log2(np.maximum(answers.age, 1))).astype(int)
    rows = []
    for kind in kinds:
        of_kind = answers.kind == KINDS.index(kind)
        for value in np.unique(octave[of_kind]):
            chosen = of_kind & (octave == value)
            count, hits = int(chosen.sum()), int(correct[chosen].sum())
            rows.append(
                {"kind": kind, "min_age": int(2**value), "count": count, "correct": hits, "accuracy": hits / count}
            )
    return rows


def _check(num_tokens: int, mix: Mapping[str, float], share: float, min_age: int, max_age: int) -> None:
    if num_tokens < 256:
        raise ValueError(f"num_tokens must be at least 256, but is {num_tokens}: a shorter stream asks for nothing.")
    unknown = sorted(set(mix) - set(KINDS))
    if unknown or not any(weight > 0 for weight in mix.values()) or any(weight < 0 for weight in mix.values()):
        raise ValueError(f"mix must give non-negative shares, one of them positive, to {KINDS}, but is {dict(mix)}.")
    if not 0 < share <= 0.8:
        raise ValueError(
            f"synthetic_share must lie in (0, 0.8], but is {share}: the tasks stand between lines of text."
        )
    if not 16 <= min_age <= max_age:
        raise ValueError(f"Ages must satisfy 16 <= min_age <= max_age, but are {min_age} and {max_age}.")
