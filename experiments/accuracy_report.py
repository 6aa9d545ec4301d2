"""Tables and figures of the accuracy experiment, from its results.jsonl alone."""

import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from experiments import plots, report, tasks
from experiments.streams import RECALL, TEXT

# Kinds whose answer is a value written once, at a known time: those of the headline. The others are in the records.
_VALUES = ("register", "overwritten")
_FEW = 10  # octaves of age with fewer answers than this are not drawn


def write(directory: Path) -> str:
    """Writes table.md and the figures from results.jsonl; returns the table's text."""
    results = Results(report.read_jsonl(directory / "results.jsonl"))
    text = tables(results)
    report.write_text(directory / "table.md", text)
    figure_errors(results, directory / "error_by_position.png")
    figure_recall(results, directory / "recall_by_age.png")
    figure_likelihood(results, directory / "kl_by_position.png")
    return text


class Results:
    """The records of a results.jsonl, by measure and method."""

    def __init__(self, records: list[dict]):
        self.run = records[0]
        self.config = self.run["config"]
        self.methods: list[str] = self.config["methods"]
        self._records = records[1:]

    def find(self, measure: str, method: str, **fields: Any) -> list[dict]:
        """Records with this measure, method and field values, in the order of the file."""
        wanted = {"measure": measure, "method": method, **fields}
        return [r for r in self._records if all(r.get(name) == value for name, value in wanted.items())]

    def one(self, measure: str, method: str, **fields: Any) -> dict:
        """The only such record."""
        (record,) = self.find(measure, method, **fields)
        return record


def tables(results: Results) -> str:
    """All tables, as Markdown."""
    config, session = results.config, results.run["sessions"][-1]
    window = results.find("recall", "exact")[0]["attention_window"]
    headline, quality, states = [], [], []
    for name in results.methods:
        size = results.one("bytes_per_element", name)
        text = results.one("quality", name, group=TEXT)
        error = results.find("state_error", name)[-1]
        headline.append(
            [
                name, f"{size['at_rest']:.4g}", f"{size['total']:.4g}", f"{float(text['nll']):.4f}",
                _difference(text), report.percent(text["top1_agreement"], 4), _small(text["kl"]),
                _share(_beyond(results, name)), report.percent(error["mean"]), _worst_head(error),
            ]
        )  # fmt: skip
        if name == "exact":
            continue
        recall = results.one("quality", name, group=RECALL)
        quality.append(
            [
                name, _difference(recall), report.percent(recall["top1_agreement"], 4), _small(recall["kl"]),
                _position(text["first_divergence_median"]), _position(recall["first_divergence_median"]),
            ]
        )  # fmt: skip
        worst_layer = error["worst_layer"]
        by_position = {r["position"]: r for r in results.find("state_error", name)}
        marks = [p for p in (1024, 4096, 16384, 65536) if p in by_position and p < error["position"]]
        states.append(
            [
                name, *(report.percent(by_position[p]["mean"]) for p in [*marks, error["position"]]),
                report.percent(error["median"]),
                f"{report.percent(worst_layer['error'])} (layer {worst_layer['layer']})", _worst_head(error),
            ]
        )  # fmt: skip
    parts = [
        "# What a low-bit recurrent state costs\n",
        f"    {session['command']}\n",
        f"{config['num_streams']} streams of held-out text and {config['num_streams']} recall streams of "
        f"{config['num_tokens']:,} tokens each, read token by token; {session['device']}, jax {session['jax']}, "
        f"{config['dtype']} activations. Bytes are per element of the state. NLL in nats per byte on text, with its "
        "difference to `exact` and the 95 % bootstrap interval over streams. Recall: values right that were written "
        f"at least {window} tokens before, out of the attention's sight. State error: relative, at the end.\n",
        report.markdown_table(
            [
                "method", "bytes at rest", "active", "NLL", "difference", "top-1 same", "KL", "recall",
                "state error", "worst head",
            ],
            headline,
        ),
    ]  # fmt: skip
    if quality:
        last = results.find("state_error", "exact")[-1]["position"]
        parts += [
            "\n## On the recall streams, and where the most probable token first differs (median of streams)\n",
            report.markdown_table(
                ["method", "NLL difference", "top-1 same", "KL", "differs at, text", "differs at, recall"], quality
            ),
            "\n## State error\n",
            report.markdown_table(
                ["method", *(f"mean at {p:,}" for p in [*marks, last]), "median head", "worst layer", "worst head"],
                states,
            ),
            _warnings(results),
        ]
    parts += [
        "\n## Recall by age of the write, in tokens\n",
        f"Values right among those written once (register) and overwritten; the attention sees {window} tokens.\n",
        _recall_table(results),
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _recall_table(results: Results) -> str:
    rows = []
    for kind in _VALUES:
        for cell in results.find("recall_by_age", "exact", kind=kind):
            age = cell["min_age"]
            same = [results.one("recall_by_age", name, kind=kind, min_age=age) for name in results.methods]
            right = [f"{100 * r['accuracy']:.1f}" for r in same]
            rows.append([kind, f"{age:,} to {2 * age - 1:,}", str(cell["count"]), *right])
    return report.markdown_table(["kind", "age", "answers", *(f"{m} %" for m in results.methods)], rows)


def _warnings(results: Results) -> str:
    lines = []
    for name in results.methods:
        for r in results.find("bad_head", name)[:3]:
            times = float(r["times_median"])
            lines.append(
                f"- {name}: layer {r['layer']} head {r['head']} is at {report.percent(r['error'])}, "
                f"{times:.0f} times the median head"
            )
    return "\nHeads that the mean hides:\n\n" + "\n".join(lines) if lines else ""


def _beyond(results: Results, name: str) -> tuple[int, int]:
    found = [r for kind in _VALUES for r in results.find("recall", name, kind=kind, beyond_window=True)]
    return sum(r["correct"] for r in found), sum(r["count"] for r in found)


def _share(counts: tuple[int, int]) -> str:
    right, count = counts
    return f"{100 * right / count:.1f} % of {count}" if count else "no answers"


def _difference(record: dict) -> str:
    if record["method"] == "exact":
        return ""
    value, (low, high) = float(record["nll_difference"]), (float(x) for x in record["interval_95"])
    return f"{value:+.5f} [{low:+.5f}, {high:+.5f}]"


def _worst_head(record: dict) -> str:
    worst = record["worst_head"]
    if record["method"] == "exact":
        return ""
    return f"{report.percent(worst['error'])} (layer {worst['layer']} head {worst['head']})"


def _small(value: Any) -> str:
    value = float(value)
    return "0" if value == 0 else f"{value:.1e}"


def _position(value: Any) -> str:
    return f"{float(value):,.0f}" if math.isfinite(float(value)) else "never"


def figure_errors(results: Results, path: Path) -> None:
    """Relative state error by position, log-log: the mean over heads, and the worst head."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, pick, title in (
        (axes[0], lambda r: r["mean"], "mean over layers, heads and streams"),
        (axes[1], lambda r: r["worst_head"]["error"], "worst head at each position"),
    ):
        for name in results.methods:
            found = results.find("state_error", name)
            errors = [100 * float(pick(r)) for r in found]
            if name != "exact" and any(e > 0 for e in errors):
                axis.plot([r["position"] for r in found], errors, **plots.style(name))
        axis.set(xscale="log", yscale="log", xlabel="tokens decoded", title=title)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(plots.tokens_formatter())
    axes[0].set_ylabel("relative state error, %")
    axes[1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    plots.save(figure, path)


def figure_recall(results: Results, path: Path) -> None:
    """Answers right by age of the write, for values written once and overwritten ones."""
    figure, axes = plt.subplots(1, len(_VALUES), figsize=(11, 4.2), sharey=True)
    window = results.find("recall", "exact")[0]["attention_window"]
    for axis, kind in zip(axes, _VALUES, strict=True):
        for name in results.methods:
            found = results.find("recall_by_age", name, kind=kind)
            found = [r for r in found if r["count"] >= _FEW] or found
            ages = [r["min_age"] * math.sqrt(2) for r in found]
            axis.plot(ages, [100 * r["accuracy"] for r in found], **plots.style(name))
        axis.axhline(100 * tasks.CHANCE[kind], color="0.5", linewidth=0.8)
        if window:
            axis.axvline(window, color="0.5", linestyle="dotted", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(plots.tokens_formatter())
        title = {"register": "written once"}.get(kind, kind)
        axis.set(xlabel="age of the write, tokens", title=title, ylim=(-2, 102))
    axes[0].set_ylabel("answers right, %")
    if window:
        axes[0].annotate(
            "  attention ends here", (window, 3), fontsize=8, color="0.3", rotation=90, va="bottom", ha="right"
        )
    axes[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    plots.save(figure, path)


def figure_likelihood(results: Results, path: Path) -> None:
    """KL to `exact` by position, for text and for recall streams."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, group in zip(axes, (TEXT, RECALL), strict=True):
        for name in results.methods:
            found = results.find("quality_by_position", name, group=group)
            values = [float(r["kl"]) or math.nan for r in found]
            if name != "exact" and any(v > 0 for v in values):
                axis.plot([r["min_position"] * math.sqrt(2) for r in found], values, **plots.style(name))
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(plots.tokens_formatter())
        axis.set(yscale="log", xlabel="position", title=f"{group} streams")
    axes[0].set_ylabel("KL to exact, nats per token")
    axes[1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    plots.save(figure, path)
