"""The saved results of an ablation, as its tables and figures read them."""

import dataclasses
from pathlib import Path
from typing import Any, Self

import numpy as np

from experiments import report


@dataclasses.dataclass(frozen=True)
class Ablation:
    """The records of a run.

    Attributes:
      header: Command, versions, device, configuration.
      layers: int [N], layer of each trace.
      points: Records with axis, labels, name and against, in order; those that were measured.
      missing: Those that were not, in a run that was stopped.
      errors: By name: bytes, and fp64 [N, H] state_error and output_error; `device` where it is not that of the run.
      long: By name: positions [M] and state_error [M, heads].
    """

    header: dict[str, Any]
    layers: np.ndarray
    points: list[dict]
    missing: list[dict]
    errors: dict[str, dict[str, Any]]
    long: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Those of a run's folder.

        Raises:
          FileNotFoundError: If it holds no results.
        """
        file = directory / "results.jsonl"
        if not file.exists():
            raise FileNotFoundError(f"{directory} holds no results.jsonl: run without --report_only first")
        header, rows, *records = report.read_jsonl(file)

        def named(measure: str) -> dict[str, dict[str, Any]]:
            return {
                r["name"]: {key: np.array(x, np.float64) if key.endswith("_error") else x for key, x in r.items()}
                for r in records
                if r["measure"] == measure
            }

        layers = np.array([row["layer"] for row in rows["rows"]])
        errors = named("errors")
        points: list[dict] = []
        missing: list[dict] = []
        for point in (r for r in records if r["measure"] == "point"):
            needed = {point["name"], point["against"] or point["name"]}
            (points if needed <= errors.keys() else missing).append(point)
        return cls(header, layers, points, missing, errors, named("long"))

    def of_axis(self, axis: str) -> list[dict]:
        return [p for p in self.points if p["axis"] == axis]

    @property
    def axes(self) -> list[str]:
        return list(dict.fromkeys(p["axis"] for p in self.points))

    def ratio(self, point: dict) -> np.ndarray | None:
        """State error over that of what the point is compared with, [N, H]; NaN where both are zero."""
        if point["against"] is None or point["against"] == point["name"]:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.errors[point["name"]]["state_error"] / self.errors[point["against"]]["state_error"]
