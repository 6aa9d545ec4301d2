"""The streams that a run is judged on: held-out text, and recall tasks woven into it."""

import dataclasses
import hashlib
import os
from pathlib import Path

import numpy as np

from experiments import corpus, tasks

TEXT, RECALL = "text", "recall"
_YOUNGEST, _OLDEST = 32, 16384  # ages of the values asked for, in tokens


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
    *, with_text: bool = True,
) -> Streams:  # fmt: skip
    """Makes `num_streams` text streams and as many recall streams.

    Args:
      num_streams: Of each sort.
      num_tokens: Length of every stream.
      seed: Chooses text and tasks.
      text_file: Bytes to use in place of the committed held-out text.
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
    if text_file is None:
        text = corpus.load_held_out_text()
    else:
        path = Path(text_file)
        if not path.is_file():
            raise FileNotFoundError(f"--text_file {path} does not exist")
        text = np.frombuffer(corpus.read_text(path), np.uint8)
        if len(text) < num_tokens:
            raise ValueError(
                f"--text_file {path} is too short: it has {len(text) - 1:,} bytes of text for streams of "
                f"{num_tokens:,} tokens; give a longer text or a smaller --num_tokens"
            )
    max_age = min(_OLDEST, max(_YOUNGEST, num_tokens // 2))  # both ends of many an answer have to fit in
    recall = tasks.recall_streams(num_streams, num_tokens, seed, text=text, min_age=_YOUNGEST, max_age=max_age)
    if not with_text:
        return Streams(recall.tokens, (RECALL,) * num_streams, recall.answers)
    spans = corpus.text_spans(text, num_streams, num_tokens - 1, seed)
    begin = np.full((num_streams, 1), corpus.BOS, np.int32)
    plain = np.concatenate([begin, corpus.to_tokens(spans)], axis=1)
    answers = dataclasses.replace(recall.answers, stream=recall.answers.stream + num_streams)
    return Streams(np.concatenate([plain, recall.tokens]), (TEXT,) * num_streams + (RECALL,) * num_streams, answers)
