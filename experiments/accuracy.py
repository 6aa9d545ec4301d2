"""What an 8-bit recurrent state costs: a hybrid model decodes held-out text and recall streams with every state method.

    python -m experiments.accuracy                              # about five minutes on two CPU cores
    python -m experiments.accuracy --num_tokens=65536 --num_streams=8 --output_dir=runs/long      # on a GPU
    python -m experiments.accuracy --methods=step-int8,window-int8,window-int8+smoothing,leapquant-int8

All streams are read token by token through `qwen35.decode_step`, their state never reset, and every method is compared with
the fp32 state (`exact`) at each token. Half of the streams are plain text; the other half has values written into it that are
asked for up to 16,384 tokens later, far beyond what the model's attention sees, so that only the recurrent state can answer.

The folder --output_dir then holds

    table.md        the tables, also printed
    results.jsonl   every number behind them; its first line has the command, versions and device
    *.png           error by position, recall by age, KL by position
    run.json        the configuration, and each start of the program

A killed run goes on from its last checkpoint when the same command is given again, and ends with the same numbers. A folder
with the results of other flags is refused. Memory does not grow with --num_tokens.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging
from tqdm import tqdm

import leapquant_jax as lq
from experiments import ablations, accuracy_report, corpus, metrics, report, run_directory
from experiments.lockstep import Lockstep, Progress
from experiments.run_directory import RunDirectory
from experiments.streams import Streams, make_streams
from models import qwen35

DEFAULT_MODEL = Path(__file__).resolve().parent.parent / "checkpoints" / "tiny-hybrid" / "model"

_MODEL_DIR = flags.DEFINE_string("model_dir", str(DEFAULT_MODEL), "Folder with config.json and model.safetensors.")
_METHODS = flags.DEFINE_list(
    "methods", ["all"], "State methods to compare with exact: all of the library's (all), or some of "
    + ", ".join(ablations.known_methods()) + "."
)  # fmt: skip
_NUM_STREAMS = flags.DEFINE_integer("num_streams", 4, "Streams of each sort, text and recall.")
_NUM_TOKENS = flags.DEFINE_integer("num_tokens", 2048, "Length of every stream; a multiple of --segment.")
_SEGMENT = flags.DEFINE_integer("segment", 128, "Tokens that one method reads before the next one does.", lower_bound=16)
_SEED = flags.DEFINE_integer("seed", 0, "Chooses text and tasks.")
_TEXT_FILE = flags.DEFINE_string("text_file", None, "Text to use in place of the committed held-out text.")
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"],
    "Of the model's activations and weights. In bfloat16 their own rounding hides small differences between states.",
)  # fmt: skip
_OUTPUT_DIR = flags.DEFINE_string("output_dir", "runs/accuracy", "Folder of this run.")
_CHECKPOINT_SECONDS = flags.DEFINE_integer(
    "checkpoint_seconds", 20, "Shortest time between two checkpoints; 0 saves after every segment.", lower_bound=0
)
_COMPILATION_CACHE = flags.DEFINE_string(
    "compilation_cache", "runs/compilation_cache", "Where compiled programs are kept for the next start; empty: nowhere."
)


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that was asked for, loaded and checked."""

    model: qwen35.Model
    methods: list[lq.Method]
    streams: Streams
    measure_at: list[int]
    config: dict[str, Any]


def chosen_methods(names: Sequence[str]) -> list[lq.Method]:
    """`exact` first, then the methods named, each once.

    Raises:
      ValueError: For an unknown name.
    """
    names = lq.list_methods() if list(names) == ["all"] else names
    return [ablations.get_method(name) for name in dict.fromkeys(["exact", *names])]


def prepare() -> Job:
    """Checks the flags and loads model and streams; nothing is written or compiled yet.

    Raises:
      ValueError, FileNotFoundError: Whose message names the flag to change.
    """
    methods = chosen_methods(_METHODS.value)
    if _NUM_TOKENS.value % _SEGMENT.value:
        raise ValueError(f"--num_tokens ({_NUM_TOKENS.value}) must be a multiple of --segment ({_SEGMENT.value})")
    streams = make_streams(_NUM_STREAMS.value, _NUM_TOKENS.value, _SEED.value, _TEXT_FILE.value)
    directory = Path(_MODEL_DIR.value)
    if not (directory / "config.json").exists():
        raise FileNotFoundError(
            f"--model_dir {directory} holds no config.json: give the folder of a trained model, or make one with "
            "python -m experiments.train"
        )
    config, model = qwen35.from_pretrained(directory, dtype=_DTYPE.value)
    if config.vocab_size < corpus.VOCAB_SIZE:
        raise ValueError(
            f"--model_dir {directory} has a vocabulary of {config.vocab_size}; the streams need the {corpus.VOCAB_SIZE} "
            "byte tokens of experiments.corpus"
        )
    # Products in full fp32 (no TF32), so that `exact` is exact and methods differ by their states alone.
    model = qwen35.with_config(model, dataclasses.replace(config, matmul_precision="highest"))
    run = {
        "program": "accuracy", "model": _sha256_of_weights(directory), "dtype": _DTYPE.value,
        "methods": [method.name for method in methods], "num_streams": _NUM_STREAMS.value,
        "num_tokens": _NUM_TOKENS.value, "segment": _SEGMENT.value, "seed": _SEED.value, "streams": streams.sha256(),
        "platform": jax.default_backend(),
    }  # fmt: skip
    return Job(model, methods, streams, metrics.measuring_positions(_NUM_TOKENS.value, _SEGMENT.value), run)


def evaluate(job: Job, run: RunDirectory) -> tuple[Lockstep, Progress]:
    """Decodes what is still to be decoded, saving on the way.

    Raises:
      ValueError: If the newest checkpoint of `run` is damaged.
    """
    lockstep = Lockstep(job.model, job.methods, job.streams, segment=_SEGMENT.value, measure_at=job.measure_at)
    with run.checkpoints(minimum_seconds=_CHECKPOINT_SECONDS.value) as manager:
        done, progress = run_directory.restore_latest(manager, lockstep.start())
        per_segment, total = len(job.methods), lockstep.num_segments
        if done < total:
            lockstep.compile()
        with tqdm(total=total * per_segment, initial=done * per_segment, desc="decoding", unit="segment") as bar:
            for index in range(done, total):
                progress = lockstep.run_segment(progress, index, bar.update)
                run_directory.save(manager, index + 1, progress, force=index + 1 == total)
    return lockstep, progress


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    if _COMPILATION_CACHE.value:
        jax.config.update("jax_compilation_cache_dir", str(Path(_COMPILATION_CACHE.value).resolve()))
    try:
        job = prepare()
        run = RunDirectory.open(_OUTPUT_DIR.value, job.config)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"accuracy: {error}") from error
    lockstep, progress = evaluate(job, run)
    report.write_jsonl(run.path / "results.jsonl", [run.header(), *accuracy_report.records(lockstep, progress)])
    print(accuracy_report.write(run.path))


def _sha256_of_weights(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


if __name__ == "__main__":
    app.run(main)
