"""Tables of the ablation, from the records in its results.jsonl alone."""

from pathlib import Path

import numpy as np

from experiments import ablate_figures, report
from experiments.ablation_results import Ablation

# Axis: (title, what its labels are called, what a ratio compares with).
_TITLES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "parts": ("Parts, one by one", ("bits", "rounded"), "the row above"),
    "window_by_rank": ("Window by rank, 8 bits", ("window", "rank"), "window 16, rank 4"),
    "rotation_and_clip": ("Rotation and clip", ("bits", "rotation", "clip"), "neither, at the same width"),
    "equal_bytes": (
        "Equal bytes: ways to spend what each of the paper's methods takes",
        ("bytes of a head", "way"),
        "the first way",
    ),
    "records": (
        "Number formats of the records and the compensators",
        ("bits", "records", "compensators"),
        "fp16 for both",
    ),
    "fits": ("Fit of the compensators, 8 bits, rank 4, every fold refits", ("start", "iterations"), "SVD"),
    "smoothing": ("Smoothing exponent", ("bits", "with", "exponent"), "0.5"),
    "refit_gain": ("refit_gain", ("bits", "gain"), "0.02"),
}
_MAX_ERROR = 1.0  # a state this far off is lost, and one that still drifts beyond _MAX_GROWTH is on its way there
_MAX_GROWTH, _SMALL_ERROR = 1.25, 0.1


def write(directory: Path) -> str:
    """Writes table.md and the figures; returns the tables."""
    ablation = Ablation.read(directory)
    session = ablation.header["sessions"][-1]
    count = len(ablation.layers)
    heads = next(iter(ablation.errors.values()))["state_error"].shape[1] if ablation.errors else 0
    parts = [
        "# Ablations on recorded traces",
        f"    {session['command']}",
        f"{count} traces of {heads} heads, decoded token by token; {session['device']}, jax {session['jax']}. Errors are "
        "relative to the fp32 recurrence: of the state after the last token, and of the outputs over all tokens; mean over "
        "heads and traces. A ratio is the state error over that of the method named, median over the heads; below 1 is "
        "better. Bytes are per element of the state.",
    ]
    if ablation.missing:
        places = "; ".join(f"{p['axis']} {', '.join(p['labels'])}" for p in ablation.missing)
        parts.append(f"Not run, because the run was stopped before: {places}.")
    if elsewhere := [name for name, found in ablation.errors.items() if "device" in found]:
        parts.append(f"On {ablation.errors[elsewhere[0]]['device']}: {'; '.join(elsewhere)}.")
    for axis in ablation.axes:
        title, columns, against = _TITLES[axis]
        parts += [f"## {title}", f"Ratios are against {against}.", _table(ablation, axis, columns)]
        if axis == "window_by_rank":
            parts += [_grid(ablation, "state_error"), _grid(ablation, "output_error")]
    if ablation.long:
        parts += ["## Heads that hardly forget", _long(ablation)]
    text = "\n\n".join(parts) + "\n"
    report.write_text(directory / "table.md", text)
    ablate_figures.draw(ablation, directory)
    return text


def _table(ablation: Ablation, axis: str, columns: tuple[str, ...]) -> str:
    layers = np.unique(ablation.layers)
    rows = []
    for point in ablation.of_axis(axis):
        found, ratio = ablation.errors[point["name"]], ablation.ratio(point)
        cells = [""] * (2 + len(layers))
        if ratio is not None:
            valid = ratio[~np.isnan(ratio)]
            by_layer = [np.nanmedian(ratio[ablation.layers == layer]) for layer in layers]
            cells = [*(f"{x:.2f}" for x in (np.median(valid), *by_layer)), f"{(valid < 1).sum()} of {valid.size}"]
        state, output = found["state_error"], found["output_error"]
        rows.append(
            [
                *point["labels"], f"{found['at_rest']:.4g}", f"{found['active']:.4g}",
                *(report.percent(x) for x in (state.mean(), state.max(), output.mean(), output.max())), *cells,
            ]
        )  # fmt: skip
    headers = [
        *columns, "at rest", "active", "state error", "worst head", "output error", "worst head", "ratio",
        *(f"layer {layer}" for layer in layers), "better on",
    ]  # fmt: skip
    return report.markdown_table(headers, rows, left=len(columns))


def _grid(ablation: Ablation, field: str) -> str:
    points = ablation.of_axis("window_by_rank")
    windows, ranks = (list(dict.fromkeys(p["labels"][i] for p in points)) for i in (0, 1))
    mean = {tuple(p["labels"]): report.percent(ablation.errors[p["name"]][field].mean()) for p in points}
    rows = [[window, *(mean.get((window, rank), "not run") for rank in ranks)] for window in windows]
    name = field.replace("_", " ")
    return f"Mean {name}:\n\n" + report.markdown_table(["window", *(f"rank {rank}" for rank in ranks)], rows)


def diverges(errors: np.ndarray) -> bool:
    """Whether the error of a head, fp64 [M] over position, is beyond 100 % or still grows at the end of the run."""
    end, half = errors[-1], errors[len(errors) // 2]
    return bool(not end <= _MAX_ERROR or (end > _SMALL_ERROR and end > _MAX_GROWTH * half))


def _long(ablation: Ablation) -> str:
    rows = []
    for name, found in ablation.long.items():
        curves = found["state_error"].T
        cells = [report.percent(curve[-1]) + (" diverges" if diverges(curve) else "") for curve in curves]
        rows.append([name, f"{found['at_rest']:.4g}", *cells])
    first = next(iter(ablation.long.values()))
    table = report.markdown_table(["method", "at rest", *first["heads"]], rows)
    return (
        f"State error after {first['positions'][-1]:,} tokens of synthetic heads (`toy_heads.long_heads`; numbers are decays "
        f"per token). A head diverges when its error is beyond {_MAX_ERROR:.0%}, or beyond {_SMALL_ERROR:.0%} and more than "
        f"{_MAX_GROWTH} times what it was at half that.\n\n{table}"
    )
