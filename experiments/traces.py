"""Traces as files, and many traces as the rows of one batch.

A trace is two files, `<name>.safetensors` with the tensors of an `lq.Trace` and `<name>.json` beside it, which says where
they come from: layer, prompt, the model's SHA-256, the command and versions, and the SHA-256 of the tensors' file.
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import leapquant_jax as lq
from experiments import report
from models.checkpoints import Checkpoint, read_json

_FORMAT = "leapquant trace 1"
_TENSORS = ("q", "k", "v", "g", "beta", "dense")
_GATES = ("g", "beta")  # always fp32: a decay of 0.9999 has no neighbour in fp16
_REQUIRED = ("format", "layer", "prompt", "sha256")


def save_trace(
    directory: str | os.PathLike, trace: lq.Trace, *, prompt: str, metadata: Mapping[str, Any], storage: str = "float32"
) -> Path:
    """Writes one trace as `layer<layer>-<prompt>.safetensors` and `.json`.

    Args:
      directory: An existing folder.
      trace: One or more rows.
      prompt: Kind of the prompt; part of the name.
      metadata: Where the trace comes from, as JSON values.
      storage: "float32", or "float16" for half the bytes (decays and write strengths stay in float32).

    Returns:
      The path of the tensors' file.

    Raises:
      ValueError: If the arrays do not fit each other, or do not fit float16.
    """
    from safetensors.numpy import save

    lq.check_trace(trace)
    tensors = {}
    for name in _TENSORS:
        array = np.asarray(getattr(trace, name), np.float32)
        with np.errstate(over="ignore"):  # seen, and said, below
            tensors[name] = array.astype(np.float32 if name in _GATES else storage)
        if not np.isfinite(tensors[name]).all() and np.isfinite(array).all():
            raise ValueError(f"{name} reaches {np.abs(array).max():.3g}, which {storage} cannot hold: use float32")
    path = Path(directory) / f"layer{trace.layer:02d}-{prompt}.safetensors"
    data = save(tensors)
    document = {
        "format": _FORMAT, "layer": trace.layer, "prompt": prompt, "num_tokens": trace.q.shape[1], **trace.sizes,
        "storage": storage, "sha256": hashlib.sha256(data).hexdigest(), **metadata,
    }  # fmt: skip
    path.write_bytes(data)
    report.write_json(path.with_suffix(".json"), document)
    return path


def load_trace(path: str | os.PathLike) -> tuple[lq.Trace, dict[str, Any]]:
    """Reads one trace and checks it.

    Args:
      path: Of the tensors' file.

    Returns:
      (the trace in fp32, what its JSON file says).

    Raises:
      FileNotFoundError: If one of the two files is missing.
      ValueError: If a file is truncated, tensors are missing, unknown or of the wrong shape, or the files do not belong
        together; the message names what.
    """
    path = Path(path)
    document = read_json(path.with_suffix(".json"))
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise ValueError(f"{path.with_suffix('.json')} does not describe a trace of this version: record it again")
    absent = [name for name in _REQUIRED if name not in document]
    if absent:
        raise ValueError(f"{path.with_suffix('.json')} lacks {', '.join(absent)}: record the trace again")
    file = Checkpoint(path)
    missing, unknown = sorted(set(_TENSORS) - set(file.files)), sorted(set(file.files) - set(_TENSORS))
    if missing or unknown:
        raise ValueError(
            f"{path} is not a trace: missing tensors: {', '.join(missing) or 'none'}; unknown tensors: "
            f"{', '.join(unknown) or 'none'}"
        )
    if hashlib.sha256(path.read_bytes()).hexdigest() != document["sha256"]:
        raise ValueError(f"{path} is not the file that its JSON describes (SHA-256 differs): record it again")
    q, k, v, g, beta, dense = (jnp.asarray(file.read(name), jnp.float32) for name in _TENSORS)
    trace = lq.Trace(q, k, v, g, beta, dense, layer=document["layer"])
    try:
        lq.check_trace(trace)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return trace, document


def trace_files(directory: str | os.PathLike) -> list[Path]:
    """The traces of a folder, by name.

    Raises:
      FileNotFoundError: If there are none.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} holds no traces: make some with python -m experiments.record")
    return files


class Row(NamedTuple):
    """Which trace a row of a batch is."""

    layer: int
    prompt: str


class Block(NamedTuple):
    """Consecutive tokens of all rows.

    Attributes:
      tokens: (q, k, v, g, beta), [B, S, ...].
      active: bool [B, S]; False before a row's first token and behind its last.
      end: Tokens that the longest row has read after the block.
    """

    tokens: tuple[Array, ...]
    active: Array
    end: int


@dataclasses.dataclass(frozen=True)
class TraceBatch:
    """Traces of equal head counts and sizes as rows of one batch, padded to the longest.

    Attributes:
      rows: What each row is.
      trace: All rows; `layer` means nothing here.
      lengths: int [B], tokens of each row.
    """

    rows: tuple[Row, ...]
    trace: lq.Trace
    lengths: np.ndarray

    @classmethod
    def stack(cls, rows: Sequence[Row], traces: Sequence[lq.Trace]) -> "TraceBatch":
        """One row per trace (each of batch 1).

        Raises:
          ValueError: If the traces are of different sizes.
        """
        lengths = np.array([trace.q.shape[1] for trace in traces])

        def padded(x: Array) -> Array:
            return jnp.pad(x, [(0, 0), (0, int(lengths.max()) - x.shape[1])] + [(0, 0)] * (x.ndim - 2))

        for row, trace in zip(rows, traces, strict=True):
            if trace.sizes != {**traces[0].sizes, "batch": 1}:
                raise ValueError(f"{row} has sizes {trace.sizes}, {rows[0]} has {traces[0].sizes}: stack equal ones")
        columns = zip(*(trace.tokens for trace in traces), strict=True)
        q, k, v, g, beta = (jnp.concatenate([padded(x) for x in column]) for column in columns)
        dense = jnp.concatenate([trace.dense for trace in traces])
        return cls(tuple(rows), lq.Trace(q, k, v, g, beta, dense), lengths)

    def blocks(self, size: int) -> Iterator[Block]:
        """The tokens in blocks of `size` (a multiple of the window), which end one token before a window does.

        So a state is looked at with its ring as full as it gets: after `size - 1` tokens, and every `size` from there.
        """
        length = int(self.lengths.max())
        for start in range(-1, length, size):
            first, stop = max(start, 0), min(start + size, length)
            pad = (first - start, start + size - stop)
            position = jnp.arange(start, start + size, dtype=jnp.int32)[None]
            active = (position >= 0) & (position < jnp.asarray(self.lengths, jnp.int32)[:, None])
            tokens = tuple(
                jnp.pad(x[:, first:stop], [(0, 0), pad] + [(0, 0)] * (x.ndim - 2)) for x in self.trace.tokens
            )
            yield Block(tokens, active, stop)


def load_batches(
    directory: str | os.PathLike, num_tokens: int | None = None
) -> tuple[list[TraceBatch], dict[str, str]]:
    """All traces of a folder, those of equal sizes in one batch.

    Args:
      directory: Written by `experiments.record`.
      num_tokens: Keep only so many tokens of each; None for all.

    Returns:
      (batches, the SHA-256 of every file by name).

    Raises:
      FileNotFoundError, ValueError: As `load_trace`.
    """
    grouped: dict[tuple, tuple[list[Row], list[lq.Trace]]] = {}
    sums = {}
    for path in trace_files(directory):
        trace, document = load_trace(path)
        sums[path.stem] = document["sha256"]
        if num_tokens is not None:
            tokens = {name: getattr(trace, name)[:, :num_tokens] for name in _TENSORS if name != "dense"}
            trace = dataclasses.replace(trace, **tokens)
        for index in range(trace.dense.shape[0]):
            row = jax.tree.map(lambda x, index=index: x[index : index + 1], trace)
            rows, traces = grouped.setdefault(tuple(row.sizes.items()), ([], []))
            rows.append(Row(document["layer"], document["prompt"]))
            traces.append(row)
    return [TraceBatch.stack(rows, traces) for rows, traces in grouped.values()], sums
