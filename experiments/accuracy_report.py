"""Tables of the accuracy experiment, from the records in its results.jsonl alone."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from experiments import report
from experiments.accuracy_records import NAMED_POSITIONS
from experiments.streams import RECALL, TEXT

# Kinds whose answer is a value written at a known time: those of the tables. The others are in the records.
VALUES = {"register": "written once", "overwritten": "overwritten"}
_FIRST_POSITION = 64  # octaves of position before it have too few tokens for a table
_MOST_BAD_HEADS = 5  # named per method; all are in the records


class Results:
    """The records of a results.jsonl, by measure and method."""

    def __init__(self, records: Sequence[dict]):
        self.run, *self._records = records
        self.config = self.run["config"]
        self.methods: list[str] = self.config["methods"]

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Those of a run's folder.

        Raises:
          FileNotFoundError: If the run has not ended.
        """
        file = directory / "results.jsonl"
        if not file.exists():
            raise FileNotFoundError(
                f"there is no {file}: run without --report_only first, or give another --output_dir"
            )
        return cls(report.read_jsonl(file))

    def find(self, measure: str, method: str, **fields: Any) -> list[dict]:
        """Records with this measure, method and field values, in the order of the file."""
        wanted = {"measure": measure, "method": method, **fields}
        return [r for r in self._records if all(r.get(name) == value for name, value in wanted.items())]

    def one(self, measure: str, method: str, **fields: Any) -> dict:
        """The only such record."""
        (record,) = self.find(measure, method, **fields)
        return record

    @property
    def attention_window(self) -> int:
        """Tokens that the model's attention sees; 0 if it sees all."""
        return self.find("recall", "exact")[0]["attention_window"]


def tables(results: Results) -> str:
    """All tables, as Markdown."""
    config, session = results.config, results.run["sessions"][-1]
    unit = "token" if "tokenizer" in config else "byte"
    parts = [
        "# What a low-bit recurrent state costs",
        f"    {session['command']}",
        f"{config['num_streams']} streams of held-out text and {config['num_streams']} recall streams of "
        f"{config['num_tokens']:,} tokens each, read token by token; {session['device']}, jax {session['jax']}, "
        f"{config['dtype']} activations. Bytes are per element of the state. NLL in nats per {unit} on text, with its "
        "difference to `exact` and the 95 % bootstrap interval over streams. Recall: values right that were written "
        f"at least {results.attention_window} tokens before, out of the attention's sight. State error: relative, at "
        "the end.",
        _headline(results),
    ]
    if len(results.methods) > 1:
        parts += [
            "## On the recall streams",
            _recall_quality(results),
            "## Where the most probable token first differs from that of `exact`",
            "Token, median over the streams with its 95 % bootstrap interval.",
            _first_divergence(results),
            "## NLL by position, as difference to `exact`",
            "Nats per byte; bold where the 95 % bootstrap interval over streams excludes 0. Nearer to the start, and the "
            "intervals: results.jsonl.",
            *(_nll_by_position(results, group) for group in (TEXT, RECALL)),
            "## State error",
            _states(results),
            _bad_heads(results),
            _ordering(results),
            "## State error of each layer",
            "Median head / worst head of the layer, each the mean over streams.",
            _layers(results),
        ]
    parts += [
        "## Recall by age of the write, in tokens",
        f"Per cent of values right. The attention sees {results.attention_window} tokens.",
        *(_recall_by_age(results, kind) for kind in VALUES),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _headline(results: Results) -> str:
    rows = []
    for name in results.methods:
        size = results.one("bytes_per_element", name)
        text = results.one("quality", name, group=TEXT)
        error = results.find("state_error", name)[-1]
        rows.append(
            [
                name, f"{size['at_rest']:.4g}", f"{size['total']:.4g}", f"{float(text['nll']):.4f}",
                _difference(text), report.percent(text["top1_agreement"], 4), _small(text["kl"]),
                _beyond_window(results, name), report.percent(error["mean"]), _worst_head(error),
            ]
        )  # fmt: skip
    headers = [
        "method", "bytes at rest", "active", "NLL", "difference", "top-1 same", "KL", "recall", "state error",
        "worst head",
    ]  # fmt: skip
    return report.markdown_table(headers, rows)


def _recall_quality(results: Results) -> str:
    rows = []
    for name in results.methods[1:]:
        recall = results.one("quality", name, group=RECALL)
        rows.append(
            [
                name, _difference(recall), report.percent(recall["top1_agreement"], 4), _small(recall["kl"]),
            ]
        )  # fmt: skip
    return report.markdown_table(["method", "NLL difference", "top-1 same", "KL"], rows)


def _first_divergence(results: Results) -> str:
    def cell(record: dict) -> str:
        low, high = (_position(x) for x in record["first_divergence_interval_95"])
        return f"{_position(record['first_divergence_median'])} [{low}, {high}]"

    rows = [
        [name, *(cell(results.one("quality", name, group=group)) for group in (TEXT, RECALL))]
        for name in results.methods[1:]
    ]
    return report.markdown_table(["method", "text", "recall"], rows)


def _nll_by_position(results: Results, group: str) -> str:
    def cell(record: dict) -> str:
        value, (low, high) = float(record["nll_difference"]), (float(x) for x in record["interval_95"])
        return f"**{value:+.4f}**" if low > 0 or high < 0 else f"{value:+.4f}"

    def shown(name: str) -> list[dict]:
        found = results.find("quality_by_position", name, group=group)
        return [r for r in found if r["min_position"] >= _FIRST_POSITION]

    first = [f"{r['min_position']:,} to {2 * r['min_position'] - 1:,}" for r in shown("exact")]
    rows = [[name, *map(cell, shown(name))] for name in results.methods[1:]]
    return report.markdown_table([group, *first], rows)


def _states(results: Results) -> str:
    measured = [r["position"] for r in results.find("state_error", "exact")]
    shown = [p for p in measured[:-1] if p in NAMED_POSITIONS] + measured[-1:]
    rows = []
    for name in results.methods[1:]:
        found = {r["position"]: r for r in results.find("state_error", name)}
        last = found[shown[-1]]
        layer = last["worst_layer"]
        rows.append(
            [
                name, *(report.percent(found[p]["mean"]) for p in shown), report.percent(last["median"]),
                f"{report.percent(layer['error'])} (layer {layer['layer']})", _worst_head(last),
            ]
        )  # fmt: skip
    headers = ["method", *(f"mean at {p:,}" for p in shown), "median head", "worst layer", "worst head"]
    return report.markdown_table(headers, rows)


def _bad_heads(results: Results) -> str:
    lines = [
        f"- {name}: layer {r['layer']} head {r['head']} is at {report.percent(r['error'])} after {r['position']:,} tokens, "
        f"{float(r['times_median']):.0f} times the median head of its layer"
        for name in results.methods
        for r in _worst_bad_heads(results, name)
    ]
    return (
        "**Bad heads**, far above the rest of their layer, which its mean hides:\n\n" + "\n".join(lines)
        if lines
        else ""
    )


def _worst_bad_heads(results: Results, name: str) -> list[dict]:
    """The worst few of them, each at the position where it is worst."""
    by_head: dict[tuple[int, int], dict] = {}
    for r in sorted(results.find("bad_head", name), key=_badness, reverse=True):
        by_head.setdefault((r["layer"], r["head"]), r)
    return list(by_head.values())[:_MOST_BAD_HEADS]


def _badness(record: dict) -> float:
    error = float(record["error"])
    return error if math.isfinite(error) else math.inf


def _layers(results: Results) -> str:
    rows, positions = [], list(dict.fromkeys(r["position"] for r in results.find("state_error_by_layer", "exact")))
    for name in results.methods[1:]:
        found = {(r["layer"], r["position"]): r for r in results.find("state_error_by_layer", name)}
        for layer in dict.fromkeys(layer for layer, _ in found):
            cells = (found[layer, position] for position in positions)
            last = found[layer, positions[-1]]
            rows.append(
                [
                    name, str(layer),
                    *(f"{report.percent(r['median'])} / {report.percent(r['worst'])}" for r in cells), str(last["worst_head"]),
                ]
            )  # fmt: skip
    headers = ["method", "layer", *(f"at {p:,}" for p in positions), "worst is head"]
    return report.markdown_table(headers, rows, left=2)


def _ordering(results: Results) -> str:
    rows = []
    for name in results.methods:
        for r in results.find("addition", name):
            worse = ", ".join(f"layer {h['layer']} head {h['head']} ({h['ratio']:.2f})" for h in r["not_better"])
            rows.append([r["than"], name, f"{r['median_ratio']:.2f}", f"{r['better']} of {r['heads']}", worse])
    if not rows:
        return ""
    table = report.markdown_table(["from", "to", "median ratio", "better on heads", "not on"], rows, left=2)
    return f"Each part of the method by itself: error after it over error before it, head by head.\n\n{table}"


def _recall_by_age(results: Results, kind: str) -> str:
    ages = [r["min_age"] for r in results.find("recall_by_age", "exact", kind=kind)]
    if not ages:
        return f"No value {VALUES[kind]} was asked for."
    counts = [str(r["count"]) for r in results.find("recall_by_age", "exact", kind=kind)]
    rows = [
        [name, *(f"{100 * r['accuracy']:.1f}" for r in results.find("recall_by_age", name, kind=kind))]
        for name in results.methods
    ]
    headers = [VALUES[kind], *(f"{age:,} to {2 * age - 1:,}" for age in ages)]
    return report.markdown_table(headers, [*rows, ["answers", *counts]])


def _beyond_window(results: Results, name: str) -> str:
    found = [r for kind in VALUES for r in results.find("recall", name, kind=kind, beyond_window=True)]
    right, count = (sum(r[field] for r in found) for field in ("correct", "count"))
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
