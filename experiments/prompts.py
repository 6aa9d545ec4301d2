"""Prompts of three kinds: held-out prose, held-out code, and a recall stream."""

import ast
import warnings

import numpy as np

from experiments import corpus, tasks
from experiments.tokenization import ByteTokenizer, Tokenizer

KINDS = ("prose", "code", "recall")
_BYTES_PER_TOKEN = 8  # more than any tokenizer packs into a token of such text, on average


def make_prompts(kinds: tuple[str, ...], num_tokens: int, tokenizer: Tokenizer, seed: int = 0) -> np.ndarray:
    """The first `num_tokens` tokens of a prompt of each kind, behind the tokenizer's prefix: int32 [N, T].

    Raises:
      ValueError: For an unknown kind, or more tokens than there is text.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ValueError(f"--prompts must name some of {', '.join(KINDS)}; got {', '.join(kinds)}")
    if isinstance(tokenizer, ByteTokenizer):
        return np.stack([_byte_tokens(kind, num_tokens, seed) for kind in kinds])
    return np.stack([_tokenized(_text(kind, num_tokens, seed), tokenizer, num_tokens) for kind in kinds])


def documents(kind: str) -> np.ndarray:
    """The held-out files of one kind, uint8 with byte 0 between them: code is what Python can parse, prose the rest."""
    files = corpus.load_held_out_text().tobytes().split(b"\0")
    return np.frombuffer(b"\0".join(file for file in files if _is_python(file) == (kind == "code")), np.uint8)


def _byte_tokens(kind: str, num_tokens: int, seed: int) -> np.ndarray:
    if kind == "recall":
        oldest = min(16384, max(32, num_tokens // 2))
        return tasks.recall_streams(1, num_tokens, seed, max_age=oldest).tokens[0]
    text = corpus.text_spans(documents(kind), 1, num_tokens - 1, seed)[0]
    return np.concatenate([[corpus.BOS], corpus.to_tokens(text)]).astype(np.int32)


def _text(kind: str, num_tokens: int, seed: int) -> str:
    """Text that is long enough for a tokenizer to make `num_tokens` of it."""
    tokens = _byte_tokens(kind, _BYTES_PER_TOKEN * num_tokens, seed)
    return np.where(tokens < 256, tokens, ord("\n")).astype(np.uint8).tobytes().decode(errors="ignore")


def _tokenized(text: str, tokenizer: Tokenizer, num_tokens: int) -> np.ndarray:
    ids = [tokenizer.prefix, *tokenizer.encode(text)]
    if len(ids) < num_tokens:
        raise ValueError(f"--num_tokens {num_tokens}: the text gives only {len(ids)} tokens; ask for fewer")
    return np.array(ids[:num_tokens], np.int32)


def _is_python(file: bytes) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in old code
        try:
            ast.parse(file)
        except (SyntaxError, ValueError):
            return False
    return True
