"""Tables and figures of a replay, from the records in its results.jsonl alone."""

import dataclasses
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from experiments import plots, report

_DIVERGED = 300  # per cent; curves leave the figures here
_CHECKS = ("finite", "bytes", "eq. 10", "half step")


@dataclasses.dataclass(frozen=True)
class Run:
    """A method with an implementation, and its records by measure."""

    name: str
    records: dict[str, list[dict]]

    def array(self, field: str) -> np.ndarray:
        """A field of all traces: [traces, heads] or [traces, ...]."""
        return np.array([_floats(record[field]) for record in self.records["trace"]])

    def has(self, field: str) -> bool:
        return all(field in record for record in self.records["trace"])


def read(directory: Path) -> tuple[dict, list[Run], list[dict]]:
    """(header, runs, records of what could not run) of a folder with a results.jsonl."""
    header, *records = report.read_jsonl(directory / "results.jsonl")
    several = len({record["implementation"] for record in records}) > 1
    runs: dict[str, dict[str, list[dict]]] = {}
    skipped = []
    for record in records:
        if record["measure"] == "skipped":
            skipped.append(record)
            continue
        name = f"{record['method']} ({record['implementation']})" if several else record["method"]
        runs.setdefault(name, {}).setdefault(record["measure"], []).append(record)
    return header, [Run(name, found) for name, found in runs.items()], skipped


def write(directory: Path) -> str:
    """Writes table.md and the figures; returns the tables."""
    header, runs, skipped = read(directory)
    session = header["sessions"][-1]
    traces = runs[0].records["trace"] if runs else []
    parts = [
        "# Replay of recorded traces",
        f"    {session['command']}",
        f"{len(traces)} traces of up to {max((t['tokens'] for t in traces), default=0):,} tokens, decoded token by token; "
        f"{session['device']}, jax {session['jax']}. Errors are relative to the fp32 recurrence: of the state after the "
        "last token, and of the outputs over all tokens. Energy per fold: what rounding adds to ||S||^2, mean over the "
        "folds; the largest of all heads.",
        _headline(runs),
        "## State error by trace, mean over heads",
        _by_trace(runs, "state_error"),
        "## Output error by trace, mean over heads",
        _by_trace(runs, "output_error"),
        "## Peak over median of what is left to round, median over heads",
        _flatness(runs),
        "## Checks",
        _checks(runs),
        "\n".join(f"- {r['method']} with {r['implementation']} did not run: {r['reason']}" for r in skipped),
    ]
    text = "\n\n".join(part for part in parts if part) + "\n"
    report.write_text(directory / "table.md", text)
    drawn = [run for run in runs if run.array("state_error").any()]
    if drawn:
        _curves(drawn, directory / "error_by_position.png")
        _heads(drawn, directory / "heads.png")
    return text


def _headline(runs: list[Run]) -> str:
    rows = []
    for run in runs:
        sizes = run.records["bytes_per_element"]  # of each shape of traces
        weights = [size["elements"] for size in sizes]
        at_rest, total = (np.average([size[name] for size in sizes], weights=weights) for name in ("at_rest", "total"))
        state, output = run.array("state_error"), run.array("output_error")
        gain = report.percent(run.array("energy_gain_per_fold").max()) if run.has("energy_gain_per_fold") else ""
        rows.append(
            [
                run.name, f"{at_rest:.4g}", f"{total:.4g}", report.percent(state.mean()),
                _worst(run, state), report.percent(output.mean()), _worst(run, output), gain,
            ]
        )  # fmt: skip
    headers = [
        "method", "bytes at rest", "active", "state error", "worst head", "output error", "worst head",
        "energy per fold",
    ]  # fmt: skip
    return report.markdown_table(headers, rows)


def _worst(run: Run, errors: np.ndarray) -> str:
    row, head = np.unravel_index(np.argmax(np.where(np.isfinite(errors), errors, np.inf)), errors.shape)
    trace = run.records["trace"][int(row)]
    return f"{report.percent(errors[row, head])} (layer {trace['layer']} head {head}, {trace['prompt']})"


def _by_trace(runs: list[Run], field: str) -> str:
    if not runs:
        return ""
    names = [f"{t['layer']} {t['prompt']}" for t in runs[0].records["trace"]]
    rows = [[run.name, *(report.percent(x) for x in run.array(field).mean(axis=-1))] for run in runs]
    return report.markdown_table(["layer", *names], rows)


def _flatness(runs: list[Run]) -> str:
    rows, stages = [], ("nothing", "compensators", "smoothing", "rotation")
    for run in runs:
        for layer in sorted({t["layer"] for t in run.records["trace"]}):
            found = [t["peak_over_median"] for t in run.records["trace"] if t["layer"] == layer]
            if found[0]:
                cells = [
                    f"{np.median([_floats(f[stage]) for f in found]):.1f}" if stage in found[0] else ""
                    for stage in stages
                ]
                rows.append([run.name, str(layer), *cells])
    return report.markdown_table(["method", "layer", "before", *(f"after {s}" for s in stages[1:])], rows)


def _checks(runs: list[Run]) -> str:
    rows = []
    for run in runs:
        by_name: dict[str, list[dict]] = {}
        for record in run.records["check"]:
            by_name.setdefault(record["check"], []).append(record)
        rows.append([run.name, *(_verdict(by_name.get(name, [])) for name in _CHECKS)])
    return report.markdown_table(["method", *_CHECKS], rows)


def _verdict(found: list[dict]) -> str:
    if not found:
        return ""
    worst = max((float(record["value"]) for record in found), key=lambda x: np.inf if np.isnan(x) else x)
    return f"{'pass' if all(record['passed'] for record in found) else 'FAIL'} ({worst:.2g})"


def _curves(runs: list[Run], path: Path) -> None:
    """Errors over position: a column per layer, mean over its prompts and heads."""
    layers = sorted({t["layer"] for t in runs[0].records["trace"]})
    size = (3.6 * len(layers) + 2.4, 6.6)
    figure, axes = plt.subplots(2, len(layers), figsize=size, sharex=True, sharey="row", squeeze=False)
    for row, field in enumerate(("state_error_by_position", "output_error_by_position")):
        for column, layer in enumerate(layers):
            axis = axes[row][column]
            for run in runs:
                found = [t for t in run.records["trace"] if t["layer"] == layer]
                length = min(len(t["positions"]) for t in found)
                errors = np.mean([_floats(t[field])[:length] for t in found], axis=(0, 2))
                if (errors > 0).any():
                    axis.plot(found[0]["positions"][:length], 100 * errors, **plots.style(run.name))
            axis.set(xscale="log", yscale="log")
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(plots.tokens_formatter())
        axes[row][0].set_ylabel(f"{field.split('_')[0]} error, %")
        axes[row][0].set_ylim(top=min(axes[row][0].get_ylim()[1], _DIVERGED))
    for axis, layer in zip(axes[0], layers, strict=True):
        axis.set_title(f"layer {layer}")
    for axis in axes[1]:
        axis.set_xlabel("tokens")
    axes[0][-1].legend(loc="upper left", bbox_to_anchor=(1.02, 1.0))
    plots.save(figure, path)


def _heads(runs: list[Run], path: Path) -> None:
    """Final state error of every head: no mean hides a bad one."""
    traces = runs[0].records["trace"]
    order = sorted(range(len(traces)), key=lambda i: (traces[i]["layer"], traces[i]["prompt"]))
    layers = [traces[i]["layer"] for i in order]
    heads = runs[0].array("state_error").shape[1]
    figure, axis = plt.subplots(figsize=(11, 4.2))
    for index, run in enumerate(runs):
        errors = 100 * run.array("state_error")[order].reshape(-1)
        look: dict[str, Any] = plots.style(run.name) | {"linestyle": "none", "marker": "osv^D"[index % 5]}
        axis.plot(np.arange(errors.size), np.minimum(errors, _DIVERGED), **look)
    for i in range(1, len(order)):
        axis.axvline(i * heads - 0.5, color="0.6" if layers[i] != layers[i - 1] else "0.9", linewidth=0.8)
    axis.set_xticks([(i + 0.5) * heads - 0.5 for i in range(len(order))])
    axis.set_xticklabels([f"{traces[i]['layer']}\n{traces[i]['prompt']}" for i in order])
    axis.grid(False, axis="x")
    axis.set(yscale="log", ylabel="state error, %", xlabel="layer and prompt; its heads from left to right")
    axis.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    plots.save(figure, path)


def _floats(values: Any) -> np.ndarray:
    """JSON has words for inf and nan only."""
    return np.array(values, dtype=np.float64)
