"""The recall and reasoning suite's scores: accuracy of every method on every task, and a verdict.

The rule, for each task:

*   Only answers beyond the attention's sight count (age >= the attention window): what is left is the recurrent state.
*   Intervals are 95 % bootstrap intervals over streams, each drawn again with all of its answers. The difference to
    `exact` is paired: the same answers in the same streams.
*   A task is *learned* if even the lower end of `exact`'s accuracy is `LEARNED` above the chance of a guess. On another one
    nothing can be lost, so it is not judged, and neither is a control.
*   A method *fails* if even the upper end of its difference to `exact` is below -`MARGIN`. It *passes* if even the lower end
    is not. In between it is *unclear*, as it is with fewer than `MIN_STREAMS` streams or `MIN_ANSWERS` answers, of which an
    interval would promise too much.

A method fails the suite with one failed task, and passes it by passing all that were judged.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from experiments import metrics, tasks
from experiments.lockstep import Lockstep, Progress

MARGIN = 0.05  # of the answers of a task, that a method may lose
LEARNED = 0.2  # above chance
MIN_STREAMS, MIN_ANSWERS = 5, 30
PASS, FAIL, UNCLEAR, NOT_LEARNED, CONTROL = "pass", "fail", "unclear", "not learned", "control"


def records(lockstep: Lockstep, progress: Progress) -> list[dict[str, Any]]:
    """Measures "task", "task_by_age" and "suite" (the verdict over all tasks) of every method, `exact` first."""
    window = lockstep.config.attention_window or 0
    right = [one.answers_right for one in progress.tallies]
    return score(lockstep.names, right, lockstep.streams.answers, len(lockstep.streams.tokens), window)


def score(
    names: Sequence[str], right: Sequence[np.ndarray], answers: tasks.Answers, num_streams: int, window: int
) -> list[dict[str, Any]]:
    """Scores methods.

    Args:
      names: Of M methods, `exact` first.
      right: Of each, bool [A]: which answers were right.
      answers: A answers of N streams.
      num_streams: N.
      window: What the attention sees; younger answers are left out.

    Returns:
      The records.
    """
    octave, result = metrics.octave(answers.age), []
    for name, hits in zip(names, right, strict=True):
        verdicts = []
        for kind in tasks.KINDS:
            chosen = (answers.kind == tasks.KINDS.index(kind)) & (answers.age >= window)
            found = _accuracy(hits, right[0], answers.stream, chosen, num_streams)
            verdict = _verdict(kind, found)
            verdicts.append(verdict)
            result.append({"method": name, "measure": "task", "kind": kind, **found, "verdict": verdict})
            for value in np.unique(octave[chosen]):
                found = _accuracy(hits, right[0], answers.stream, chosen & (octave == value), num_streams)
                result.append(
                    {"method": name, "measure": "task_by_age", "kind": kind, "min_age": int(2**value), **found}
                )
        result.append({"method": name, "measure": "suite", "verdict": overall(verdicts)})
    return result


def overall(verdicts: Iterable[str]) -> str:
    """The verdict over tasks: the worst of those that were judged."""
    judged = [verdict for verdict in (FAIL, UNCLEAR, PASS) if verdict in set(verdicts)]
    return judged[0] if judged else NOT_LEARNED


def is_lost(record: dict[str, Any]) -> bool:
    """Whether even the upper end of the difference to `exact` is below -`MARGIN`; of a record as JSON gives it back."""
    return float(record["difference_interval_95"][1]) < -MARGIN


def _verdict(kind: str, found: dict[str, Any]) -> str:
    if kind in tasks.CONTROLS:
        return CONTROL
    if not found["exact_interval_95"][0] >= tasks.CHANCE[kind] + LEARNED:  # also if there is no interval
        return NOT_LEARNED
    if found["streams"] < MIN_STREAMS or found["count"] < MIN_ANSWERS:
        return UNCLEAR
    if is_lost(found):
        return FAIL
    return PASS if found["difference_interval_95"][0] >= -MARGIN else UNCLEAR


def _accuracy(
    hits: np.ndarray, exact: np.ndarray, stream: np.ndarray, chosen: np.ndarray, num_streams: int
) -> dict[str, Any]:
    """Accuracy over the chosen answers, and its paired difference to `exact`, with intervals over streams."""

    def per_stream(values: np.ndarray) -> np.ndarray:
        return np.bincount(stream[chosen], weights=values[chosen], minlength=num_streams)

    counts, right, reference = (per_stream(x) for x in (np.ones(len(stream)), hits, exact))
    total = int(counts.sum())
    share, difference = (x.sum() / total if total else math.nan for x in (right, right - reference))
    return {
        "count": total, "streams": int((counts > 0).sum()), "correct": int(right.sum()), "accuracy": share,
        "interval_95": metrics.ratio_interval(right, counts), "difference": difference,
        "difference_interval_95": metrics.ratio_interval(right - reference, counts),
        "exact_interval_95": metrics.ratio_interval(reference, counts),
    }  # fmt: skip
