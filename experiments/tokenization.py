"""From text to the tokens of a model: bytes for the small models here, tokenizer.json for real ones."""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from experiments import corpus
from models import qwen35


class Tokenizer(Protocol):
    """What the experiments need of a tokenizer.

    Attributes:
      prefix: the token at the head of every stream, which gives the first token of a text something to follow.
      name: of its vocabulary, for the record.
    """

    @property
    def prefix(self) -> int: ...

    @property
    def name(self) -> str: ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without the prefix."""
        ...

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids, and the index of each token's first character."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """The text of some tokens; special tokens are left out."""
        ...


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """Every byte of UTF-8 is a token."""

    prefix: int = corpus.BOS
    name: str = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]]:
        widths = [len(character.encode()) for character in text]
        return self.encode(text), np.repeat(np.arange(len(text)), widths).tolist()

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class FileTokenizer:
    """A tokenizer.json, read by the `tokenizers` library.

    Attributes:
      path: of the file.
      prefix: see `Tokenizer`; Qwen3.5 has no token for the start of a text, its <|endoftext|> stands between texts.
    """

    path: Path
    prefix: int

    @property
    def name(self) -> str:
        return f"{self.path.name}, {self._tokenizer.get_vocab_size()} tokens"

    @functools.cached_property
    def _tokenizer(self) -> Any:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError as error:
            raise ImportError('a tokenizer.json needs tokenizers: pip install "leapquant-jax[models]"') from error
        try:
            return Loaded.from_file(str(self.path))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{self.path} is not a tokenizer of the tokenizers library: {error}") from error

    @property
    def largest_token(self) -> int:
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, [start for start, _ in encoding.offsets]

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


def load_tokenizer(directory: str | os.PathLike, config: qwen35.Config) -> Tokenizer:
    """The tokenizer of a model's folder: its tokenizer.json, or bytes if there is none.

    Raises:
      ValueError: If the file cannot be read, or the model's vocabulary is too small for the tokens.
    """
    file = Path(directory) / "tokenizer.json"
    if not file.exists():
        if config.vocab_size < corpus.VOCAB_SIZE:
            raise ValueError(
                f"--model_dir {directory} has no tokenizer.json, and a vocabulary of {config.vocab_size} is too small for "
                f"the {corpus.VOCAB_SIZE} byte tokens of experiments.corpus: add the model's tokenizer.json"
            )
        return ByteTokenizer()
    tokenizer = FileTokenizer(file, config.eos_token_id[0] if config.eos_token_id else 0)
    if max(tokenizer.largest_token, tokenizer.prefix) >= config.vocab_size:
        raise ValueError(
            f"{file} has tokens up to {tokenizer.largest_token}, and the text ends with {tokenizer.prefix}, but the model's "
            f"vocabulary has {config.vocab_size}: the file belongs to another model"
        )
    return tokenizer
