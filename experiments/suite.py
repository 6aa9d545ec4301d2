"""A recall and reasoning suite: which state methods answer what `exact` answers, task by task, and which fail.

    python -m experiments.suite --methods=step-int4 --num_tokens=4096                # minutes on two CPU cores
    python -m experiments.suite --methods=all --num_tokens=16384 --num_streams=8     # on a GPU
    python -m experiments.suite --report_only --output_dir=results/suite             # tables and figures again

Recall streams (`experiments.tasks`: registers, overwritten registers, counters, copies, chains of two hops, and parity as
a control) are decoded token by token with every method, as in `experiments.accuracy`, and the whole answers are compared
with those of the fp32 state. The rule of the verdicts is that of `experiments.suite_records`. The model has to have learned
the tasks; those that it has not are not judged. Answers are up to half as old as the
streams are long, at most 16,384 tokens.

The folder --output_dir then holds

    table.md        verdicts, accuracies, differences, accuracy by age; also printed
    results.jsonl   every number behind them, with intervals, and the records of `experiments.accuracy`
    *.png           accuracy by age; difference to exact
    run.json        the configuration, and each start of the program

A killed run goes on from its last checkpoint when the same command is given again, and ends with the same numbers.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from absl import app

from experiments import accuracy, accuracy_records, report, suite_records, suite_report
from experiments.run_directory import RunDirectory
from experiments.settings import define_flags, option, run_main


@dataclasses.dataclass(frozen=True)
class Settings(accuracy.Settings):
    """The flags; see `--help`."""

    num_streams: int = option(8, "Streams; at least two, and intervals narrow with their number.")
    num_tokens: int = option(16384, "Length of every stream; a multiple of --segment. Twice the oldest answer.")
    output_dir: str = option("runs/suite", "Folder of this run.")

    def __post_init__(self):
        super().__post_init__()
        if self.num_streams < 2:
            raise ValueError(f"--num_streams must be at least 2, got {self.num_streams}: intervals are over streams")


def run(settings: Settings) -> str:
    """The whole program; returns the tables.

    Raises:
      SystemExit: With one line that says what to change, before anything was computed or written.
    """
    try:
        if settings.report_only:
            return suite_report.write(Path(settings.output_dir))
        job = accuracy.prepare(settings, program="suite", with_text=False)
        directory = RunDirectory.open(settings.output_dir, job.config)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"suite: {error}") from error
    lockstep, progress = accuracy.evaluate(settings, job, directory)
    records = [*accuracy_records.records(lockstep, progress), *suite_records.records(lockstep, progress)]
    report.write_jsonl(directory.path / "results.jsonl", [directory.header(), *records])
    return suite_report.write(directory.path)


def main(argv: Sequence[str]) -> None:
    run_main("suite", argv, Settings, run)


if __name__ == "__main__":
    define_flags(Settings)
    app.run(main)
