"""The streams that a run is judged on: held-out text, and recall tasks woven into it."""

import dataclasses
import hashlib
import os
from pathlib import Path

import numpy as np

from experiments import corpus, tasks
from experiments.tokenization import ByteTokenizer, Tokenizer

TEXT, RECALL = "text", "recall"
_YOUNGEST, _OLDEST = 32, 16384  # ages of the values asked for, in bytes
_SAMPLE = 1 << 16  # bytes of text on which a tokenizer is tried
_SPARE = 1.5  # more text than is needed, because its parts differ in bytes per token


@dataclasses.dataclass(frozen=True)
class Streams:
    """N streams of T tokens: first the text streams, then the recall streams, so that all share one batch.

    Attributes:
      tokens: int32 [N, T].
      groups: "text" or "recall", one per stream.
      answers: Of the recall streams, with `stream` indexing `tokens`.
    """

    tokens: np.ndarray
    groups: tuple[str, ...]
    answers: tasks.Answers

    def of_group(self, group: str) -> np.ndarray:
        """bool [N]: the streams of a group."""
        return np.array([name == group for name in self.groups])

    def sha256(self) -> str:
        """Of the tokens: two runs with the same sum saw the same streams."""
        return hashlib.sha256(np.ascontiguousarray(self.tokens, np.int32).tobytes()).hexdigest()


def make_streams(
    num_streams: int, num_tokens: int, seed: int, text_file: str | os.PathLike | None = None,
    tokenizer: Tokenizer | None = None, *, with_text: bool = True,
) -> Streams:  # fmt: skip
    """Makes `num_streams` text streams and as many recall streams.

    Args:
      num_streams: Of each sort.
      num_tokens: Length of every stream.
      seed: Chooses text and tasks.
      text_file: Text to use in place of the committed held-out text.
      tokenizer: Of the model; None: bytes are tokens.
      with_text: False leaves the text streams out.

    Raises:
      ValueError: If the streams would be empty or too short, or longer than the text.
      FileNotFoundError: If there is no `text_file`.
    """
    if num_streams < 1:
        raise ValueError(f"--num_streams must be at least 1, got {num_streams}: there would be nothing to decode")
    if num_tokens < 256:
        raise ValueError(
            f"--num_tokens must be at least 256, got {num_tokens}: an empty or shorter stream has nothing to measure"
        )
    text = _read(text_file)
    if tokenizer is None or isinstance(tokenizer, ByteTokenizer):
        streams, recall = _byte_streams(num_streams, num_tokens, seed, text, text_file)
    else:
        streams, recall = _tokenized_streams(num_streams, num_tokens, seed, text, tokenizer)
    if not with_text:
        return Streams(recall.tokens, (RECALL,) * num_streams, recall.answers)
    answers = dataclasses.replace(recall.answers, stream=recall.answers.stream + num_streams)
    groups = (TEXT,) * num_streams + (RECALL,) * num_streams
    return Streams(np.concatenate([streams, recall.tokens]), groups, answers)


def _read(text_file: str | os.PathLike | None) -> np.ndarray:
    """uint8 [bytes]."""
    if text_file is None:
        return corpus.load_held_out_text()
    path = Path(text_file)
    if not path.is_file():
        raise FileNotFoundError(f"--text_file {path} does not exist")
    return np.frombuffer(corpus.read_text(path), np.uint8)


def _byte_streams(
    num_streams: int, num_tokens: int, seed: int, text: np.ndarray, text_file: str | os.PathLike | None
) -> tuple[np.ndarray, tasks.RecallStreams]:
    if text_file is not None and len(text) < num_tokens:
        raise ValueError(
            f"--text_file {text_file} is too short: it has {len(text) - 1:,} bytes of text for streams of "
            f"{num_tokens:,} tokens; give a longer text or a smaller --num_tokens"
        )
    spans = corpus.text_spans(text, num_streams, num_tokens - 1, seed)
    begin = np.full((num_streams, 1), corpus.BOS, np.int32)
    return np.concatenate([begin, corpus.to_tokens(spans)], axis=1), _recall(num_streams, num_tokens, seed, text)


def _recall(num_streams: int, num_bytes: int, seed: int, text: np.ndarray) -> tasks.RecallStreams:
    max_age = min(_OLDEST, max(_YOUNGEST, num_bytes // 2))  # both ends of many an answer have to fit in
    return tasks.recall_streams(num_streams, num_bytes, seed, text=text, min_age=_YOUNGEST, max_age=max_age)


def _tokenized_streams(
    num_streams: int, num_tokens: int, seed: int, text: np.ndarray, tokenizer: Tokenizer
) -> tuple[np.ndarray, tasks.RecallStreams]:
    """Text and recall streams are made as bytes, then tokenized and cut; an answer is the tokens that hold its bytes."""
    sample = text[:_SAMPLE]
    per_token = len(sample) / max(1, len(tokenizer.encode(_as_text(sample))))
    num_bytes = int(_SPARE * per_token * num_tokens) + 1
    if num_bytes > len(text):
        raise ValueError(
            f"the text is too short: {len(text):,} bytes for streams of {num_tokens:,} tokens of about {per_token:.1f} "
            "bytes; give a longer --text_file or a smaller --num_tokens"
        )
    spans = corpus.text_spans(text, num_streams, num_bytes, seed)
    plain = [_cut(tokenizer, _as_text(span), num_tokens)[0] for span in spans]

    woven = _recall(num_streams, num_bytes, seed, np.where(text < 128, text, ord("?")).astype(np.uint8))
    tokens, columns = np.zeros((num_streams, num_tokens), np.int32), []
    for index, row in enumerate(woven.tokens):
        ascii_text = np.where(row[1:] < 128, row[1:], ord("\n")).astype(np.uint8).tobytes().decode("ascii")
        tokens[index], starts = _cut(tokenizer, ascii_text, num_tokens)
        columns.append(_answers_in_tokens(woven.answers, index, starts, num_tokens))
    fields = [field.name for field in dataclasses.fields(tasks.Answers)]
    answers = tasks.Answers(**dict(zip(fields, np.concatenate(columns, axis=1), strict=True)))
    task, age = (np.zeros(tokens.shape, np.int32) for _ in range(2))
    for i in range(len(answers)):
        where = answers.stream[i], slice(answers.position[i], answers.position[i] + answers.length[i])
        task[where], age[where] = 1 + answers.kind[i], answers.age[i]
    return np.stack(plain), tasks.RecallStreams(tokens, task, age, answers)


def _cut(tokenizer: Tokenizer, text: str, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(prefix and the first tokens of a text, int32 [T]; the first character of each token, [T - 1])."""
    ids, starts = tokenizer.encode_with_starts(text)
    if len(ids) < num_tokens - 1:
        raise ValueError(
            f"the text gives {len(ids):,} tokens for streams of {num_tokens:,}: give a smaller --num_tokens"
        )
    return np.array([tokenizer.prefix, *ids[: num_tokens - 1]], np.int32), np.array(starts[: num_tokens - 1])


def _answers_in_tokens(answers: tasks.Answers, stream: int, starts: np.ndarray, num_tokens: int) -> np.ndarray:
    """The fields of one stream's answers, int32 [5, A], with positions, lengths and ages in tokens.

    Byte b (behind the BOS) lies in the last token that starts at or before it, which the prefix moves on by one.
    """
    mine = answers.stream == stream
    position, length = answers.position[mine] - 1, answers.length[mine]

    def token_of(byte: np.ndarray) -> np.ndarray:
        return np.searchsorted(starts, byte, side="right").astype(np.int32)

    first, last, written = (token_of(x) for x in (position, position + length - 1, position - answers.age[mine]))
    whole = (last < num_tokens - 1) & (first - written > 0)  # what follows the cut is not there; no answer in one token
    fields = np.stack([np.full_like(first, stream), first, last - first + 1, first - written, answers.kind[mine]])
    return fields[:, whole]


def _as_text(data: np.ndarray) -> str:
    """Bytes as text; a character that a cut took apart is dropped, and documents are an empty line apart."""
    return data.tobytes().decode(errors="ignore").replace("\0", "\n\n")
