"""Reading tensors by name from a safetensors file, or from shards with an index, with errors that say what is wrong."""

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Checkpoint:
    """The tensors of a directory (one file or shards) or of a single file, read lazily.

    Attributes:
      files: Which file holds which tensor, by tensor name.
    """

    def __init__(self, path: str | os.PathLike):
        """Finds the tensors and checks the files against the index.

        Raises:
          FileNotFoundError: If the index, a shard or the file is missing.
          ValueError: If a file is truncated or disagrees with the index.
        """
        path = Path(path)
        index = path / INDEX
        listed = None
        if index.exists():
            listed = {name: path / file for name, file in read_json(index)["weight_map"].items()}
            paths = sorted(set(listed.values()))
        else:
            paths = [path if path.is_file() else path / SINGLE]
        absent = [str(file) for file in paths if not file.exists()]
        if absent:
            raise FileNotFoundError(f"missing checkpoint files: {', '.join(absent)}")
        self.files = {name: file for file in paths for name in _open(file).keys()}  # noqa: SIM118 (no mapping)
        if listed is not None and listed != self.files:
            wrong = sorted(name for name in listed | self.files if listed.get(name) != self.files.get(name))
            raise ValueError(f"{index} and its shards disagree about: {_listing(wrong)}")
        self._path: Path | None = None
        self._file: Any = None

    def read(self, name: str) -> np.ndarray:
        """One tensor in its stored dtype (bfloat16 through ml_dtypes)."""
        path = self.files[name]
        if path != self._path:
            self._path, self._file = path, _open(path)
        return self._file.get_tensor(name)


def check_names(expected: Collection[str], present: Collection[str], *, skip: tuple[str, ...] = ()) -> None:
    """Requires that a checkpoint holds exactly the expected tensors.

    Args:
      expected: Names the model needs.
      present: Names the checkpoint has.
      skip: Prefixes of names that may be present without being expected.

    Raises:
      ValueError: Naming the tensors that are missing or unknown.
    """
    missing = sorted(set(expected) - set(present))
    unknown = sorted(name for name in set(present) - set(expected) if not name.startswith(skip))
    problems = [f"missing tensors: {_listing(missing)}"] * bool(missing)
    problems += [f"unknown tensors: {_listing(unknown)}"] * bool(unknown)
    if problems:
        raise ValueError("checkpoint does not match its config; " + "; ".join(problems))


def read_json(path: Path) -> dict[str, Any]:
    """The contents of a JSON file; FileNotFoundError or ValueError names the file."""
    if not path.exists():
        raise FileNotFoundError(f"missing checkpoint file: {path}")
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON (truncated download?): {error}") from error


def _open(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError('reading checkpoints needs safetensors: pip install "leapquant-jax[models]"') from error
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file (truncated download?): {error}") from error


def _listing(names: list[str], limit: int = 20) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
