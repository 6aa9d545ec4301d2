"""Takes the method apart on recorded traces: what every part, every number and every format is worth.

    python -m experiments.record                                          # once: the traces
    python -m experiments.ablate                                          # about ten minutes on a GPU
    python -m experiments.ablate --num_tokens=511 --axes=parts,records --long_tokens=0      # a few minutes on a CPU
    python -m experiments.ablate --report_only --output_dir=results/ablations               # tables and figures, no run

Axes: parts one by one; window by rank; rotation and clip at every width; ways to spend equal bytes; number formats of the
records; how the compensators are fitted; the smoothing exponent; refit_gain. All traces are decoded as rows of one batch with
each configuration, and the errors of the state (after the last token) and of the outputs (over all tokens) are saved for
every layer, prompt and head. Then synthetic heads that hardly forget are decoded for --long_tokens with the configurations
whose stability is in question.

--output_dir holds table.md, results.jsonl (command, versions and device in its first line) and PNGs, which --report_only
makes again from results.jsonl. A killed run goes on with the first unfinished configuration.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app

import leapquant_jax as lq
from experiments import ablate_report, ablation_axes, items, playback, report, toy_heads, traces
from experiments.ablation_axes import AXES
from experiments.run_directory import RunDirectory
from experiments.settings import define_flags, option, run_main
from experiments.traces import Row, TraceBatch

_BLOCK = 256  # tokens between two looks at the states; a multiple of every window


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags; see `--help`."""

    trace_dir: str = option("runs/traces", "Folder written by experiments.record; its traces must be of equal sizes.")
    axes: tuple[str, ...] = option(("all",), f"Of {', '.join(AXES)}, or all.")
    num_tokens: int = option(0, "Use only so many tokens of each trace; 0 for all.")
    long_tokens: int = option(65536, "Length of the synthetic heads that hardly forget; 0 leaves them out.")
    seed: int = option(0, "Of the synthetic heads.")
    report_only: bool = option(False, "Only write the tables and figures of --output_dir again.")
    output_dir: str = option("runs/ablations", "Folder of this run; a folder of other settings is refused.")
    compilation_cache: str = option(
        "runs/compilation_cache", "Where compiled programs are kept for the next start; empty: nowhere."
    )

    def __post_init__(self):
        unknown = [name for name in self.axes if name not in (*AXES, "all")]
        if unknown or not self.axes:
            raise ValueError(f"--axes must name some of {', '.join(AXES)}, or be all; got {', '.join(self.axes)}")
        for name in ("num_tokens", "long_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name} must not be negative, got {getattr(self, name)}")

    def points(self) -> list[ablation_axes.Point]:
        """Everything to be measured on the traces."""
        names = AXES if "all" in self.axes else dict.fromkeys(self.axes)
        return [point for name in names for point in AXES[name]()]


def run(settings: Settings) -> str:
    """The whole program; returns the tables.

    Raises:
      ValueError, FileNotFoundError: Whose message says what to change.
    """
    if settings.report_only:
        return ablate_report.write(Path(settings.output_dir))
    points = settings.points()
    batches, sums = traces.load_batches(settings.trace_dir, settings.num_tokens or None)
    if len(batches) > 1:
        raise ValueError(f"--trace_dir {settings.trace_dir} holds traces of different sizes: use one model per folder")
    (batch,) = batches
    config = {
        "program": "ablate", "traces": sums, "axes": list(settings.axes), "num_tokens": settings.num_tokens,
        "long_tokens": settings.long_tokens, "seed": settings.seed, "platform": jax.default_backend(),
    }  # fmt: skip
    directory = RunDirectory.open(settings.output_dir, config)
    found = measure(directory.path, points, batch)
    if settings.long_tokens:
        found += measure_long(directory.path, ablation_axes.long_methods(), settings.long_tokens, settings.seed)
    named = [
        {
            "measure": "point",
            "axis": p.axis,
            "labels": p.labels,
            "name": p.method.name,
            "against": p.against and p.against.name,
        }
        for p in points
    ]
    rows = {
        "measure": "rows",
        "rows": [{"layer": layer, "prompt": prompt} for layer, prompt in batch.rows],
        "lengths": batch.lengths,
    }
    report.write_jsonl(directory.path / "results.jsonl", [directory.header(), rows, *named, *found])
    return ablate_report.write(directory.path)


def measure(directory: Path, points: Sequence[ablation_axes.Point], batch: TraceBatch) -> items.Records:
    """The errors of every configuration that a point names, once each."""
    methods = {method.name: method for p in points for method in (p.method, p.against) if method is not None}
    expected = playback.expectations(batch, _BLOCK)

    def errors(method: lq.Method) -> items.Records:
        played = playback.play(method, batch, expected)
        return [
            {
                "measure": "errors", "name": method.name, **_bytes(method, played, batch),
                "state_error": report.significant(played.errors.state[-1]), "output_error": report.significant(played.output_error),
            }
        ]  # fmt: skip

    todo: dict[str, Callable[[], items.Records]] = {
        f"traces {name}": functools.partial(errors, method) for name, method in methods.items()
    }
    return items.finish_items(directory, todo, "ablations")


def measure_long(directory: Path, methods: Sequence[lq.Method], length: int, seed: int) -> items.Records:
    """State errors of heads that hardly forget, over position: the heads of one request."""
    tokens = [np.moveaxis(np.asarray(x), (0, 2), (2, 0)) for x in toy_heads.long_heads(length, seed)]
    dense = np.zeros((1, tokens[0].shape[2], tokens[1].shape[-1], tokens[2].shape[-1]), np.float32)
    batch = TraceBatch.stack(
        [Row(0, "synthetic")], [lq.Trace(*map(jax.numpy.asarray, tokens), dense=jax.numpy.asarray(dense))]
    )
    expected = playback.expectations(batch, 4 * _BLOCK)

    def errors(method: lq.Method) -> items.Records:
        played = playback.play(method, batch, expected)
        return [
            {
                "measure": "long", "name": method.name, **_bytes(method, played, batch), "heads": toy_heads.LONG_KINDS,
                "positions": played.positions, "state_error": report.significant(played.errors.state[:, 0]),
            }
        ]  # fmt: skip

    todo: dict[str, Callable[[], items.Records]] = {
        f"long {method.name}": functools.partial(errors, method) for method in methods
    }
    return items.finish_items(directory, todo, "long decodes")


def _bytes(method: lq.Method, played: playback.Playback, batch: TraceBatch) -> dict[str, Any]:
    """Bytes per state element, at rest and with the ring."""
    sizes, elements = method.state_bytes(played.state), batch.trace.dense.size
    return {"at_rest": sizes["at_rest"] / elements, "active": sizes["total"] / elements}


def main(argv: Sequence[str]) -> None:
    run_main("ablate", argv, Settings, run)


if __name__ == "__main__":
    define_flags(Settings)
    app.run(main)
