"""Results as files: one JSON object per line for programs, aligned Markdown tables for people."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def write_text(path: Path, text: str) -> None:
    """Replaces a file as a whole: a kill leaves either the old one or the new one, never half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """Writes one indented JSON document; see `plain` for what becomes of NumPy values and of NaN."""
    write_text(path, json.dumps(plain(value), indent=2, allow_nan=False) + "\n")


def write_jsonl(path: Path, records: Iterable[Mapping]) -> None:
    """Writes one JSON object per line."""
    write_text(path, "".join(json.dumps(plain(record), allow_nan=False) + "\n" for record in records))


def read_jsonl(path: Path) -> list[dict]:
    """The records of `write_jsonl`; "nan" and "inf" are still strings, which `float` reads."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def plain(value: Any) -> Any:
    """NumPy values as Python's own, and non-finite floats as "nan", "inf", "-inf": JSON has no word for them."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """A Markdown table whose source is aligned too: the first `left` columns to the left, numbers to the right."""
    table = [list(headers), *(list(row) for row in rows)]
    widths = [max(3, *(len(row[column]) for row in table)) for column in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * width if i < left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([line(table[0]), line(rule), *map(line, table[1:])])


def significant(values: ArrayLike, digits: int = 4) -> np.ndarray:
    """Numbers rounded to so many significant digits, for files that are committed."""
    return np.vectorize(lambda x: float(f"{x:.{digits}g}"), otypes=[float])(np.asarray(values, np.float64))


def percent(share: float, digits: int = 3) -> str:
    """A share as a percentage with so many significant digits: 0.0123 -> "1.23 %"; beyond 1e6 % only the size."""
    share = float(share)
    if not math.isfinite(share):
        return str(share)
    value = 100 * share
    if value == 0:
        return "0 %"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        return f"{value:.0e} %"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f} %"
