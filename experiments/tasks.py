"""Recall tasks woven into text, whose answers only the recurrent state can hold.

A stream is one long run of text with short commands between its lines. A value is written once and asked for later, after
16,000 bytes of other text if need be, and nothing shows it in between: with attention limited to a window, an answer that is
older than the window can only come out of the recurrent state. So accuracy as a function of the answer's *age* measures what
a storage format of that state has lost.

=============  ===================================================  ======================================================
kind           in the stream                                        what it needs
=============  ===================================================  ======================================================
register       ``set q7=4f;`` ... ``get q7=4f;``                    one association, kept; the key is written only once
overwritten    ``set`` 2 to 4 times with new values, then ``get``   the newest value: erase, then write
counter        ``up a;`` ``dn a;`` ... ``at a=3;``                  a sum that stays in 0..7
queue          ``put 4f;`` ... ``pop 4f;``                          values in the order of their arrival
permutation    ``mul r;`` ``mul s;`` ... ``prd=5;``                 the product in S3. A control: with 0 < beta < 1 a gated
                                                                    delta rule cannot follow it for long
=============  ===================================================  ======================================================

Only the bytes of the answers are scored. Everything is NumPy and a pure function of its seed.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Mapping

import numpy as np

from experiments import corpus

KINDS = ("register", "overwritten", "counter", "queue", "permutation")
DEFAULT_MIX: Mapping[str, float] = {
    "register": 0.4, "overwritten": 0.3, "counter": 0.1, "queue": 0.1, "permutation": 0.1,
}  # fmt: skip
CHANCE = {"register": 1 / 256, "overwritten": 1 / 256, "counter": 1 / 8, "queue": 1 / 256, "permutation": 1 / 6}

_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_KEYS = [f"{letter}{digit}" for letter in _ALPHABET for digit in range(10)]
_NUM_HOT_KEYS = 32  # keys that are overwritten again and again; the others are written once
_MAX_LIVE = 64  # values waiting for their question
_MAX_QUEUE = 8
_COUNTERS = "abcd"
_PERMUTATIONS = tuple(itertools.permutations(range(3)))
_COUNTER_LIMIT = 7
_MEAN_TEXT_SPAN = 120  # bytes of text between two groups of commands
_SHORT_AGE = 1024  # the last three kinds change all the time, so that a late question would only be a rare one
_FIELDS = ("position", "length", "age", "kind")


@dataclasses.dataclass(frozen=True)
class Answers:
    """The scored answers of one or more streams; all arrays int32 [A].

    Attributes:
        stream: Index of the stream.
        position: Index of the answer's first token in its stream, so the logits at ``position - 1`` must predict it.
        length: Number of answer tokens (2 for values in hex, else 1).
        age: Tokens since the value was last written. The value appears nowhere in between.
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
        age: int32 [N, T]: at a token that belongs to an answer, the answer's age in tokens (> 0); 0 everywhere else.
        answers: Every answer that lies inside the streams as a whole.
    """

    tokens: np.ndarray
    age: np.ndarray
    answers: Answers

    @property
    def score(self) -> np.ndarray:
        """bool [N, T]: True at the tokens whose prediction is scored."""
        return self.age > 0


def recall_streams(
    num_streams: int,
    num_tokens: int,
    seed: int = 0,
    *,
    text: np.ndarray | None = None,
    mix: Mapping[str, float] = DEFAULT_MIX,
    synthetic_share: float = 0.4,
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
            By default 40 % registers, 30 % overwritten, 10 % each of the rest.
        synthetic_share: The share of commands in all tokens, 0 < share <= 0.8.
        min_age: Youngest age asked for.
        max_age: Oldest. Ages are log-uniform in between; the true age is a little larger (a command waits for the end of
            a line), and ages near ``num_tokens`` are rare because both ends must fit in.

    Returns:
        The streams and their answers.

    Raises:
        ValueError: If an argument is out of range.
    """
    _check(num_tokens, mix, synthetic_share, min_age, max_age)
    text = corpus.load_held_out_text() if text is None else text
    spans = corpus.text_spans(text, num_streams, num_tokens, seed)
    tokens = np.zeros((num_streams, num_tokens), np.int32)
    age = np.zeros((num_streams, num_tokens), np.int32)
    columns: list[np.ndarray] = []
    for index in range(num_streams):
        weaver = _Weaver(np.random.default_rng([seed, index]), mix, synthetic_share, min_age, max_age)
        tokens[index], found = weaver.weave(spans[index].tobytes(), num_tokens)
        for position, length, answer_age, _ in found:
            age[index, position : position + length] = answer_age
        columns.append(np.concatenate([np.full((len(found), 1), index, np.int32), found], axis=1))
    table = np.concatenate(columns).astype(np.int32).reshape(-1, 1 + len(_FIELDS))
    answers = Answers(stream=table[:, 0], **{name: table[:, 1 + i] for i, name in enumerate(_FIELDS)})
    return RecallStreams(tokens, age, answers)


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
    right = predicted == streams.tokens
    answers = streams.answers
    last = answers.position + answers.length - 1
    return right[answers.stream, answers.position] & right[answers.stream, last]


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


class _Weaver:
    """Writes one stream: lines of text, and between them commands, each question at the time that it is due."""

    def __init__(self, rng: np.random.Generator, mix: Mapping[str, float], share: float, min_age: int, max_age: int):
        self.uniform = itertools.chain.from_iterable(rng.random(4096).tolist() for _ in itertools.count())
        self.share = share
        self.min_age, self.max_age = min_age, max_age
        self.mix = {kind: weight for kind, weight in mix.items() if weight > 0}
        self.spent = dict.fromkeys(self.mix, 0)  # tokens used by each kind
        self.commands = {
            "register": self._register, "overwritten": self._overwritten, "counter": self._counter,
            "queue": self._queue, "permutation": self._permutation,
        }  # fmt: skip
        keys = [_KEYS[i] for i in rng.permutation(len(_KEYS))]  # before the first uniform number is drawn
        self.hot_keys, self.fresh_keys = keys[:_NUM_HOT_KEYS], keys[_NUM_HOT_KEYS:]
        self.written: dict[str, tuple[str, int]] = {}  # key -> newest value and its position
        self.queue: list[tuple[str, int]] = []
        self.queue_due = 0
        self.counters = {
            name: [0, 0, False] for name in _COUNTERS
        }  # value, position of the last change, asked for soon
        self.product, self.product_position, self.product_asked = (0, 1, 2), 0, False
        self.due: list[tuple[int, int, str, tuple]] = []  # heap of (position, serial number, kind, what to do)
        self.serial = 0
        self.out = bytearray()
        self.synthetic = 0
        self.answers: list[tuple[int, int, int, int]] = []

    def weave(self, text: bytes, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens int32 [num_tokens] and the answers as rows of ``_FIELDS``. ``text`` must be that long too."""
        cursor = 0
        while len(self.out) < num_tokens - 1:
            span = 20 - int((_MEAN_TEXT_SPAN - 20) * math.log1p(-next(self.uniform)))  # exponential, at least 20
            line_end = text.find(b"\n", cursor + span, cursor + span + 200)
            end = cursor + span if line_end < 0 else line_end + 1
            self.out += text[cursor:end]
            cursor = end
            while self.synthetic < self.share * len(self.out) and self._command():
                pass
        tokens = np.full(num_tokens, corpus.BOS, np.int32)
        tokens[1:] = corpus.to_tokens(np.frombuffer(bytes(self.out[: num_tokens - 1]), np.uint8))
        rows = [(position + 1, *rest) for position, *rest in self.answers]  # + 1 for BOS
        table = np.array(rows, np.int32).reshape(-1, len(_FIELDS))
        return tokens, table[table[:, 0] + table[:, 1] <= num_tokens]

    def _command(self) -> bool:
        """Writes the command that is due, or else a new one of the kind that is furthest behind its share."""
        if self.due and self.due[0][0] <= len(self.out):
            _, _, kind, arguments = heapq.heappop(self.due)
        else:
            full = {
                "register": not self.fresh_keys,
                "overwritten": not self.hot_keys,
                "queue": len(self.queue) >= _MAX_QUEUE,
            }
            startable = [name for name in self.mix if not full.get(name)] if len(self.due) < _MAX_LIVE else []
            if not startable:
                return False
            kind, arguments = min(startable, key=lambda name: self.spent[name] / self.mix[name]), ()
        before = len(self.out)
        self.commands[kind](*arguments)
        self.spent[kind] += len(self.out) - before
        self.synthetic += len(self.out) - before
        return True

    def _register(self, key: str = "") -> None:
        if key:
            self._get("register", key)
            return
        key = self.fresh_keys.pop()
        self._set(key)
        self._later("register", (key,))

    def _overwritten(self, key: str = "", writes_left: int = 0) -> None:
        if not key:
            key = self.hot_keys.pop(self._integer(len(self.hot_keys)))
            # A key that was used before is overwritten by one write; a new one needs two.
            writes_left = 1 + self._integer(3) + (key not in self.written)
        if writes_left > 0:
            self._set(key)
            self._later("overwritten", (key, writes_left - 1))
        else:
            self._get("overwritten", key)
            self.hot_keys.append(key)

    def _counter(self, name: str | None = None) -> None:
        if name is None:
            name = _COUNTERS[self._integer(len(_COUNTERS))]
            counter = self.counters[name]
            up = counter[0] == 0 or (counter[0] < _COUNTER_LIMIT and self._integer(2) == 1)
            counter[0] += 1 if up else -1
            counter[1] = self._write(f"{'up' if up else 'dn'} {name};\n")
            if not counter[2]:
                counter[2] = True
                self._later("counter", (name,))
        else:
            value, changed, _ = self.counters[name]
            self.counters[name][2] = False
            self._answer("counter", f"at {name}=", str(value), changed)

    def _queue(self, pop: bool = False) -> None:
        if pop:
            value, written_at = self.queue.pop(0)
            self._answer("queue", "pop ", value, written_at)
        else:
            value = self._value()
            self.queue.append((value, self._write(f"put {value};\n") + len("put ")))
            self.queue_due = self._later("queue", (True,), not_before=self.queue_due)

    def _permutation(self, ask: bool = False) -> None:
        if ask:
            self.product_asked = False
            index = _PERMUTATIONS.index(self.product)
            self._answer("permutation", "prd=", str(index), self.product_position)
        else:
            generator = "rs"[self._integer(2)]
            a, b, c = self.product
            self.product = (b, c, a) if generator == "r" else (b, a, c)
            self.product_position = self._write(f"mul {generator};\n")
            if not self.product_asked:
                self.product_asked = True
                self._later("permutation", (True,))

    def _integer(self, below: int) -> int:
        return int(below * next(self.uniform))

    def _value(self) -> str:
        return f"{self._integer(256):02x}"

    def _set(self, key: str) -> None:
        value = self._value()
        while key in self.written and value == self.written[key][0]:
            value = self._value()  # an overwrite always changes the value
        self.written[key] = (value, self._write(f"set {key}={value};\n") + len(f"set {key}="))

    def _get(self, kind: str, key: str) -> None:
        value, position = self.written[key]
        self._answer(kind, f"get {key}=", value, position)

    def _answer(self, kind: str, question: str, value: str, written_at: int) -> None:
        position = self._write(f"{question}{value};\n") + len(question)
        self.answers.append((position, len(value), position - written_at, KINDS.index(kind)))

    def _later(self, kind: str, arguments: tuple, not_before: int = 0) -> int:
        """Plans a command of this kind after a random age, and returns the position from which it is due."""
        longest = (
            self.max_age if kind in ("register", "overwritten") else min(self.max_age, max(self.min_age, _SHORT_AGE))
        )
        age = int(self.min_age * (longest / self.min_age) ** next(self.uniform))  # log-uniform
        position = max(len(self.out) + age, not_before)
        heapq.heappush(self.due, (position, self.serial, kind, arguments))
        self.serial += 1
        return position

    def _write(self, command: str) -> int:
        """Appends a command and returns the position of its first byte."""
        position = len(self.out)
        self.out += command.encode()
        return position


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
