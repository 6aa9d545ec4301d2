"""Finished runs without a model: tallies written by hand, for tests of what a report makes of them."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from experiments import report, streams, tally
from experiments.lockstep import Progress


@dataclasses.dataclass
class SyntheticRun:
    """Methods on some streams of a model with L recurrent layers of H heads; `exact` first, the others hardly worse."""

    names: list[str]
    streams: streams.Streams
    measure_at: list[int]
    num_layers: int
    num_heads: int

    def __post_init__(self):
        kinds = ("full_attention",) + ("linear_attention",) * self.num_layers
        self.config = SimpleNamespace(layer_types=kinds, attention_window=32)
        num_streams, num_tokens = self.streams.tokens.shape
        empty = tally.empty_tally(
            num_streams=num_streams, num_tokens=num_tokens, num_answers=len(self.streams.answers),
            num_positions=len(self.measure_at), num_layers=self.num_layers, num_heads=self.num_heads,
        )  # fmt: skip
        tallies = [
            dataclasses.replace(
                empty, answers_right=np.ones_like(empty.answers_right), kl=np.full_like(empty.kl, 1e-6 * (name != "exact")),
                state_errors=np.full_like(empty.state_errors, 1e-3 * (name != "exact")),
            ) for name in self.names
        ]  # fmt: skip
        self.progress: Any = Progress([], tallies)

    def change(self, name: str, **fields: np.ndarray) -> None:
        """Puts other numbers into the tally of a method."""
        index = self.names.index(name)
        self.progress.tallies[index] = dataclasses.replace(self.progress.tallies[index], **fields)

    def state_bytes(self, _: Any) -> list[dict[str, float]]:
        return [{"at_rest": 1.0, "total": 1.5, "live": 1.5}] * len(self.names)

    def write(self, directory: Path, records: list[dict]) -> Path:
        """A results.jsonl with a made-up first line."""
        directory.mkdir()
        num_streams = len(self.streams.tokens) // len(set(self.streams.groups))
        config = {
            "methods": self.names, "num_streams": num_streams, "num_tokens": self.streams.tokens.shape[1], "dtype": "float32",
        }  # fmt: skip
        header = {
            "measure": "run",
            "config": config,
            "sessions": [{"command": "none", "device": "none", "jax": "none"}],
        }
        report.write_jsonl(directory / "results.jsonl", [header, *records])
        return directory
