"""Replays every state method over recorded traces, and checks each on the way.

    python -m experiments.record                                      # once: the traces
    python -m experiments.replay --trace_dir=runs/traces              # every method of the library
    python -m experiments.replay --methods=leapquant-int8 --implementations=xla,mosaic_gpu      # on a Hopper GPU
    python -m experiments.replay --methods=leapquant-int8,runs/policy/leapquant-int8-by-head.json    # and a policy

Every trace is decoded token by token with each method beside the exact fp32 recurrence. Reported for every layer, prompt
and head: relative error of the state and of the outputs, over position; the energy that a fold adds (it accumulates in slow
heads at 4 bits); how far the state's peak stands above its median before and after each part of a fold.

A policy (a file of experiments.policy) decodes each trace with the method of its layer, and is reported as one method: its
bytes are those of all traces together. It needs a choice for every recorded layer, and where it splits a layer's heads, the
traces need all of them; there the peak over the median is left out, since each group of heads has parts of its own.

Checks, for every method: states and outputs are finite; the bytes that the method claims are those of its live buffers; an
output is what the materialised state gives (eq. 10); no rounding error exceeds half a step. The program says pass or fail
for each, and its exit status is 1 when one fails.

--output_dir then holds table.md, results.jsonl (command, versions and device in its first line), and PNGs. A killed run goes
on with the first unfinished method when it is started again.
"""

import collections
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from jax import Array
from numpy.typing import ArrayLike

import leapquant_jax as lq
from experiments import ablations, accuracy, items, metrics, playback, probes, replay_report, report, traces
from experiments.playback import Playback
from experiments.run_directory import RunDirectory
from experiments.settings import define_flags, option, start
from experiments.traces import TraceBatch

# Of fp32: an output and the materialised state sum the same numbers in another order.
READ_LIMIT = 1e-5


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags; see `--help`."""

    trace_dir: str = option("runs/traces", "Folder written by experiments.record.")
    methods: tuple[str, ...] = option(
        ("all",),
        f"State methods: all (those of the library), {', '.join(ablations.known_methods())}, and policies as files "
        "(*.json, see experiments.policy).",
    )
    implementations: tuple[str, ...] = option(("xla",), "Of the methods' steps: xla, mosaic_gpu.")
    num_tokens: int = option(0, "Replay only so many tokens of each trace; 0 for all.")
    block: int = option(64, "Tokens between two looks at the states; a multiple of every method's window.")
    output_dir: str = option("runs/replay", "Folder of this run; a folder of other settings is refused.")
    compilation_cache: str = option(
        "runs/compilation_cache", "Where compiled programs are kept for the next start; empty: nowhere."
    )

    def __post_init__(self):
        if self.num_tokens < 0:
            raise ValueError(f"--num_tokens must not be negative, got {self.num_tokens}")
        if not self.implementations or any(name not in ("xla", "mosaic_gpu") for name in self.implementations):
            raise ValueError(f"--implementations must name some of xla, mosaic_gpu; got {self.implementations}")
        if self.block < 2:
            raise ValueError(f"--block must be at least 2, got {self.block}")


def run(settings: Settings, methods: Sequence[lq.Method | lq.Policy] | None = None) -> tuple[str, bool]:
    """The whole program.

    Args:
      settings: The flags.
      methods: In place of those that the settings name.

    Returns:
      (the tables, whether every check passed).

    Raises:
      ValueError, FileNotFoundError: Whose message says what to change; nothing was computed or written.
    """
    chosen = accuracy.chosen_methods(settings.methods)[1:] if methods is None else list(methods)
    batches, sums = traces.load_batches(settings.trace_dir, settings.num_tokens or None)
    for method in chosen:
        for batch in batches:
            check_fit(method, batch, settings.block)
    # A policy's name has a digest of all that it stores, so another policy is another run.
    config = {
        "program": "replay", "traces": sums, "methods": [method.name for method in chosen],
        "implementations": list(settings.implementations), "num_tokens": settings.num_tokens, "block": settings.block,
        "platform": jax.default_backend(),
    }  # fmt: skip
    directory = RunDirectory.open(settings.output_dir, config)
    todo: dict[str, Callable[[], items.Records]] = {}
    for index, batch in enumerate(batches):
        expected = playback.expectations(batch, settings.block)
        for method in chosen:
            for implementation in settings.implementations:
                name = f"{method.name}-{implementation}-{index}"
                todo[name] = functools.partial(replay_one, method, implementation, batch, expected)
    records = [directory.header(), *items.finish_items(directory.path, todo, "replaying")]
    report.write_jsonl(directory.path / "results.jsonl", records)
    passed = all(record["passed"] for record in records if record["measure"] == "check")
    return replay_report.write(directory.path), passed


def check_fit(method: lq.Method | lq.Policy, batch: TraceBatch, block: int) -> None:
    """Refuses what would fail in the middle of a run.

    Raises:
      ValueError: If a method, or a policy in some layer, does not fit the traces or the block.
    """
    for part, _ in playback.by_method(method, batch):
        if any(block % config.window for config in _configs(part)):
            raise ValueError(f"--block {block} must be a multiple of the window of {method.name}")
        try:
            jax.eval_shape(functools.partial(part.init, **batch.trace.sizes))
        except ValueError as error:
            raise ValueError(f"{method.name} does not fit the traces, choose other --methods: {error}") from error


def replay_one(
    method: lq.Method | lq.Policy, implementation: str, batch: TraceBatch, expected: Sequence[Any]
) -> list[dict[str, Any]]:
    """All records of one method, or of one policy, over one batch of traces."""
    common = {"method": method.name, "implementation": implementation}
    size: collections.Counter[str] = collections.Counter()
    of_rows: dict[int, dict[str, Any]] = {}
    checked: list[dict[str, Any]] = []
    for part, rows in playback.by_method(method, batch):
        probe = functools.partial(fold_probes, part)
        try:
            played = playback.play(part, batch, expected, rows=rows, implementation=implementation, probe=probe)
        except NotImplementedError as error:
            return [{**common, "measure": "skipped", "reason": str(error)}]
        flat = probes.flatness(part.config, played.state) if isinstance(part, lq.LeapMethod) else {}
        size.update(part.state_bytes(played.state))
        of_rows.update(zip(rows.tolist(), _traces(played, batch, rows, flat), strict=True))
        checked += checks(part, played)
    elements = batch.trace.dense.size
    sizes = {
        "measure": "bytes_per_element", "elements": elements,
        **{name: value / elements for name, value in size.items()},
    }  # fmt: skip
    return [{**common, **record} for record in (sizes, *(of_rows[row] for row in sorted(of_rows)), *checked)]


def fold_probes(method: lq.Method, state: Any) -> dict[str, Array]:
    """`probes.fold_probe` of all heads, also where groups of them fold by themselves; empty without folds."""
    if isinstance(method, lq.LeapMethod):
        return probes.fold_probe(method.config, state)
    if not isinstance(method, lq.MixedMethod):
        return {}
    found = [probes.fold_probe(group.config, part) for group, part in zip(method.groups, state.parts, strict=True)]
    order = np.argsort([head for group in method.groups for head in group.heads or ()])
    return {name: jnp.concatenate([one[name] for one in found], axis=1)[:, order] for name in found[0]}


def _configs(method: lq.Method) -> list[lq.LeapConfig]:
    """Of a method's heads; empty if it has no window."""
    if isinstance(method, lq.MixedMethod):
        return [group.config for group in method.groups]
    return [method.config] if isinstance(method, lq.LeapMethod) else []


def checks(method: lq.Method, played: Playback) -> Iterator[dict[str, Any]]:
    """The self-checks of a run: measure "check" with passed, value and limit."""

    def check(name: str, value: float, limit: float) -> dict[str, Any]:
        return {"measure": "check", "check": name, "passed": bool(value <= limit), "value": value, "limit": limit}

    yield check("finite", float((played.errors.finite < 1).sum()), 0)
    claimed, live = probes.byte_check(method, played.state)
    yield check("bytes", float(abs(claimed - live)), 0)
    # The other methods round the state after it was read, and so does a window of one token.
    windows = [config.window for config in _configs(method)]
    if isinstance(method, lq.ExactMethod) or (windows and min(windows) > 1):
        yield check("eq. 10", _largest(played.errors.read), READ_LIMIT)
    if "half_step" in played.probes and not np.isnan(played.probes["half_step"]).all():
        yield check("half step", _largest(played.probes["half_step"]), 1.001)


def _largest(measured: ArrayLike) -> float:
    """The largest of what was measured; NaN stands where there was nothing to measure."""
    values = np.asarray(measured)
    values = values[~np.isnan(values)]
    return float(values.max()) if values.size else 0.0


def _traces(played: Playback, batch: TraceBatch, rows: np.ndarray, flat: dict[str, Array]) -> Iterator[dict[str, Any]]:
    """For every trace of `rows`, which were played: errors and energies of its heads, by position."""
    by_block, overall = played.output_error_by_block, played.output_error
    ends = [int(end) for end in played.positions]
    block = ends[1] - ends[0] if len(ends) > 1 else ends[0]
    shown = [i for i, end in enumerate(ends) if end + 1 in metrics.measuring_positions(ends[-1] + 1, block)]
    shown = sorted({*shown, len(ends) - 1})
    for row, index in enumerate(rows):
        layer, prompt = batch.rows[index]
        yield {
            "measure": "trace", "layer": layer, "prompt": prompt, "tokens": int(batch.lengths[index]),
            "state_error": report.significant(played.errors.state[-1, row]), "output_error": report.significant(overall[row]),
            "positions": [ends[i] for i in shown],
            "state_error_by_position": report.significant(played.errors.state[shown, row]),
            "output_error_by_position": report.significant(by_block[shown, row]),
            **{f"{name}_per_fold": report.significant(np.nanmean(values[:, row], axis=0)) for name, values in played.probes.items()
               if name != "half_step" and not np.isnan(values[:, row]).all()},
            "peak_over_median": {name: report.significant(np.asarray(values)[row]) for name, values in flat.items()},
        }  # fmt: skip


def main(argv: Sequence[str]) -> None:
    settings = start("replay", argv, Settings)
    try:
        text, passed = run(settings)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"replay: {error}") from error
    print(text)
    if not passed:
        print("replay: a check failed, see the table of checks", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    define_flags(Settings)
    app.run(main)
