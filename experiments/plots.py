"""One look for all figures: colours that the colour-blind can tell apart, and a line style for each family."""

import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

# Okabe and Ito's palette, without its yellow (too pale on white).
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip

plt.rcParams.update(
    {
        "axes.grid": True, "axes.spines.right": False, "axes.spines.top": False, "figure.dpi": 110, "font.size": 10,
        "grid.alpha": 0.3, "legend.frameon": False, "lines.linewidth": 1.6, "lines.markersize": 4, "savefig.bbox": "tight",
    }
)  # fmt: skip

_BY_WIDTH = {
    "fp32": BLACK, "bf16": ORANGE, "fp16": SKY, "fp8": PURPLE, "int8": BLUE, "int6": GREEN, "int4": VERMILION,
}  # fmt: skip
_BY_FAMILY = {"step": (0, (1, 1.2)), "window": (0, (5, 1.5)), "leapquant": "solid", "exact": "solid"}
# Ablations share colour and dashes, and are told apart by markers.
_BY_CHANGE = {
    "+smoothing": "^", "+compensators": "s", "-svd": "v", "-paper": "D", "-kept": "<", "-hadamard": "*", "-no-clip": "x",
    "-clip": "P", "-bf16-records": "o",
}  # fmt: skip


def style(method: str) -> dict[str, Any]:
    """Line style of a method by name: colour is the number format, dashes how often it is rounded."""
    family, _, rest = method.partition("-")
    width = re.split("[-+]", rest)[0]
    change = rest.removeprefix(width)
    look = {"color": _BY_WIDTH.get(width, BLACK), "linestyle": _BY_FAMILY.get(family, "dashdot"), "label": method}
    if method == "exact":
        return look | {"color": "0.7", "linewidth": 4}
    if change:
        look |= {"linestyle": "dashdot", "linewidth": 0.9, "marker": _BY_CHANGE.get(change)}
    return look


def save(figure: Figure, path: Path) -> None:
    """Writes and closes a figure."""
    figure.savefig(path)
    plt.close(figure)


def tokens_formatter() -> FuncFormatter:
    """Axis labels 256, 512, 1K, 2K ... for powers of two."""
    return FuncFormatter(lambda x, _: f"{x / 1024:g}K" if x >= 1024 else f"{x:g}")
