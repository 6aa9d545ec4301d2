"""Trains a small byte-level hybrid (gated DeltaNet and windowed attention) whose recurrent state has to remember.

    python -m experiments.corpus                          # once
    python -m experiments.train --output_dir runs/tiny --minutes 6

Each row of the batch reads one long stream (text with recall tasks woven in, ``experiments.tasks``) in segments; the state is
carried from segment to segment without gradient, for up to 32k tokens. No stream is read twice, so the accuracies printed on
the way are those of unseen tasks. Killed runs continue from the last checkpoint when the same command is given again.

The folder then holds ``model/`` (config.json, model.safetensors; renewed with every checkpoint), ``train.jsonl`` (the training
log), ``results.jsonl`` (recall by age, bits per byte by position, half-lives), ``training.png`` and ``README.md``, the model card.
"""

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from flax import nnx
from tqdm import tqdm

from experiments import corpus, report, tasks, train_data, train_report
from experiments.run_directory import RunDirectory, environment, restore_latest, save
from experiments.train_step import AGE_GROUPS, TrainState, init_train_state, make_train_step
from models import qwen35

_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/tiny-hybrid", "Folder for checkpoints, log, results and the model."
)
_STEPS = flags.DEFINE_integer("steps", 2000, "Training steps.")
_MINUTES = flags.DEFINE_float(
    "minutes",
    0.0,
    "If positive, replaces --steps by what a short trial says fits in this time. Should the run turn out slower, learning "
    "rate and end follow the clock.",
)
_BATCH = flags.DEFINE_integer("batch", 16, "Streams read at the same time.")
_SEGMENT = flags.DEFINE_integer("segment", 2048, "Tokens of each stream per step; gradients stay within them.")
_MAX_AGE = flags.DEFINE_integer("max_age", 16384, "Oldest answer that is asked for, in tokens.")
_MAX_STREAM = flags.DEFINE_integer(
    "max_stream", 32768, "Tokens after which a stream starts over. A multiple of --segment."
)
_CURRICULUM = flags.DEFINE_float("curriculum", 0.4, "Share of the run made easier, with young answers first.")
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 2e-3, "Peak; warms up over 200 steps, then falls to a fiftieth (cosine)."
)
_WEIGHT_DECAY = flags.DEFINE_float("weight_decay", 0.1, "AdamW's, of the matrices only.")
_ANSWER_SHARE = flags.DEFINE_float(
    "answer_share", 0.35, "Share of the mean over answers in the loss; the rest is the mean over the bytes of the text."
)
_LONGEST_HALF_LIFE = flags.DEFINE_float(
    "longest_half_life", 65536.0, "Half-life of each layer's slowest head at the start."
)
_HIDDEN_SIZE = flags.DEFINE_integer("hidden_size", 256, "Width of the model.")
_MLP_SIZE = flags.DEFINE_integer("mlp_size", 768, "Width of the MLPs.")
_LAYERS = flags.DEFINE_integer("layers", 4, "Layers; one of every four is windowed attention.")
_ATTENTION = flags.DEFINE_enum("attention", "first", ["first", "last"], "Which of the four it is.")
_HEAD_SIZE = flags.DEFINE_integer("head_size", 128, "Key and value size of the recurrent heads.")
_KEY_HEADS = flags.DEFINE_integer("key_heads", 4, "Key heads of a recurrent layer; it has twice as many value heads.")
_WINDOW = flags.DEFINE_integer(
    "attention_window", 32, "Tokens that attention sees; if it can answer, the state will not learn to."
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "bfloat16", ["bfloat16", "float32"], "Dtype of the matrix products and of the saved model."
)
_SEED = flags.DEFINE_integer("seed", 0, "Chooses parameters and streams.")
_WORKERS = flags.DEFINE_integer("workers", 4, "Processes that make the streams.")
_LOG_EVERY = flags.DEFINE_integer("log_every", 25, "Steps that one line of the log averages over.")
_CHECKPOINT_SECONDS = flags.DEFINE_integer("checkpoint_seconds", 60, "Shortest time between two checkpoints.")
_EVAL_STREAMS = flags.DEFINE_integer("eval_streams", 32, "Held-out streams of each sort in the final evaluation.")
_EVAL_TOKENS = flags.DEFINE_integer("eval_tokens", 65536, "Length of each; a multiple of --segment.")
flags.declare_key_flag("corpus_dir")


def model_config() -> qwen35.Config:
    """The model that the flags describe.

    Qwen3.5 has attention last in every group of four. First, its window brings together what belongs to one command, and
    all recurrent layers can store it; last, the first recurrent layer sees only the four bytes of its convolution.
    """
    place = {"first": 0, "last": 3}[_ATTENTION.value]
    kinds = ("full_attention" if i % 4 == place else "linear_attention" for i in range(_LAYERS.value))
    return qwen35.Config(
        vocab_size=corpus.VOCAB_SIZE,
        hidden_size=_HIDDEN_SIZE.value,
        intermediate_size=_MLP_SIZE.value,
        num_hidden_layers=_LAYERS.value,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=_KEY_HEADS.value,
        linear_num_value_heads=2 * _KEY_HEADS.value,
        linear_key_head_dim=_HEAD_SIZE.value,
        linear_value_head_dim=_HEAD_SIZE.value,
        layer_types=tuple(kinds),
        rope_theta=10000.0,
        tie_word_embeddings=True,
        max_position_embeddings=_MAX_STREAM.value,
        initializer_range=0.04,
        eos_token_id=(corpus.END_OF_DOCUMENT,),
        attention_window=_WINDOW.value,
        dtype=_DTYPE.value,
        matmul_precision="default",
    )


def training_plan(steps: int) -> train_data.Plan:
    """The streams that the flags describe."""
    return train_data.Plan(
        batch=_BATCH.value, segment=_SEGMENT.value, steps=steps, max_age=_MAX_AGE.value, max_stream=_MAX_STREAM.value,
        curriculum=_CURRICULUM.value, seed=_SEED.value,
    )  # fmt: skip


def train(run: RunDirectory) -> tuple[qwen35.Model, dict]:
    """Trains from the last checkpoint, or from scratch, to the last step.

    Args:
        run: Where checkpoints and log are kept.

    Returns:
        The trained model in ``--dtype`` and facts about the run.
    """
    config = model_config()
    merge, state = init_train_state(
        config, jax.random.key(_SEED.value), batch=_BATCH.value, longest_half_life=_LONGEST_HALF_LIFE.value
    )
    step_function = make_train_step(merge, answer_share=_ANSWER_SHARE.value, weight_decay=_WEIGHT_DECAY.value)
    steps = _decide_steps(run.path, step_function, state)
    plan = training_plan(steps)
    with run.checkpoints(minimum_seconds=_CHECKPOINT_SECONDS.value) as manager:
        done, state = restore_latest(manager, state)
        if done:
            tqdm.write(f"Continuing after step {done}.")
        log = _Log(run.path / "train.jsonl", done, plan)
        feed = train_data.parallel_segments(plan, corpus.CORPUS_DIR.value, done, workers=_WORKERS.value)
        interval = 1.0 if sys.stderr.isatty() else 20.0
        with tqdm(initial=done, total=steps, unit="step", mininterval=interval) as bar:
            while (progress := max(done / steps, log.elapsed() / (60 * _MINUTES.value or math.inf))) < 1:
                rate = learning_rate(done, progress)
                state, metrics = step_function(state, **vars(next(feed)), learning_rate=jnp.float32(rate))
                done += 1
                bar.update()
                if record := log.add(done, metrics, rate):
                    if done % (20 * _LOG_EVERY.value) == 0:
                        tqdm.write(train_report.progress_line(record))
                    if save(manager, done, state):
                        save_model(merge(state.params), config.dtype, run.path / "model")
        if manager.latest_step() != done:
            save(manager, done, state, force=True)
    model = save_model(merge(state.params), config.dtype, run.path / "model")
    return model, {"steps": done, "tokens": done * plan.batch * plan.segment, "seconds": log.seconds}


def learning_rate(step: int, progress: float) -> float:
    """The rate of a step, with ``progress`` (0 to 1) of the run behind it: a warm-up, then half a cosine."""
    warm_up = min(1.0, (step + 1) / 200)
    return _LEARNING_RATE.value * warm_up * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def save_model(model: qwen35.Model, dtype: str, directory: Path) -> qwen35.Model:
    """Saves the model in ``dtype`` and returns it. A kill leaves the files of before, or the new ones."""
    model = qwen35.cast(model, dtype)
    partial = directory.with_name(directory.name + ".partial")
    qwen35.save_pretrained(model.config, model, partial)
    directory.mkdir(exist_ok=True)
    for file in partial.iterdir():
        os.replace(file, directory / file.name)
    partial.rmdir()
    return model


def _decide_steps(directory: Path, step_function, state: TrainState) -> int:
    """The number of steps: what an earlier part of this run decided, else the flag, else what fits in the time."""
    decided = directory / "steps.json"
    if decided.exists():
        return json.loads(decided.read_text())["steps"]
    steps = _STEPS.value
    if _MINUTES.value > 0:
        segment = next(train_data.segments(training_plan(1), corpus.load_training_text(corpus.CORPUS_DIR.value)))
        state = jax.tree.map(jnp.copy, state)  # the step donates its argument
        started = time.perf_counter()
        for trial in range(14):
            state, metrics = step_function(state, **vars(segment), learning_rate=jnp.float32(1e-4))
            if trial == 3:
                jax.block_until_ready(metrics)
                tqdm.write(f"Compilation and first steps: {time.perf_counter() - started:.1f} s.")
                started = time.perf_counter()
        jax.block_until_ready(state)
        seconds = (time.perf_counter() - started) / 10
        steps = max(1, int(60 * _MINUTES.value / seconds))
        tqdm.write(f"{1e3 * seconds:.1f} ms per step: {steps} steps in {_MINUTES.value} minutes.")
    decided.write_text(json.dumps({"steps": steps}) + "\n")
    return steps


class _Log:
    """Averages metrics over a few steps and appends them to a JSONL file. Fetching them is what waits for the device."""

    def __init__(self, path: Path, first_step: int, plan: train_data.Plan):
        kept = [row for row in report.read_jsonl(path) if row["step"] <= first_step] if path.exists() else []
        report.write_jsonl(path, kept)  # a killed run may have logged steps that are now repeated
        self.path, self.plan = path, plan
        self.seconds = kept[-1]["seconds"] if kept else 0.0
        self.pending: list[dict] = []
        self.last = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds of training, those of earlier parts of this run included."""
        return self.seconds + time.perf_counter() - self.last

    def add(self, step: int, metrics: dict, learning_rate: float) -> dict | None:
        """Takes the metrics of a step; returns the record when one was written."""
        self.pending.append(metrics)
        if step % _LOG_EVERY.value and step != self.plan.steps:
            return None
        rows = jax.device_get(self.pending)
        sums = {name: np.sum([row[name] for row in rows], axis=0, dtype=np.float64) for name in rows[0]}
        now = time.perf_counter()
        speed = len(rows) * self.plan.batch * self.plan.segment / (now - self.last)
        self.seconds, self.last, self.pending = self.seconds + now - self.last, now, []
        record = {"step": step, "seconds": round(self.seconds, 2), "tokens_per_second": round(speed)}
        record |= {"learning_rate": learning_rate, "oldest_age": self.plan.oldest_age(step)}
        record |= {name: round(float(sums[name]) / len(rows), 5) for name in ("loss", "text_nll", "gradient_norm")}
        for name, of in (("accuracy", "right"), ("answer_nll", "nll")):
            record[name] = {
                kind: {
                    group: round(float(value / count), 4) if count else None
                    for group, value, count in zip(AGE_GROUPS, values, counts, strict=True)
                }
                for kind, values, counts in zip(tasks.KINDS, sums[of], sums["count"], strict=True)
            }
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if not math.isfinite(record["loss"]):
            raise FloatingPointError(f"The loss is not finite at step {step}: lower --learning_rate.")
        return record


def write_model_card(directory: Path, config: qwen35.Config, facts: dict, records: list[dict]) -> None:
    """Writes README.md: what the model is, how it was made, and what it can do."""
    manifest = json.loads((Path(corpus.CORPUS_DIR.value) / "manifest.json").read_text())
    weights = directory / "model" / "model.safetensors"
    half_lives = [row["tokens"] for row in records if row["measure"] == "half_life"]
    long_lived = sum(value > 1000 for value in half_lives)
    bits = [row for row in records if row["measure"] == "bits_per_byte"]
    lines = [
        f"# {directory.name}: a small byte-level hybrid of gated DeltaNet and windowed attention",
        "",
        "Made to judge low-bit recurrent states: it recalls values over thousands of tokens that only its recurrent state",
        f"can hold, because its attention sees {config.attention_window} tokens. Not a useful language model. Apache-2.0.",
        "",
        f"{config.num_hidden_layers} layers ({config.num_linear_layers} gated DeltaNet), width {config.hidden_size}, "
        f"{config.linear_num_value_heads} value heads over {config.linear_num_key_heads} key heads of "
        f"{config.linear_key_head_dim} x {config.linear_value_head_dim}, {facts['parameters']:,} parameters, {config.dtype}. "
        f"Tokens are bytes; {corpus.BOS} begins a stream and {corpus.END_OF_DOCUMENT} separates documents.",
        "",
        "## Training",
        "",
        f"    {facts['command']}",
        "",
        f"{facts['steps']:,} steps, {facts['tokens']:,} tokens in {facts['seconds']:.0f} s "
        f"({facts['tokens'] / facts['seconds']:,.0f} tokens/s): "
        + ", ".join(f"{name} {value}" for name, value in facts["environment"].items())
        + ".",
        f"Text: {manifest['train']['bytes']:,} bytes of "
        + " and ".join(f"{name} ({source['files']} files)" for name, source in manifest["sources"].items())
        + f", Python {manifest['python']}; SHA-256 {manifest['train']['sha256']}.",
        "See `experiments/corpus.py` for the sources and their licences, `experiments/tasks.py` for the tasks.",
        f"SHA-256 of model.safetensors: {hashlib.sha256(weights.read_bytes()).hexdigest()}.",
        "",
        "![training](training.png)",
        "",
        "## Recall, by the age of the write",
        "",
        f"Whole answers right, on {_EVAL_STREAMS.value} held-out streams of {_EVAL_TOKENS.value:,} tokens whose fp32 state is "
        "never reset.",
        "",
        train_report.recall_table(records),
        "",
        "## Held-out text",
        "",
        "| position | bits per byte |",
        "|---|---|",
        *(
            f"| {row['min_position']:,} to {2 * row['min_position'] - 1:,} | {row['bits']:.3f} |"
            for row in bits
            if row["min_position"]
        ),
        *(f"| all | {row['bits']:.3f} |" for row in bits if not row["min_position"]),
        "",
        "## Half-lives of the heads, tokens",
        "",
        f"ln 2 / mean |g| on held-out text; {long_lived} of {len(half_lives)} heads are above 1000.",
        "",
        train_report.half_life_table(records),
        "",
    ]
    (directory / "README.md").write_text("\n".join(lines))


def _settings() -> dict:
    """All flags that determine the result, for the run's record; how it is run may differ when it goes on."""
    module = flags.FLAGS.get_key_flags_for_module(sys.argv[0]) or flags.FLAGS.flags_by_module_dict()[__name__]
    incidental = {"output_dir", "workers", "log_every", "checkpoint_seconds"}
    return {"program": "experiments.train", **{f.name: f.value for f in module if f.name not in incidental}}


def _segments_fit() -> None:
    if _EVAL_TOKENS.value % _SEGMENT.value or _MAX_STREAM.value % _SEGMENT.value:
        raise app.UsageError("--eval_tokens and --max_stream must be multiples of --segment.")
    if _SEGMENT.value < 256:
        raise app.UsageError(f"--segment must be at least 256, the shortest stream, but is {_SEGMENT.value}.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
    _segments_fit()
    logging.set_verbosity(logging.WARNING)  # orbax reports every file that it writes
    corpus.load_training_text(corpus.CORPUS_DIR.value)  # complains now rather than after the compilation
    try:
        run = RunDirectory.open(_OUTPUT_DIR.value, _settings())
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    directory = run.path
    model, facts = train(run)
    facts["parameters"] = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    facts["command"] = run.sessions[-1]["command"]
    facts["environment"] = environment()
    records = train_report.evaluate(
        model, num_streams=_EVAL_STREAMS.value, num_tokens=_EVAL_TOKENS.value, segment=_SEGMENT.value
    )
    report.write_jsonl(directory / "results.jsonl", [{"measure": "run", **facts}, *records])
    train_report.plot_training(report.read_jsonl(directory / "train.jsonl"), directory / "training.png")
    write_model_card(directory, model.config, facts, records)
    tqdm.write((directory / "README.md").read_text())


if __name__ == "__main__":
    app.run(main)
