"""What a low-bit recurrent state costs: a hybrid model decodes text and recall streams with every state method.

    python -m experiments.accuracy                              # about five minutes on two CPU cores
    python -m experiments.accuracy --num_tokens=65536 --num_streams=8 --output_dir=runs/long    # on a GPU
    python -m experiments.accuracy --methods=all,window-int8+smoothing --output_dir=runs/ablation

All streams are decoded token by token, their state never reset, and every method is compared with the fp32 state (`exact`)
at each token. Half of the streams are held-out text; the other half has values written into
it that are asked for up to 16,384 tokens later (at most half a stream), beyond what the model's attention sees, so that
only the recurrent state can answer.

--model_dir takes a real Qwen3.5 directory too. Text and recall streams are then tokenized by its tokenizer.json; since its
attention sees all tokens, recall tells less of the states there. Logits of one segment are held, so a vocabulary of 248,320
asks for a small --segment: 32 tokens of 8 streams are 250 MB.

The folder --output_dir then holds

    table.md        the tables, also printed
    results.jsonl   every number behind them; its first line has the command, versions and device
    *.png           error by position, recall by age, KL by position
    run.json        the configuration, and each start of the program

A killed run goes on from its last checkpoint when the same command is given again, and ends with the same numbers. A
folder with the results of other flags is refused; --report_only makes its tables and figures again. With windowed attention,
memory does not grow with --num_tokens.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app
from tqdm import tqdm

import leapquant_jax as lq
from experiments import (
    ablations,
    accuracy_figures,
    accuracy_records,
    accuracy_report,
    metrics,
    report,
    run_directory,
)
from experiments.lockstep import Lockstep, Progress
from experiments.run_directory import RunDirectory
from experiments.settings import define_flags, option, run_main
from experiments.streams import Streams, make_streams
from experiments.tokenization import ByteTokenizer, load_tokenizer
from models import qwen35
from models.checkpoints import read_json

DEFAULT_MODEL = Path(__file__).resolve().parent.parent / "checkpoints" / "tiny-hybrid"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags; see `--help`."""

    model_dir: str = option(
        str(DEFAULT_MODEL), "Folder with config.json and *.safetensors, and tokenizer.json unless bytes are tokens."
    )
    methods: tuple[str, ...] = option(
        ("all",),
        f"State methods to compare with exact: all (those of the library), {', '.join(ablations.known_methods())}, and "
        "policies as files (*.json, see experiments.policy).",
    )
    num_streams: int = option(4, "Streams of each sort, text and recall.")
    num_tokens: int = option(2048, "Length of every stream; a multiple of --segment.")
    segment: int = option(128, "Tokens that one method reads before the next one does.")
    seed: int = option(0, "Chooses text and tasks.")
    text_file: str = option("", "Text to use in place of the committed held-out text.")
    dtype: str = option(
        "float32",
        "Of the model's activations and weights. In bfloat16 their own rounding hides small differences of states.",
        choices=("float32", "bfloat16"),
    )
    report_only: bool = option(False, "Only write the tables and figures of --output_dir again.")
    output_dir: str = option("runs/accuracy", "Folder of this run.")
    checkpoint_seconds: int = option(20, "Shortest time between two checkpoints; 0 saves after every segment.")
    compilation_cache: str = option(
        "runs/compilation_cache", "Where compiled programs are kept for the next start; empty: nowhere."
    )

    def __post_init__(self):
        if self.segment < 16:
            raise ValueError(f"--segment must be at least 16, got {self.segment}")
        if self.num_tokens % self.segment:
            raise ValueError(f"--num_tokens ({self.num_tokens}) must be a multiple of --segment ({self.segment})")
        if self.checkpoint_seconds < 0:
            raise ValueError(f"--checkpoint_seconds must not be negative, got {self.checkpoint_seconds}")


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that was asked for, loaded and checked."""

    model: qwen35.Model
    methods: list[lq.Method | lq.Policy]
    streams: Streams
    measure_at: list[int]
    config: dict[str, Any]


def chosen_methods(names: Sequence[str]) -> list[lq.Method | lq.Policy]:
    """`exact` first, then the methods named, then the policies, each once.

    Args:
      names: Of methods, "all" for those of the library, and files of policies (*.json).

    Raises:
      ValueError: For an unknown name, or a file that is no policy.
      FileNotFoundError: If there is no such file.
    """
    expanded = ["exact"]
    for name in names:
        if not name.endswith(".json"):
            expanded += lq.list_methods() if name == "all" else [name]
    policies = [lq.Policy.load(name) for name in names if name.endswith(".json")]
    return [
        *(ablations.get_method(name) for name in dict.fromkeys(expanded)),
        *{policy.name: policy for policy in policies}.values(),
    ]


def prepare(settings: Settings, *, program: str = "accuracy", with_text: bool = True) -> Job:
    """Checks the settings and loads model and streams; nothing is written or compiled yet.

    Args:
      settings: The flags.
      program: Whose run it is.
      with_text: False for recall streams alone.

    Raises:
      ValueError, FileNotFoundError: Whose message names the flag to change.
    """
    methods = chosen_methods(settings.methods)
    directory = Path(settings.model_dir)
    if not (directory / "config.json").exists():
        raise FileNotFoundError(
            f"--model_dir {directory} holds no config.json: give the folder of a trained model, or make one with "
            "python -m experiments.train"
        )
    config = qwen35.Config.from_hf(read_json(directory / "config.json"))
    tokenizer = load_tokenizer(directory, config)
    streams = make_streams(
        settings.num_streams, settings.num_tokens, settings.seed, settings.text_file or None, tokenizer,
        with_text=with_text,
    )  # fmt: skip
    config, model = qwen35.from_pretrained(directory, dtype=settings.dtype)
    # Products in full fp32 (no TF32), so that `exact` is exact and methods differ by their states alone.
    model = qwen35.with_config(model, dataclasses.replace(config, matmul_precision="highest"))
    run = {
        "program": program, "model": sha256_of_weights(directory), "dtype": settings.dtype,
        "methods": [method.name for method in methods], "num_streams": settings.num_streams,
        "num_tokens": settings.num_tokens, "segment": settings.segment, "seed": settings.seed,
        "streams": streams.sha256(), "platform": jax.default_backend(),
    }  # fmt: skip
    if not isinstance(tokenizer, ByteTokenizer):
        run["tokenizer"] = tokenizer.name
    return Job(model, methods, streams, metrics.measuring_positions(settings.num_tokens, settings.segment), run)


def evaluate(settings: Settings, job: Job, run: RunDirectory) -> tuple[Lockstep, Progress]:
    """Decodes what is still to be decoded, saving on the way.

    Raises:
      ValueError: If the newest checkpoint of `run` is damaged.
    """
    lockstep = Lockstep(job.model, job.methods, job.streams, segment=settings.segment, measure_at=job.measure_at)
    with run.checkpoints(minimum_seconds=settings.checkpoint_seconds) as manager:
        done, progress = run_directory.restore_latest(manager, lockstep.start())
        per_segment, total = len(job.methods), lockstep.num_segments
        if done < total:
            lockstep.compile()
        with tqdm(total=total * per_segment, initial=done * per_segment, desc="decoding", unit="segment") as bar:
            for index in range(done, total):
                progress = lockstep.run_segment(progress, index, bar.update)
                run_directory.save(manager, index + 1, progress, force=index + 1 == total)
    return lockstep, progress


def run(settings: Settings) -> str:
    """The whole program; returns the tables.

    Raises:
      SystemExit: With one line that says what to change, before anything was computed or written.
    """
    try:
        if settings.report_only:
            return write_report(Path(settings.output_dir))
        job = prepare(settings)
        directory = RunDirectory.open(settings.output_dir, job.config)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"accuracy: {error}") from error
    lockstep, progress = evaluate(settings, job, directory)
    records = [directory.header(), *accuracy_records.records(lockstep, progress)]
    report.write_jsonl(directory.path / "results.jsonl", records)
    return write_report(directory.path)


def write_report(directory: Path) -> str:
    """Writes table.md and the figures of a folder with a results.jsonl; returns the tables.

    Raises:
      FileNotFoundError: If there is no results.jsonl.
    """
    results = accuracy_report.Results.read(directory)
    text = accuracy_report.tables(results)
    report.write_text(directory / "table.md", text)
    accuracy_figures.errors(results, directory / "error_by_position.png")
    accuracy_figures.recall(results, directory / "recall_by_age.png")
    accuracy_figures.likelihood(results, directory / "kl_by_position.png")
    return text


def main(argv: Sequence[str]) -> None:
    run_main("accuracy", argv, Settings, run)


def sha256_of_weights(directory: Path) -> str:
    """Of a model's files: two runs with the same sum had the same model."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


if __name__ == "__main__":
    define_flags(Settings)
    app.run(main)
