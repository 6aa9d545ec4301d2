"""Tables and figures of the drift experiment, from its results.jsonl alone."""

from pathlib import Path

import matplotlib.pyplot as plt

from experiments import plots, report

# What the article (Ghana 2026, "an 8-bit recurrent state that stops rounding every token") measured with its toy head.
ARTICLE_ERRORS = {
    (8, "each step"): "15 %", (8, "window"): "4.3 %", (8, "window + smoothing"): "3.0 %", (8, "all"): "1.0 %",
    (4, "each step"): "> 1000 %", (4, "all"): "21 %",
}  # fmt: skip
ARTICLE_PEAKS = {"nothing": "48", "compensators": "5.3", "smoothing": "5.1"}

_PART_STYLES = {
    "each step": {"color": plots.BLACK, "linestyle": (0, (1, 1.2))},
    "window": {"color": plots.ORANGE, "linestyle": (0, (5, 1.5))},
    "window + smoothing": {"color": plots.GREEN, "linestyle": "dashdot"},
    "window + compensators": {"color": plots.SKY, "linestyle": (0, (3, 1, 1, 1, 1, 1))},
    "all": {"color": plots.BLUE, "linestyle": "solid"},
}


def write(directory: Path) -> str:
    """Writes table.md and the figures; returns the table's text."""
    records = report.read_jsonl(directory / "results.jsonl")
    header = next(r for r in records if r["measure"] == "run")
    by_measure: dict[str, list[dict]] = {}
    for record in records:
        by_measure.setdefault(record["measure"], []).append(record)
    sections = [f"# Drift of a low-bit state\n\n    {header['sessions'][-1]['command']}\n"]
    if "toy_error" in by_measure:
        sections.append(_toy_tables(by_measure["toy_error"], by_measure["toy_peak_over_median"], header["config"]))
        _toy_figure(by_measure["toy_error"], directory / "toy_head.png")
    if "fit" in by_measure:
        sections.append(_fit_table(by_measure["fit"]))
    if "slow_head" in by_measure:
        sections.append(_slow_table(by_measure["slow_head"]))
        _curves(
            [(f"scale: {r['scale']}", r) for r in by_measure["slow_head"]],
            "4 bits, rank 6, decay 0.9999 per token",
            directory / "slow_head.png",
        )
    if "ring" in by_measure:
        sections.append(_ring_table(by_measure["ring"]))
        _curves(
            [(f"records in {r['records']}", r) for r in by_measure["ring"]],
            "Only the ring's records are rounded",
            directory / "rings.png",
        )
    text = "\n".join(sections)
    report.write_text(directory / "table.md", text)
    return text


def _toy_tables(errors: list[dict], peaks: list[dict], config: dict) -> str:
    is_article = (config["length"], config["window"], config["rank"], config["smoothing"]) == (4096, 16, 4, 0.5)
    rows = [
        [
            str(r["bits"]), r["part"], report.percent(r["error"][-1]), report.percent(max(map(float, r["error"]))),
            ARTICLE_ERRORS.get((r["bits"], r["part"]), "") if is_article else "",
        ]
        for r in errors
    ]  # fmt: skip
    table = report.markdown_table(["bits", "rounded", "error at the end", "largest error", "article"], rows, left=2)
    flat = report.markdown_table(
        ["peak over median after", "ratio", "article"],
        [[r["after"], f"{r['ratio']:.1f}", ARTICLE_PEAKS.get(r["after"], "") if is_article else ""] for r in peaks],
    )
    return (
        f"## Toy head\n\nRelative state error after {config['length']:,} tokens, median of {config['seeds']} heads "
        f"(window {config['window']}, rank {config['rank']}, smoothing {config['smoothing']}).\n\n{table}\n\n"
        f"How uneven the state is at the end: largest magnitude over median magnitude.\n\n{flat}\n"
    )


def _fit_table(records: list[dict]) -> str:
    rows = [[r["head"], report.percent(r["subspace"]), report.percent(r["svd"]), f"{r['ratio']:.3f}"] for r in records]
    table = report.markdown_table(["head", "one iteration", "exact SVD", "ratio"], rows)
    return f"## One warm-started subspace iteration against an exact SVD\n\n8 bits, rank 4, 128 x 128.\n\n{table}\n"


def _slow_table(records: list[dict]) -> str:
    marks = (4096, 8192, records[0]["steps"][-1])
    rows = []
    for r in records:
        at = dict(zip(r["steps"], r["error"], strict=True))
        rows.append(
            [r["scale"], *(report.percent(at[mark]) for mark in marks), report.percent(r["energy_gain_per_fold"])]
        )
    headers = ["scale of a column from", *(f"error at {mark:,}" for mark in marks), "energy per fold"]
    lost = report.percent(records[0]["energy_lost_per_window"])
    return (
        "## 4 bits on a slow head\n\n"
        f"Decay {records[0]['decay']} per token, 128 x 128. A window's decay removes {lost} of the energy; a fold that "
        f"adds more makes the state grow without bound.\n\n{report.markdown_table(headers, rows)}\n"
    )


def _ring_table(records: list[dict]) -> str:
    marks = (1024, 2048, 4096, 8192)
    rows = []
    for r in records:
        at = dict(zip(r["steps"], r["error"], strict=True))
        rows.append([r["records"], *(report.percent(at[mark]) for mark in marks)])
    table = report.markdown_table(["records", *(f"error at {mark:,}" for mark in marks)], rows)
    return f"## The ring's records, with an fp32 boundary state\n\n{table}\n"


def _toy_figure(errors: list[dict], path: Path) -> None:
    widths = list(dict.fromkeys(r["bits"] for r in errors))
    figure, axes = plt.subplots(1, len(widths), figsize=(4.2 * len(widths) + 0.8, 3.8), squeeze=False, sharey=True)
    for axis, width in zip(axes[0], widths, strict=True):
        for r in errors:
            if r["bits"] == width:
                shares = [100 * float(x) for x in r["error"]]
                axis.plot(r["steps"], shares, label=r["part"], **_PART_STYLES[r["part"]])
        axis.set(yscale="log", xlabel="tokens", title=f"{width}-bit codes")
    axes[0][0].set_ylabel("relative state error, %")
    axes[0][-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), title="rounded")
    plots.save(figure, path)


def _curves(named: list[tuple[str, dict]], title: str, path: Path) -> None:
    figure, axis = plt.subplots(figsize=(6, 3.8))
    styles = zip((plots.VERMILION, plots.BLUE, plots.GREEN), ("dashed", "solid", "dashdot"), strict=True)
    for (label, record), (colour, dashes) in zip(named, styles, strict=False):
        shares = [100 * float(x) for x in record["error"]]
        axis.plot(record["steps"], shares, label=label, color=colour, linestyle=dashes)
    axis.set(yscale="log", xlabel="tokens", ylabel="relative state error, %", title=title)
    axis.legend()
    plots.save(figure, path)
