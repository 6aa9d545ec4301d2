"""Figures of the accuracy experiment, from the records in its results.jsonl alone."""

import math
from pathlib import Path

import matplotlib.pyplot as plt

from experiments import plots, tasks
from experiments.accuracy_report import VALUES, Results
from experiments.streams import RECALL, TEXT

_FEW = 5  # octaves of age with fewer answers than this are not drawn, if enough others have more
_DIVERGED = 1000  # per cent; curves leave the figure here, so that the others can be told apart


def errors(results: Results, path: Path) -> None:
    """Relative state error by position, log-log: the mean over heads, and the worst head."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, pick, title in (
        (axes[0], lambda r: r["mean"], "mean over layers, heads and streams"),
        (axes[1], lambda r: r["worst_head"]["error"], "worst head at each position"),
    ):
        for name in results.methods:
            found = results.find("state_error", name)
            shares = [100 * float(pick(r)) for r in found]
            if name != "exact" and any(share > 0 for share in shares):
                axis.plot([r["position"] for r in found], shares, **plots.style(name))
        axis.set(xscale="log", yscale="log", xlabel="tokens decoded", title=title)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(plots.tokens_formatter())
    axes[0].set_ylabel("relative state error, %")
    axes[0].set_ylim(top=min(axes[0].get_ylim()[1], _DIVERGED))
    axes[1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    plots.save(figure, path)


def recall(results: Results, path: Path) -> None:
    """Answers right by age of the write, for values written once and overwritten ones."""
    figure, axes = plt.subplots(1, len(VALUES), figsize=(11, 4.2), sharey=True)
    window = results.attention_window
    for axis, kind in zip(axes, VALUES, strict=True):
        for name in results.methods:
            found = results.find("recall_by_age", name, kind=kind)
            many = [r for r in found if r["count"] >= _FEW]
            found = many if len(many) >= 3 else found
            ages = [r["min_age"] * math.sqrt(2) for r in found]
            axis.plot(ages, [100 * r["accuracy"] for r in found], **plots.style(name))
        axis.axhline(100 * tasks.CHANCE[kind], color="0.5", linewidth=0.8)
        if window:
            axis.axvline(window, color="0.5", linestyle="dotted", linewidth=1)
        if results.find("recall_by_age", "exact", kind=kind):  # else short streams ask for none: no logarithmic axis
            axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(plots.tokens_formatter())
        axis.set(xlabel="age of the write, tokens", title=VALUES[kind], ylim=(-2, 102))
    axes[0].set_ylabel("answers right, %")
    if window:
        axes[0].annotate(
            "  attention ends here", (window, 3), fontsize=8, color="0.3", rotation=90, va="bottom", ha="right"
        )
    axes[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    plots.save(figure, path)


def likelihood(results: Results, path: Path) -> None:
    """KL to `exact` by position, for text and for recall streams."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, group in zip(axes, (TEXT, RECALL), strict=True):
        for name in results.methods:
            found = results.find("quality_by_position", name, group=group)
            values = [kl if kl > 0 else math.nan for kl in (float(r["kl"]) for r in found)]
            if name != "exact" and any(v > 0 for v in values):
                axis.plot([r["min_position"] * math.sqrt(2) for r in found], values, **plots.style(name))
        if axis.lines:
            axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(plots.tokens_formatter())
        axis.set(xlabel="position", title=f"{group} streams")
    if all(axis.lines for axis in axes):  # a method may predict exactly what `exact` does
        axes[0].set_yscale("log")
    axes[0].set_ylabel("KL to exact, nats per token")
    axes[1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    plots.save(figure, path)
