"""Tables and figures of the suite, from the records in its results.jsonl alone."""

import math
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt

from experiments import plots, report, tasks
from experiments.accuracy_report import Results
from experiments.suite_records import CONTROL, FAIL, LEARNED, MARGIN, MIN_ANSWERS, MIN_STREAMS, is_lost

_JUDGED = tuple(kind for kind in tasks.KINDS if kind not in tasks.CONTROLS)
_FEW = 5  # octaves of age with fewer answers than this are not drawn


def write(directory: Path) -> str:
    """Writes table.md and the figures of a folder with a results.jsonl; returns the tables.

    Raises:
      FileNotFoundError: If there is no results.jsonl.
    """
    results = Results.read(directory)
    text = tables(results)
    report.write_text(directory / "table.md", text)
    draw_ages(results, directory / "accuracy_by_age.png")
    draw_differences(results, directory / "difference.png")
    return text


def tables(results: Results) -> str:
    """All tables, as Markdown."""
    config, session = results.config, results.run["sessions"][-1]
    parts = [
        "# Recall and reasoning, by state method",
        f"    {session['command']}",
        f"{config['num_streams']} streams of {config['num_tokens']:,} tokens, decoded token by token; {session['device']}, "
        f"jax {session['jax']}, {config['dtype']} activations. Whole answers right, of those whose write is at least "
        f"{results.attention_window} tokens old and so out of the attention's sight. [95 % bootstrap intervals over streams.]",
        "## Verdicts",
        f"A method fails a task if even the upper end of its paired difference to `exact` is below -{100 * MARGIN:g} points, "
        "and passes if even the lower end is not; in between, and with fewer than "
        f"{MIN_ANSWERS} answers or {MIN_STREAMS} streams, it is unclear, and more streams would tell. A task that `exact` "
        f"does not do better than chance by {100 * LEARNED:g} points (lower end) is not learned and not judged; controls "
        "never are. One failed task fails the suite.",
        _verdicts(results),
        "## Accuracy, per cent",
        _accuracies(results),
        "## Difference to `exact`, points",
        _differences(results),
        "## Accuracy by age of the write in tokens, per cent",
        f"Bold: even the upper end of the difference to `exact` is below -{100 * MARGIN:g} points.",
        *(_by_age(results, kind) for kind in tasks.KINDS),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdicts(results: Results) -> str:
    def shown(verdict: str) -> str:
        return "**fail**" if verdict == FAIL else verdict

    rows = []
    for name in results.methods:
        size = results.one("bytes_per_element", name)
        cells = [shown(results.one("task", name, kind=kind)["verdict"]) for kind in _JUDGED]
        rows.append([name, f"{size['at_rest']:.4g}", shown(results.one("suite", name)["verdict"]), *cells])
    return report.markdown_table(["method", "bytes/element at rest", "suite", *_JUDGED], rows)


def _accuracies(results: Results) -> str:
    rows = _task_rows(results, results.methods, lambda r: _interval(r["accuracy"], r["interval_95"], ".1f"))
    rows.append(["chance", *(f"{100 * tasks.CHANCE[kind]:.1f}" for kind in tasks.KINDS)])
    rows.append(["answers", *(f"{results.one('task', 'exact', kind=kind)['count']:,}" for kind in tasks.KINDS)])
    return report.markdown_table(["method", *map(_titled, tasks.KINDS)], rows)


def _differences(results: Results) -> str:
    rows = _task_rows(
        results, results.methods[1:], lambda r: _interval(r["difference"], r["difference_interval_95"], "+.1f")
    )
    return report.markdown_table(["method", *map(_titled, tasks.KINDS)], rows) if rows else ""


def _task_rows(results: Results, names: list[str], cell: Callable[[dict], str]) -> list[list[str]]:
    return [[name, *(cell(results.one("task", name, kind=kind)) for kind in tasks.KINDS)] for name in names]


def _by_age(results: Results, kind: str) -> str:
    def cell(record: dict) -> str:
        text = _interval(record["accuracy"], record["interval_95"], ".0f")
        return f"**{text}**" if is_lost(record) else text

    first = results.find("task_by_age", "exact", kind=kind)
    if not first:
        return f"{_titled(kind)}: nothing was asked for."
    rows = [[name, *map(cell, results.find("task_by_age", name, kind=kind))] for name in results.methods]
    rows.append(["answers", *(f"{r['count']:,}" for r in first)])
    headers = [_titled(kind), *(f"{r['min_age']:,} to {2 * r['min_age'] - 1:,}" for r in first)]
    return report.markdown_table(headers, rows)


def _titled(kind: str) -> str:
    return f"{kind} ({CONTROL})" if kind in tasks.CONTROLS else kind


def _interval(value: float | str, interval: list, form: str) -> str:
    """A share and its interval, as percentages; "nan" for what was not asked for."""
    low, high = (100 * float(x) for x in interval)
    text = f"{100 * float(value):{form}}"
    return text if math.isnan(low) else f"{text} [{low:{form}}, {high:{form}}]"


def draw_ages(results: Results, path: Path) -> None:
    """A panel per task: accuracy by age of the write, with chance and the end of the attention window."""
    figure, axes = plt.subplots(2, math.ceil(len(tasks.KINDS) / 2), figsize=(13, 7), sharex=True, sharey=True)
    for axis, kind in zip(axes.flat, tasks.KINDS, strict=False):
        for name in results.methods:
            found = [r for r in results.find("task_by_age", name, kind=kind) if r["count"] >= _FEW]
            ages = [r["min_age"] * math.sqrt(2) for r in found]
            axis.plot(ages, [100 * float(r["accuracy"]) for r in found], **plots.style(name))
        axis.axhline(100 * tasks.CHANCE[kind], color="0.5", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(plots.tokens_formatter())
        axis.set(
            title=_titled(kind), xlim=(max(1, results.attention_window), results.config["num_tokens"]), ylim=(-2, 102)
        )
    for axis in axes[-1]:
        axis.set_xlabel("age of the write, tokens")
    for axis in axes[:, 0]:
        axis.set_ylabel("answers right, %")
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1.02, 0.0))
    plots.save(figure, path)


def draw_differences(results: Results, path: Path) -> None:
    """A panel per judged task: every method's difference to `exact` with its interval, and the margin."""
    names = results.methods[1:]
    figure, axes = plt.subplots(1, len(_JUDGED), figsize=(14, 1.2 + 0.3 * len(names)), sharey=True)
    for axis, kind in zip(axes, _JUDGED, strict=True):
        for row, name in enumerate(names):
            found = results.one("task", name, kind=kind)
            low, high = (100 * float(x) for x in found["difference_interval_95"])
            look = plots.style(name)
            axis.plot([low, high], [row, row], color=look["color"])
            axis.plot(100 * float(found["difference"]), row, "o", color=look["color"])
        axis.axvline(0, color="0.5", linewidth=0.8)
        axis.axvline(-100 * MARGIN, color="0.5", linewidth=0.8, linestyle="dashed")
        verdict = results.one("task", "exact", kind=kind)["verdict"]
        axis.set(title=kind if verdict == "pass" else f"{kind} ({verdict})", xlabel="points to exact")
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    plots.save(figure, path)
