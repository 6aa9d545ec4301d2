"""Writes docs/results.md from the saved runs under results/: no number on that page is typed by hand.

    python -m experiments.results_page

A section is the table of one run (its table.md or README.md), one heading deeper, with its figures. Runs that are not there
are named at the end as not measured.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from absl import app

from experiments import report

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/results.md"


@dataclasses.dataclass(frozen=True)
class Section:
    """One saved run: its folder under results/, and what it shows."""

    folder: str
    title: str
    shows: str


SECTIONS = (
    Section("accuracy", "Every method on the trained model", "4,096 tokens on a CPU: what README.md quotes."),
    Section("long", "65,536 tokens", "Sixteen streams on one H200, every method of the library."),
    Section("suite", "Recall and reasoning", "Tasks that only the recurrent state can do, judged against `exact`."),
    Section("suite_long", "Recall over 32,768 tokens", "Answers up to 16,384 tokens old, fewer methods, on a CPU."),
    Section("replay", "Recorded traces", "Every method on what three layers are fed by prose, code and recall."),
    Section("ablations", "Ablations", "The paper's axes and those beyond it, on recorded traces."),
    Section("policy/tiny-hybrid", "Policies for the trained model", "Bits, rank and options per layer and per head."),
    Section("policy/model", "The model with those policies", "Other streams than the plans were made from."),
    Section("policy/note4", "Policies for heads of two kinds", "Strong low-rank heads, and heads of flat spectrum."),
    Section("drift", "One head", "The article's simulator; subspace iteration against SVD; 4 bits on a slow head."),
    Section("kernels/nvidia_h200", "Kernels on an H200", "Append and fold, their peers in the same run, what binds."),
)  # fmt: skip


def page(root: Path = ROOT) -> str:
    """The text of docs/results.md for the saved runs below `root`."""
    there = [section for section in SECTIONS if _table(root, section) is not None]
    missing = [section for section in SECTIONS if section not in there]
    lines = [
        "# Results",
        "",
        "Made by `python -m experiments.results_page` from the runs saved under `results/`; each names its command, versions",
        "and device.",
        "",
        *(f"- [{section.title}](#{_anchor(section.title)}): {section.shows}" for section in there),
        "",
    ]
    for section in there:
        table = _table(root, section)
        assert table is not None
        lines += [
            f"## {section.title}",
            "",
            f"{section.shows} Saved in [results/{section.folder}](../results/{section.folder}).",
            "",
        ]
        lines += [_deeper(table, section.folder).strip(), ""]
        figures = sorted(path.name for path in (root / "results" / section.folder).glob("*.png"))
        lines += [f"![{name}](../results/{section.folder}/{name})" for name in figures if f"({name})" not in table]
        lines.append("")
    lines += ["## Not measured", ""]
    lines += [f"- {section.title} (results/{section.folder})" for section in missing]
    lines += [
        "- Real Qwen3.5 or Kimi Linear weights, GSM8K, AIME: no weights were at hand. docs/long_generation.md has the commands.",
        "- Any card but one H200.",
        "",
    ]
    return "\n".join(lines)


def _table(root: Path, section: Section) -> str | None:
    for name in ("table.md", "README.md"):
        path = root / "results" / section.folder / name
        if path.exists():
            return path.read_text()
    return None


def _deeper(text: str, folder: str) -> str:
    """The text without its title, with headings one deeper and links that work from docs/."""
    text = re.sub(r"\A# .*\n", "", text)
    text = re.sub(r"(?m)^(#+) ", r"#\1 ", text)
    return re.sub(r"\]\((?!https?:|#|/|\.\.)([^)]+)\)", rf"](../results/{folder}/\1)", text)


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
    (ROOT / "docs").mkdir(exist_ok=True)
    report.write_text(ROOT / PAGE, page())
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    app.run(main)
