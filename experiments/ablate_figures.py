"""Figures of the ablation, from its saved results alone."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from experiments import plots
from experiments.ablation_results import Ablation

_COLOURS = (plots.BLACK, plots.ORANGE, plots.SKY, plots.GREEN, plots.BLUE, plots.VERMILION, plots.PURPLE)
_DASHES = ("solid", "dashed", "dashdot", "dotted")
_DIVERGED = 300  # per cent


def draw(ablation: Ablation, directory: Path) -> None:
    """Writes a PNG for each group of results that is there."""
    if "parts" in ablation.axes:
        _parts(ablation, directory / "parts.png")
    if "window_by_rank" in ablation.axes:
        _window_by_rank(ablation, directory / "window_by_rank.png")
    if "rotation_and_clip" in ablation.axes:
        _ratios(ablation, "rotation_and_clip", directory / "rotation_and_clip.png")
    if "smoothing" in ablation.axes or "refit_gain" in ablation.axes:
        _numbers(ablation, directory / "numbers.png")
    if ablation.long:
        _long(ablation, directory / "long.png")


def _parts(ablation: Ablation, path: Path) -> None:
    """Mean and worst head after each part, for each width."""
    points = ablation.of_axis("parts")
    names = list(dict.fromkeys(p["labels"][1] for p in points))
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharex=True)
    for axis, field in zip(axes, ("state_error", "output_error"), strict=True):
        for bits, colour in (("8", plots.BLUE), ("6", plots.GREEN), ("4", plots.VERMILION)):
            found = [ablation.errors[p["name"]][field] for p in points if p["labels"][0] == bits]
            if found:
                mean, worst = ([100 * f(x) for x in found] for f in (np.mean, np.max))
                axis.plot(names, mean, color=colour, marker="o", label=f"{bits} bits")
                axis.plot(names, worst, color=colour, linestyle="dotted", linewidth=1)
        axis.set(yscale="log", title=field.replace("_", " ") + ": mean, and worst head (dotted)", ylabel="%")
        axis.set_ylim(top=min(axis.get_ylim()[1], 10 * _DIVERGED))
        axis.tick_params(axis="x", rotation=30)
    axes[0].legend()
    plots.save(figure, path)


def _window_by_rank(ablation: Ablation, path: Path) -> None:
    points = ablation.of_axis("window_by_rank")
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, x, line in ((axes[0], 0, 1), (axes[1], 1, 0)):
        lines = list(dict.fromkeys(p["labels"][line] for p in points))
        for value, colour in zip(lines, _COLOURS, strict=False):
            found = [p for p in points if p["labels"][line] == value]
            errors = [100 * ablation.errors[p["name"]]["state_error"].mean() for p in found]
            label = f"{('window', 'rank')[line]} {value}"
            axis.plot([p["labels"][x] for p in found], errors, marker="o", color=colour, label=label)
        axis.set(yscale="log", xlabel=("window", "rank")[x])
        axis.legend()
    axes[0].set_ylabel("mean state error, %")
    plots.save(figure, path)


def _ratios(ablation: Ablation, name: str, path: Path) -> None:
    """Every head's error over that without the option."""
    points = [p for p in ablation.of_axis(name) if ablation.ratio(p) is not None]
    figure, axis = plt.subplots(figsize=(10, 4))
    layers = np.unique(ablation.layers)
    for column, point in enumerate(points):
        ratio = ablation.ratio(point)
        assert ratio is not None
        for index, layer in enumerate(layers):
            heads = ratio[ablation.layers == layer].reshape(-1)
            place = column + 0.22 * (index - (len(layers) - 1) / 2)
            colour = _COLOURS[1 + index % (len(_COLOURS) - 1)]
            label = f"layer {layer}" if column == 0 else None
            axis.plot(np.full(heads.size, place), heads, "o", color=colour, alpha=0.5, label=label)
    axis.axhline(1, color="0.4", linewidth=1)
    axis.set_xticks(range(len(points)))
    axis.set_xticklabels(["\n".join(p["labels"]) for p in points])
    axis.set(yscale="log", ylabel="state error over that without", xlabel="bits, rotation, clip")
    axis.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    plots.save(figure, path)


def _numbers(ablation: Ablation, path: Path) -> None:
    """The smoothing exponent and refit_gain, as far as they were varied: mean error against the number."""
    found = {name: points for name in ("smoothing", "refit_gain") if (points := ablation.of_axis(name))}
    figure, axes = plt.subplots(1, len(found), figsize=(5 * len(found), 3.8), squeeze=False)
    for axis, (name, points) in zip(axes[0], found.items(), strict=True):
        lines = list(dict.fromkeys(tuple(p["labels"][:-1]) for p in points))
        for line, colour in zip(lines, (plots.BLUE, plots.GREEN, plots.VERMILION), strict=False):
            mine = [p for p in points if tuple(p["labels"][:-1]) == line]
            errors = [100 * ablation.errors[p["name"]]["state_error"].mean() for p in mine]
            label = f"{line[0]} bits" + "".join(f", {x}" for x in line[1:])
            axis.plot([p["labels"][-1] for p in mine], errors, marker="o", color=colour, label=label)
        xlabel = "smoothing exponent" if name == "smoothing" else name
        axis.set(yscale="log", xlabel=xlabel, ylabel="mean state error, %")
        axis.legend()
    plots.save(figure, path)


def _long(ablation: Ablation, path: Path) -> None:
    """Error over position on the heads that hardly forget: a panel per head."""
    heads = next(iter(ablation.long.values()))["heads"]
    figure, axes = plt.subplots(2, -(-len(heads) // 2), figsize=(13, 6.4), sharex=True, sharey=True)
    for head, axis in zip(range(len(heads)), axes.reshape(-1), strict=False):
        for index, (name, found) in enumerate(ablation.long.items()):
            errors = np.minimum(100 * found["state_error"][:, head], _DIVERGED)
            look = {"color": _COLOURS[index % len(_COLOURS)], "linestyle": _DASHES[index // len(_COLOURS)]}
            axis.plot(found["positions"], errors, label=name, **look)
        axis.set(yscale="log", title=heads[head])
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(plots.tokens_formatter())
    for axis in axes[:, 0]:
        axis.set_ylabel("state error, %")
    for axis in axes.reshape(-1)[len(heads) :]:
        axis.axis("off")
    handles, labels = axes.reshape(-1)[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center left", bbox_to_anchor=(0.92, 0.5))
    plots.save(figure, path)
