"""Plans how each layer, or head, of a model stores its state, and compares the plans with one method for all.

    python -m experiments.policy --measure=output                           # synthetic heads, a few minutes on a CPU
    python -m experiments.record --output_dir=runs/traces
    python -m experiments.policy --trace_dir=runs/traces --output_dir=runs/policy-model
    python -m experiments.accuracy --methods=leapquant-int8,runs/policy-model/leapquant-int8-by-layer.json

Without --trace_dir the layers are synthetic: 0 holds low-rank heads, which four compensators store exactly; 30 holds heads
with a flat spectrum, on which they barely help; 15 is in between. Every plan takes at most the bytes at rest of the method
that it is named after. With traces of several prompts, each prompt is also judged by plans made without it.

Writes results.jsonl, table.md, frontier.png and one policy per budget and granularity as JSON to --output_dir.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
from absl import app

import leapquant_jax as lq
from experiments import policy_report, policy_study, report, toy_heads, traces
from experiments.run_directory import RunDirectory
from experiments.settings import define_flags, option, run_main


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags; see `--help`."""

    trace_dir: str = option("", "Folder of traces from experiments.record; empty: synthetic heads.")
    budgets: tuple[str, ...] = option(
        ("leapquant-int8", "leapquant-int6", "leapquant-int4"), "Methods whose bytes at rest a plan may take."
    )
    measure: str = option("detail", "The error that plans minimise.", choices=("detail", "output", "state"))
    num_tokens: int = option(2048, "Tokens of the synthetic heads, and most tokens read from a trace.")
    seed: int = option(0, "Chooses the synthetic heads.")
    output_dir: str = option("runs/policy", "Folder for the results; a folder of other settings is refused.")

    def __post_init__(self):
        if self.num_tokens < 1:
            raise ValueError(f"--num_tokens must be at least 1, got {self.num_tokens}")
        if not self.budgets:
            raise ValueError("--budgets must name at least one method")
        for name in self.budgets:
            if not isinstance(lq.get_method(name), lq.LeapMethod):
                raise ValueError(f"--budgets takes methods with a window, such as leapquant-int8; got {name}")


def note_4_traces(num_tokens: int, seed: int) -> dict[str, list[lq.Trace]]:
    """Layers 0, 15 and 30 of two heads each, as one "prompt": low-rank, mixed, and of flat spectrum."""
    draw = functools.partial(toy_heads.heads, num_tokens)
    rows = {
        0: [(draw(seed, rank=2), "low-rank"), (draw(seed + 1, rank=4), "low-rank")],
        15: [(draw(seed + 2, rank=6), "low-rank"), (draw(seed + 2), "fast")],
        30: [(draw(seed + 3), "slow"), (draw(seed + 3), "full-rank")],
    }
    found = []
    for layer, heads in rows.items():
        columns = zip(
            *(tuple(x[toy_heads.HEAD_KINDS.index(kind)] for x in tokens) for tokens, kind in heads), strict=True
        )
        arrays = [jnp.concatenate(column, axis=1)[None] for column in columns]  # [1, T, H, ...]
        dense = jnp.zeros((1, len(heads), arrays[1].shape[-1], arrays[2].shape[-1]), jnp.float32)
        found.append(lq.Trace(*arrays, dense=dense, layer=layer))
    return {"synthetic": found}


def recorded_traces(directory: str, num_tokens: int) -> tuple[dict[str, list[lq.Trace]], list[str]]:
    """The traces of a folder by prompt, cut to `num_tokens`, and the SHA-256 of their files."""
    by_prompt: dict[str, list[lq.Trace]] = {}
    sums = []
    for file in traces.trace_files(directory):
        trace, document = traces.load_trace(file)
        tokens = (x[:, :num_tokens] for x in trace.tokens)
        by_prompt.setdefault(document["prompt"], []).append(lq.Trace(*tokens, dense=trace.dense, layer=trace.layer))
        sums.append(document["sha256"])
    layers = {prompt: {trace.layer for trace in some} for prompt, some in by_prompt.items()}
    if len({frozenset(some) for some in layers.values()}) > 1:
        raise ValueError(f"--trace_dir {directory} has other layers for other prompts: {layers}; record them alike")
    return by_prompt, sums


def run(settings: Settings) -> str:
    """The whole program; returns the tables.

    Raises:
      ValueError, FileNotFoundError: Whose message says what to change; nothing was computed or written.
    """
    sums: list[str] = []
    if settings.trace_dir:
        by_prompt, sums = recorded_traces(settings.trace_dir, settings.num_tokens)
    else:
        by_prompt = note_4_traces(settings.num_tokens, settings.seed)
    options = {k: v for k, v in dataclasses.asdict(settings).items() if k not in ("trace_dir", "output_dir")}
    directory = RunDirectory.open(settings.output_dir, {"program": "policy", "traces": sums, **options})
    records, policies = policy_study.study(by_prompt, settings.budgets, settings.measure)
    for name, policy in policies.items():
        policy.save(directory.path / f"{name}.json")
    report.write_jsonl(directory.path / "results.jsonl", [directory.header(), *records])
    return policy_report.write(directory.path)


def main(argv: Sequence[str]) -> None:
    run_main("policy", argv, Settings, run)


if __name__ == "__main__":
    define_flags(Settings)
    app.run(main)
