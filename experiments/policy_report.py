"""Tables and the figure of the policy experiment, from its results.jsonl alone."""

from pathlib import Path

import matplotlib.pyplot as plt

import leapquant_jax as lq
from experiments import plots, report

_LINES = {
    "layer": {"color": plots.BLUE, "linestyle": (0, (5, 1.5)), "label": "one config per layer"},
    "head": {"color": plots.VERMILION, "linestyle": "solid", "label": "one config per head"},
}
_MEASURES = {
    "detail": "of the outputs, relative to their energy outside their four strongest directions",
    "output": "of the outputs, relative to their energy",
    "state": "of the states, relative to their energy",
}
_NAMES = {"none": "the method itself", "layer": "planned by layer", "head": "planned by head"}


def label(config: lq.LeapConfig) -> str:
    """A short name, e.g. "4b r4 HC": bits, compensators, H for a rotation, C for a clip, s0.5 for an exponent other than 1."""
    if config.boundary_dtype is not None:
        return config.boundary_dtype
    marks = ("H" if config.rotation else "") + ("C" if config.clip else "")
    exponent = "" if config.smoothing == 1 else f"s{config.smoothing:g}"
    return " ".join(word for word in (f"{config.bits}b r{config.rank}", marks, exponent) if word)


def write(directory: Path) -> str:
    """Writes table.md and frontier.png; returns the table's text."""
    header, *records = report.read_jsonl(directory / "results.jsonl")
    by_measure: dict[str, list[dict]] = {}
    for record in records:
        by_measure.setdefault(record["measure"], []).append(record)
    measure = header["config"]["measure"]
    sections = [
        f"# Policies\n\n    {header['sessions'][-1]['command']}\n\nErrors against the exact recurrence, "
        f"{_MEASURES[measure]}; root mean square over heads and prompts. {_traces(header)}\n",
        _candidates(by_measure["candidate"]),
        _plans(by_measure["plan"]),
    ]
    if "held_out" in by_measure:
        sections.append(_held_out(by_measure["held_out"]))
    text = "\n".join(sections)
    report.write_text(directory / "table.md", text)
    _figure(by_measure, directory / "frontier.png")
    return text


def _traces(header: dict) -> str:
    recorded = header["config"]["traces"]
    return f"{len(recorded)} recorded traces." if recorded else "Synthetic heads; see experiments/policy.py."


def _candidates(records: list[dict]) -> str:
    layers = sorted({r["layer"] for r in records})
    rows = []
    for config in dict.fromkeys(r["config"] for r in records):
        mine = {r["layer"]: r for r in records if r["config"] == config}
        cells = [
            f"{report.percent(mine[layer]['error'])} / {report.percent(max(map(float, mine[layer]['head_errors'])))}"
            for layer in layers
        ]
        rows.append([config, f"{mine[layers[0]]['at_rest_per_head']:,}", *cells])
    table = report.markdown_table(["config", "bytes a head", *(f"layer {layer}" for layer in layers)], rows)
    return (
        "## What each config costs\n\nb: bits, r: compensators, H: Hadamard rotation, C: clipped scales, s: smoothing exponent if "
        f"not 1. Error of all heads / of the worst head.\n\n{table}\n"
    )


def _plans(records: list[dict]) -> str:
    rows = [
        [
            r["budget"], _NAMES[r["by"]], f"{r['at_rest']:,}",
            *(report.percent(r[name]) for name in ("error", "worst_layer", "worst_head")),
        ]
        for r in records
    ]  # fmt: skip
    table = report.markdown_table(
        ["no more bytes than", "plan", "bytes at rest", "error", "worst layer", "worst head"], rows, left=2
    )
    lines = []
    for r in records:
        if r["by"] != "none":
            chosen = "; ".join(f"layer {c['layer']}: {_groups(c['groups'])}" for c in r["choices"])
            lines.append(f"- {r['budget']}, {_NAMES[r['by']]}: {chosen}.")
    return f"## Plans\n\n{table}\n\n" + "\n".join(lines) + "\n"


def _groups(groups: list[dict]) -> str:
    return ", ".join(
        group["config"] + ("" if group["heads"] is None else f" (heads {' '.join(map(str, group['heads']))})")
        for group in groups
    )


def _held_out(records: list[dict]) -> str:
    rows = [
        [
            r["budget"], _NAMES[r["by"]], r["prompt"], report.percent(r["method_error"]), report.percent(r["error"]),
            f"{float(r['error']) / float(r['method_error']):.2f}",
        ]
        for r in records
    ]  # fmt: skip
    headers = ["no more bytes than", "plan", "judged on", "the method itself", "plan", "ratio"]
    return f"## Plans made without the prompt they are judged on\n\n{report.markdown_table(headers, rows, left=3)}\n"


def _figure(by_measure: dict[str, list[dict]], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(7, 4))
    for by, look in _LINES.items():
        mine = [r for r in by_measure["frontier"] if r["by"] == by]
        axis.plot(
            [r["at_rest_per_head"] for r in mine], [100 * r["error"] for r in mine], drawstyle="steps-post", **look
        )
    of_config: dict[str, list[dict]] = {}
    for r in by_measure["candidate"]:
        of_config.setdefault(r["config"], []).append(r)
    for config, mine in of_config.items():
        squares = [float(error) ** 2 for r in mine for error in r["head_errors"]]
        point = mine[0]["at_rest_per_head"], 100 * (sum(squares) / len(squares)) ** 0.5
        axis.plot(*point, "o", color="0.4", markersize=3)
        axis.annotate(config, point, fontsize=7, xytext=(3, 3), textcoords="offset points", color="0.3")
    axis.set(
        yscale="log", xlabel="bytes at rest, mean over heads", ylabel="relative error, %", title="Bytes against error"
    )
    axis.legend()
    plots.save(figure, path)
