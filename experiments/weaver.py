"""Writes one stream of recall tasks: lines of text, and between them commands, each question at the time that it is due.

Every running task is a generator: it writes its commands and yields how many tokens it wants to wait before it goes on, so
that the course of a task reads from top to bottom. The weaver keeps the generators in the order in which they are due.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Generator, Mapping

import numpy as np

from experiments import corpus

Task = Generator[int, None, None]
Answer = tuple[int, int, int, str]  # position, length, age, kind

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_KEYS = [f"{letter}{digit}" for letter in _LETTERS + _LETTERS.upper() for digit in range(10)]
_NUM_HOT_KEYS = 32  # keys that are overwritten again and again; the others are written once
_COUNTERS = "abcdefgh"
_LARGEST_COUNT = 7
_COPIED_LETTERS = 8
_MAX_LIVE = 64  # running tasks
_MEAN_TEXT_SPAN = 120  # bytes of text between two groups of commands


class Weaver:
    """One stream in the making; see `experiments.tasks` for the commands."""

    def __init__(self, rng: np.random.Generator, mix: Mapping[str, float], share: float, min_age: int, max_age: int):
        """Nothing is written yet.

        Args:
            rng: The source of everything random.
            mix: Share of each kind in the commands.
            share: Share of the commands in all tokens.
            min_age: Youngest age asked for, in tokens.
            max_age: Oldest.
        """
        self._uniform = itertools.chain.from_iterable(rng.random(4096).tolist() for _ in itertools.count())
        self._mix = {kind: weight for kind, weight in mix.items() if weight > 0}
        self._spent = dict.fromkeys(self._mix, 0)  # tokens used by each kind
        self._share, self._min_age, self._max_age = share, min_age, max_age
        keys = [_KEYS[i] for i in rng.permutation(len(_KEYS))]
        self._hot_keys, self._fresh_keys = keys[:_NUM_HOT_KEYS], keys[_NUM_HOT_KEYS:]
        self._labels, self._counters, self._bits = list(_LETTERS), list(_COUNTERS), ["bit"]
        # Of each kind: how it runs, and the names of which it needs so many.
        self._tasks: dict[str, tuple[Callable[[], Task], list[str], int]] = {
            "register": (self._register, self._fresh_keys, 1),
            "overwritten": (self._overwritten, self._hot_keys, 1),
            "counter": (self._counter, self._counters, 1),
            "copy": (self._copy, self._labels, 1),
            "chain": (self._chain, self._fresh_keys, 2),
            "parity": (self._parity, self._bits, 1),
        }
        self._newest: dict[str, str] = {}  # value of each overwritten key
        self._due: list[tuple[int, int, str, Task]] = []  # heap: position, serial number, kind, task
        self._serial = itertools.count()
        self._out = bytearray()
        self._synthetic = 0
        self._answers: list[Answer] = []

    def weave(self, text: bytes, num_tokens: int) -> tuple[np.ndarray, list[Answer]]:
        """Writes the stream.

        Args:
            text: What the commands are woven into; at least ``num_tokens`` bytes.
            num_tokens: T.

        Returns:
            Tokens int32 [T], the first one BOS, and of every answer that lies inside: position, length, age and kind.
        """
        cursor = 0
        while len(self._out) < num_tokens - 1:
            span = 20 - int((_MEAN_TEXT_SPAN - 20) * math.log1p(-next(self._uniform)))  # exponential, at least 20
            line_end = text.find(b"\n", cursor + span, cursor + span + 200)
            end = cursor + span if line_end < 0 else line_end + 1
            self._out += text[cursor:end]
            cursor = end
            while self._synthetic < self._share * len(self._out) and self._advance():
                pass
        tokens = np.full(num_tokens, corpus.BOS, np.int32)
        tokens[1:] = corpus.to_tokens(np.frombuffer(bytes(self._out[: num_tokens - 1]), np.uint8))
        answers = [(position + 1, length, age, kind) for position, length, age, kind in self._answers]  # + 1 for BOS
        return tokens, [answer for answer in answers if answer[0] + answer[1] <= num_tokens]

    def _advance(self) -> bool:
        """Lets the task that is due go on, or else begins one of the kind that is furthest behind its share."""
        if self._due and self._due[0][0] <= len(self._out):
            _, _, kind, task = heapq.heappop(self._due)
        else:
            if len(self._due) >= _MAX_LIVE:
                return False
            startable = [kind for kind in self._mix if len(self._tasks[kind][1]) >= self._tasks[kind][2]]
            if not startable:
                return False
            kind = min(startable, key=lambda kind: self._spent[kind] / self._mix[kind])
            task = self._tasks[kind][0]()
        before = len(self._out)
        wait = next(task, None)
        if wait is not None:
            heapq.heappush(self._due, (len(self._out) + wait, next(self._serial), kind, task))
        self._spent[kind] += len(self._out) - before
        self._synthetic += len(self._out) - before
        return True

    def _register(self) -> Task:
        """One value under a key that occurs nowhere else."""
        key, value = self._fresh_keys.pop(), self._value()
        written = self._write(f"set {key}=", value)
        yield self._age()
        self._answer("register", f"get {key}=", value, written)

    def _overwritten(self) -> Task:
        """Two to four values under one key, of which the newest is asked for."""
        key = self._take(self._hot_keys)
        value = self._newest.get(key, "")
        written = 0
        # A key that was used before is overwritten by one write; a new one needs two.
        for _ in range(1 + self._integer(3) + (not value)):
            while value == self._newest.get(key, ""):
                value = self._value()
            self._newest[key] = value
            written = self._write(f"set {key}=", value)
            yield self._age()
        self._answer("overwritten", f"get {key}=", value, written)
        self._hot_keys.append(key)

    def _counter(self) -> Task:
        """A start, 1 to 6 changes by one that stay in 0..7, and the question after them."""
        name = self._take(self._counters)
        count = self._integer(_LARGEST_COUNT + 1)
        written = self._write(f"let {name}=", str(count))
        first, *waits = self._parts(2 + self._integer(6))
        yield first
        for wait in waits:
            up = count == 0 or (count < _LARGEST_COUNT and self._integer(2) == 1)
            count += 1 if up else -1
            self._write("up " if up else "dn ", name)
            yield wait
        self._answer("counter", f"at {name}=", str(count), written)
        self._counters.append(name)

    def _copy(self) -> Task:
        """A string of letters under a label."""
        label = self._take(self._labels)
        value = "".join(_LETTERS[self._integer(len(_LETTERS))] for _ in range(_COPIED_LETTERS))
        written = self._write(f"mem {label}:", value)
        yield self._age()
        self._answer("copy", f"say {label}:", value, written)
        self._labels.append(label)

    def _chain(self) -> Task:
        """A value under one key, another key that points to the first, and the question for what the second leads to."""
        key, pointer, value = self._fresh_keys.pop(), self._fresh_keys.pop(), self._value()
        written = self._write(f"set {key}=", value)
        first, second = self._parts(2)
        yield first
        self._write(f"ptr {pointer}>", key)
        yield second
        self._answer("chain", f"via {pointer}>", f"{key}={value}", written)

    def _parity(self) -> Task:
        """A bit, 8 to 16 flips, and the question after them."""
        name, bit = self._take(self._bits), self._integer(2)
        written = self._write(f"{name}=", str(bit))
        first, *waits = self._parts(9 + self._integer(9))
        yield first
        for wait in waits:
            bit = 1 - bit
            self._write("flip", "")
            yield wait
        self._answer("parity", "odd=", str(bit), written)
        self._bits.append(name)

    def _integer(self, below: int) -> int:
        return int(below * next(self._uniform))

    def _value(self) -> str:
        return f"{self._integer(256):02x}"

    def _take(self, names: list[str]) -> str:
        return names.pop(self._integer(len(names)))

    def _age(self) -> int:
        """A random age between the youngest and the oldest; each octave is likelier than the one below it."""
        return int(self._min_age * (self._max_age / self._min_age) ** math.sqrt(next(self._uniform)))

    def _parts(self, count: int) -> list[int]:
        """A random age, cut into parts at random places."""
        age = self._age()
        cuts = [0, *sorted(self._integer(age) for _ in range(count - 1)), age]
        return [end - start for start, end in itertools.pairwise(cuts)]

    def _write(self, command: str, value: str) -> int:
        """Appends a command and returns the position of its value."""
        self._out += f"{command}{value};\n".encode()
        return len(self._out) - len(value) - 2

    def _answer(self, kind: str, question: str, value: str, written: int) -> None:
        """Appends a question with its answer, and notes where the answer is."""
        position = self._write(question, value)
        self._answers.append((position, len(value), position - written, kind))
