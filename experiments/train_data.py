"""The endless supply of training segments: every row of the batch is its own stream, cut into segments in order.

What a row reads at a step follows from the step alone (the plan of its streams is replayed, not stored), so a resumed run
continues with exactly the tokens that it would have seen.
"""

import dataclasses
import itertools
import multiprocessing
import queue
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments import corpus, tasks

_FIRST_KINDS = ("register", "overwritten")  # what the curriculum begins with


@dataclasses.dataclass(frozen=True)
class Plan:
    """How streams are drawn.

    Attributes:
        batch: Rows B.
        segment: Tokens T that a row advances in one step.
        steps: Steps of the whole run; the curriculum depends on it.
        max_age: Oldest answer asked for once the curriculum is over.
        max_stream: Tokens after which a row starts over with an empty state, at most.
        curriculum: Share of the run that is made easier: the oldest age grows, geometrically, from ``first_max_age``, the
            share of commands falls from ``first_synthetic_share``, and all kinds but the registers come in during its
            first third.
        first_max_age: Oldest age at the first step.
        first_synthetic_share: Share of commands in the tokens at the first step.
        synthetic_share: The same from the end of the curriculum on.
        mix: Share of each kind of task in the commands, likewise.
        seed: Chooses all streams.
    """

    batch: int
    segment: int
    steps: int
    max_age: int = 16384
    max_stream: int = 32768
    curriculum: float = 0.4
    first_max_age: int = 64
    first_synthetic_share: float = 0.8
    synthetic_share: float = tasks.DEFAULT_SHARE
    mix: Mapping[str, float] = dataclasses.field(default_factory=lambda: dict(tasks.DEFAULT_MIX))
    seed: int = 0

    def __post_init__(self):
        if min(self.batch, self.segment, self.steps) < 1 or self.max_stream % self.segment:
            raise ValueError(
                f"batch, segment and steps must be positive and max_stream a multiple of segment, but they are "
                f"{self.batch}, {self.segment}, {self.steps} and {self.max_stream}."
            )

    def progress(self, step: int) -> float:
        """How much of the curriculum lies behind a stream that starts at this step, 0 to 1."""
        return min(1.0, step / max(1.0, self.curriculum * self.steps))

    def oldest_age(self, step: int) -> int:
        """The oldest age asked for in a stream that starts at this step."""
        first = min(self.first_max_age, self.max_age)
        return int(first * (self.max_age / first) ** self.progress(step))

    def tasks_at(self, step: int) -> dict:
        """The options of ``tasks.recall_streams`` for a stream that starts at this step."""
        progress, oldest = self.progress(step), self.oldest_age(step)
        share = self.first_synthetic_share + progress * (self.synthetic_share - self.first_synthetic_share)
        mix = {
            kind: weight * (1.0 if kind in _FIRST_KINDS else min(1.0, 3 * progress))
            for kind, weight in self.mix.items()
        }
        return {"synthetic_share": share, "mix": mix, "min_age": min(32, oldest), "max_age": oldest}

    def segments_of_stream(self, step: int) -> int:
        """How many segments a stream that starts at this step has: twice its oldest age, up to ``max_stream``."""
        return max(1, min(self.max_stream, 2 * self.oldest_age(step)) // self.segment)


@dataclasses.dataclass(frozen=True)
class Segment:
    """One step's tokens.

    Attributes:
        tokens: int32 [B, T + 1]; the last is the target of the one before it, and the first of the next segment.
        task: int32 [B, T + 1]: 1 + the kind at the tokens of an answer, else 0 (as ``tasks.RecallStreams.task``).
        age: int32 [B, T + 1]: the age in tokens at the tokens of an answer, else 0.
        fresh: bool [B]; True where the row starts a new stream here and must forget its state.
    """

    tokens: np.ndarray
    task: np.ndarray
    age: np.ndarray
    fresh: np.ndarray


def segments(plan: Plan, text: np.ndarray, first_step: int = 0, rows: Sequence[int] | None = None) -> Iterator[Segment]:
    """Yields the segments of steps ``first_step``, ``first_step`` + 1, ... for ever.

    Args:
        plan: How streams are drawn.
        text: uint8 [bytes], the training text.
        first_step: Where to start; everything before it is skipped without being generated.
        rows: The rows of the batch that are wanted; all by default.
    """
    streams = [_Row(plan, text, row, first_step) for row in (range(plan.batch) if rows is None else rows)]
    for step in itertools.count(first_step):
        parts = [row.advance(step) for row in streams]
        yield Segment(*(np.stack(column) for column in zip(*parts, strict=True)))


def parallel_segments(
    plan: Plan, corpus_directory: str, first_step: int = 0, *, workers: int = 4, depth: int = 8
) -> Iterator[Segment]:
    """The same segments, made by processes that share the rows and stay at most ``depth`` steps ahead.

    Args:
        plan: How streams are drawn.
        corpus_directory: Where ``corpus.load_training_text`` finds the text.
        first_step: Where to start.
        workers: Number of processes, at most one per row.
        depth: Steps made in advance.
    """
    context = multiprocessing.get_context("spawn")
    shares = [list(map(int, share)) for share in np.array_split(np.arange(plan.batch), min(workers, plan.batch))]
    queues = [context.Queue(maxsize=depth) for _ in shares]
    for share, ready in zip(shares, queues, strict=True):
        context.Process(target=_produce, args=(plan, corpus_directory, first_step, share, ready), daemon=True).start()
    while True:
        parts = [ready.get() for ready in queues]
        for part in parts:
            if isinstance(part, Exception):
                raise part
        yield Segment(
            **{
                field.name: np.concatenate([getattr(part, field.name) for part in parts])
                for field in dataclasses.fields(Segment)
            }
        )


def _produce(plan: Plan, corpus_directory: str, first_step: int, rows: list[int], ready: Any) -> None:
    """What one process does; an error is handed to the reader, which raises it. A killed reader leaves none behind."""
    reader = multiprocessing.parent_process()
    try:
        for segment in segments(plan, corpus.load_training_text(corpus_directory), first_step, rows):
            while True:
                try:
                    ready.put(segment, timeout=5)
                    break
                except queue.Full:
                    if reader is not None and not reader.is_alive():
                        return
    except Exception as error:
        ready.put(error)


class _Row:
    """The streams of one row, one after another."""

    def __init__(self, plan: Plan, text: np.ndarray, index: int, step: int):
        self.plan, self.text, self.index = plan, text, index
        self.start, self.count = 0, 0  # first step and number of the current stream
        # The first streams are cut short at different places, or all rows would start over together for ever.
        longest = plan.max_stream // plan.segment
        self.length = 1 + int(np.random.default_rng([plan.seed, index]).integers(longest))
        self.stream: tasks.RecallStreams | None = None  # the current one, once generated
        while self.start + self.length <= step:
            self._next_stream()

    def advance(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.bool_]:
        if self.start + self.length <= step:
            self._next_stream()
        if self.stream is None:
            self.stream = self._generate()
        offset = (step - self.start) * self.plan.segment
        window = slice(offset, offset + self.plan.segment + 1)
        tokens, task, age = (x[0, window] for x in (self.stream.tokens, self.stream.task, self.stream.age))
        return tokens, task, age, np.bool_(offset == 0)

    def _next_stream(self) -> None:
        self.start += self.length
        self.count += 1
        self.length = self.plan.segments_of_stream(self.start)
        self.stream = None

    def _generate(self) -> tasks.RecallStreams:
        seed = int(np.random.SeedSequence([self.plan.seed, self.index, self.count]).generate_state(1)[0])
        num_tokens = self.length * self.plan.segment + 1
        return tasks.recall_streams(1, num_tokens, seed, text=self.text, **self.plan.tasks_at(self.start))
