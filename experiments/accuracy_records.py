"""From the tallies of a finished run to records: one dictionary per number or short list of numbers."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from experiments import metrics, tally, tasks
from experiments.lockstep import Lockstep, Progress
from experiments.tally import Tally


def records(lockstep: Lockstep, progress: Progress) -> list[dict[str, Any]]:
    """Every number of a finished run, one dictionary each, told apart by "measure" and "method"."""
    result: list[dict[str, Any]] = []
    exact = progress.tallies[0]
    layers = [i for i, kind in enumerate(lockstep.config.layer_types) if kind == "linear_attention"]
    for name, sizes, one in zip(lockstep.names, lockstep.state_bytes(progress), progress.tallies, strict=True):
        found = [
            {"measure": "bytes_per_element", **sizes},
            *_quality(one, exact, lockstep),
            *_recall(one, lockstep),
            *_state_errors(one, layers, lockstep.measure_at),
        ]
        result += [{"method": name, **record} for record in found]
    return [*result, *_additions(lockstep, progress, layers)]


NAMED_POSITIONS = (1024, 4096, 16384, 65536)  # at which each layer is reported, and the end
# Each part of LeapQuant added to what it is compared with.
_ADDITIONS = (
    ("step-int8", "window-int8"),
    ("window-int8", "window-int8+smoothing"),
    ("window-int8+smoothing", "leapquant-int8-kept"),
    ("window-int8", "window-int8+compensators"),
    ("window-int8+compensators", "leapquant-int8-kept"),
    ("leapquant-int8-paper", "leapquant-int8-kept"),
    ("leapquant-int8-kept", "leapquant-int8"),
)


def _additions(lockstep: Lockstep, progress: Progress, layers: Sequence[int]) -> Iterable[dict[str, Any]]:
    """For each part of the method, on how many heads it lowers the final state error, and on which it does not."""
    errors = {
        name: one.state_errors[-1].mean(axis=1, dtype=np.float64)
        for name, one in zip(lockstep.names, progress.tallies, strict=True)
    }
    for before, after in _ADDITIONS:
        if before in errors and after in errors:
            ratio = errors[after] / errors[before]
            worse = [(layer, head) for layer, head in np.argwhere(~(ratio < 1)).tolist()]
            yield {
                "method": after, "measure": "addition", "than": before, "median_ratio": float(np.median(ratio)),
                "heads": ratio.size, "better": ratio.size - len(worse),
                "not_better": [
                    {"layer": layers[layer], "head": head, "ratio": float(ratio[layer, head])} for layer, head in worse
                ],
            }  # fmt: skip


def _quality(one: Tally, exact: Tally, lockstep: Lockstep) -> Iterable[dict[str, Any]]:
    """Likelihood, divergence and agreement for each group of streams, in all and by octave of position."""
    counts = tally.tokens_per_octave(lockstep.streams.tokens.shape[1])
    for group in dict.fromkeys(lockstep.streams.groups):
        rows = lockstep.streams.of_group(group)
        nll, truth, kl = (x[rows].sum(axis=1) / counts.sum() for x in (one.nll, exact.nll, one.kl))
        low, high = metrics.bootstrap_interval(nll - truth)
        parted = np.where(one.divergence[rows] < 0, np.inf, one.divergence[rows])
        yield {
            "measure": "quality", "group": group, "streams": int(rows.sum()),
            "tokens": int(rows.sum() * counts.sum()),
            "nll": nll.mean(), "nll_difference": (nll - truth).mean(), "interval_95": [low, high], "kl": kl.mean(),
            "top1_agreement": one.agreements[rows].sum() / (rows.sum() * counts.sum()),
            "first_divergence_median": float(np.median(parted)),
            "first_divergence_interval_95": metrics.median_interval(parted),
        }  # fmt: skip
        for value in range(len(counts)):
            per_stream = (one.nll - exact.nll)[rows, value] / counts[value]
            low, high = metrics.bootstrap_interval(per_stream)
            yield {
                "measure": "quality_by_position", "group": group, "min_position": 2**value,
                "nll": (one.nll[rows, value] / counts[value]).mean(), "nll_difference": per_stream.mean(),
                "interval_95": [low, high], "kl": (one.kl[rows, value] / counts[value]).mean(),
                "top1_agreement": one.agreements[rows, value].sum() / (rows.sum() * counts[value]),
            }  # fmt: skip


def _recall(one: Tally, lockstep: Lockstep) -> Iterable[dict[str, Any]]:
    """Answers right, by kind and octave of age, and in all on either side of the attention window."""
    answers = lockstep.streams.answers
    window = lockstep.config.attention_window or 0
    for row in tasks.accuracy_by_age(answers, one.answers_right):
        yield {"measure": "recall_by_age", **row}
    for kind in tasks.KINDS:
        of_kind = answers.kind == tasks.KINDS.index(kind)
        for beyond in (False, True):
            chosen = of_kind & ((answers.age >= window) == beyond)
            count, right = int(chosen.sum()), int(one.answers_right[chosen].sum())
            yield {
                "measure": "recall", "kind": kind, "beyond_window": beyond, "attention_window": window,
                "count": count, "correct": right, "accuracy": right / count if count else math.nan, "chance": tasks.CHANCE[kind],
            }  # fmt: skip


def _state_errors(one: Tally, layers: Sequence[int], measure_at: Sequence[int]) -> Iterable[dict[str, Any]]:
    """Relative state error at each measured position: mean, worst layer, worst head, and each layer by itself."""
    for index, position in enumerate(measure_at):
        heads = one.state_errors[index].mean(axis=1, dtype=np.float64)  # [L, H], the mean over streams
        rank = np.nan_to_num(heads, nan=np.inf)
        layer, head = divmod(int(np.argmax(rank)), heads.shape[1])
        worst_layer = int(np.argmax(rank.mean(axis=1)))
        yield {
            "measure": "state_error", "position": position, "mean": heads.mean(), "median": np.median(heads),
            "worst_layer": {"layer": layers[worst_layer], "error": heads[worst_layer].mean()},
            "worst_head": {"layer": layers[layer], "head": head, "error": heads[layer, head]},
        }  # fmt: skip
        if position in (*NAMED_POSITIONS, measure_at[-1]):
            for number, row in zip(layers, heads, strict=True):
                worst = int(np.argmax(np.nan_to_num(row, nan=np.inf)))
                yield {
                    "measure": "state_error_by_layer", "position": position, "layer": number,
                    "median": np.median(row), "worst_head": worst, "worst": row[worst], "heads": row,
                }  # fmt: skip
            for layer, head, times in metrics.bad_heads(heads):
                yield {
                    "measure": "bad_head", "position": position, "layer": layers[layer], "head": head,
                    "error": heads[layer, head], "times_median": times,
                }  # fmt: skip
