"""How far a low-bit recurrent state drifts from the fp32 one, without a model: one head, synthetic tokens.

    python -m experiments.drift                                 # the article's toy head at 8 bits, in twenty seconds
    python -m experiments.drift --bits=6 --window=8 --rank=2    # the same with your settings
    python -m experiments.drift --bits=8,4 --studies=all        # and what is below

Studies:

  toy    rounding every step, only the window, the window with smoothing, with compensators, and with both: relative
         state error over the steps, and how far the state's peak stands above its median before and after each part.
  heads  slow, fast, low-rank and full-rank heads: what one subspace iteration per fold costs against an exact SVD.
  slow   4 bits on a head that forgets 0.01 % per token, with and without the MSE-optimal clip: the energy that a fold
         adds against the energy that a window's decay removes.
  rings  the ring of records in fp32, fp16 and bf16 with nothing else rounded.

Writes results.jsonl (command, versions and device in its first line), table.md and a PNG per study to --output_dir.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from absl import app

import leapquant_jax as lq
from experiments import drift_report, drift_studies, report, toy_heads
from experiments.drift_studies import RECORD_EVERY
from experiments.run_directory import RunDirectory
from experiments.settings import define_flags, option, start

STUDIES = ("toy", "heads", "slow", "rings")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags; see `--help`."""

    studies: tuple[str, ...] = option(("toy",), f"Of {', '.join(STUDIES)}, or all.")
    bits: tuple[str, ...] = option(("8",), "Widths of the toy study: of 8, 6, 4.")
    window: int = option(16, "Toy study: tokens between two roundings.")
    rank: int = option(4, "Toy study: compensators.")
    smoothing: float = option(0.5, "Toy study: exponent of the key rows' mean magnitude; 0 switches smoothing off.")
    decay: tuple[str, ...] = option(("0.9995", "0.9999"), "Smallest and largest decay per token of the toy head.")
    length: int = option(4096, f"Tokens of the toy study; a multiple of {RECORD_EVERY}.")
    seeds: int = option(16, "Independent toy heads; the median over them is reported.")
    seed: int = option(0, "Chooses the tokens.")
    output_dir: str = option("runs/drift", "Folder for the results; a folder of other settings is refused.")

    def __post_init__(self):
        unknown = set(self.studies) - {*STUDIES, "all"}
        if unknown or not self.studies:
            raise ValueError(f"--studies must name some of {', '.join(STUDIES)}, or be all; got {self.studies}")
        if self.length < RECORD_EVERY or self.length % RECORD_EVERY:
            raise ValueError(f"--length must be a positive multiple of {RECORD_EVERY}, got {self.length}")
        if self.seeds < 1:
            raise ValueError(f"--seeds must be at least 1, got {self.seeds}")
        if not self.bits or any(width not in ("8", "6", "4") for width in self.bits):
            raise ValueError(f"--bits must name some of 8, 6, 4; got {self.bits}")
        head = self.head()
        for config in self.leap_configs():
            config.check_dims(head.key_dim, head.value_dim)

    def head(self) -> toy_heads.ToyHead:
        """The toy head.

        Raises:
          ValueError: If --decay is not a range within (0, 1].
        """
        try:
            low, high = (float(x) for x in self.decay)
        except ValueError as error:
            raise ValueError(f"--decay takes two numbers, smallest and largest; got {self.decay}") from error
        if not 0 < low <= high <= 1:
            raise ValueError(f"--decay must satisfy 0 < smallest <= largest <= 1, got {low} and {high}")
        return toy_heads.ToyHead(decay=(low, high))

    def leap_configs(self) -> list[lq.LeapConfig]:
        """The full method of the toy study at each width."""
        return [
            lq.LeapConfig(bits=int(width), window=self.window, rank=self.rank, smoothing=self.smoothing)
            for width in self.bits
        ]


def main(argv: Sequence[str]) -> None:
    settings = start("drift", argv, Settings)
    try:
        run = RunDirectory.open(settings.output_dir, {"program": "drift", **_without_folder(settings)})
    except ValueError as error:
        raise SystemExit(f"drift: {error}") from error
    studies: dict[str, Callable[[], list[dict]]] = {
        "toy": lambda: drift_studies.toy_study(
            settings.head().tokens(settings.seeds, settings.length, settings.seed), settings.leap_configs()
        ),
        "heads": lambda: drift_studies.heads_study(settings.seed),
        "slow": lambda: drift_studies.slow_study(settings.seed),
        "rings": lambda: drift_studies.rings_study(settings.seed),
    }
    records = [run.header()]
    for name in STUDIES if "all" in settings.studies else settings.studies:
        records += studies[name]()
    report.write_jsonl(run.path / "results.jsonl", records)
    print(drift_report.write(run.path))


def _without_folder(settings: Settings) -> dict[str, Any]:
    """What determines the results."""
    toy_head = dataclasses.asdict(settings.head())
    return {**dataclasses.asdict(dataclasses.replace(settings, output_dir="")), "toy_head": toy_head}


if __name__ == "__main__":
    define_flags(Settings)
    app.run(main)
