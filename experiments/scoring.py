"""Texts through a model whose recurrent states are stored by some method: log likelihoods, and generation until a string.

A context is read by one prefill, as a server would, and rounds its states once; everything that is scored or generated is
read token by token, so that a continuation sees the states the method really keeps.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import leapquant_jax as lq
from experiments.tokenization import Tokenizer
from models import qwen35

_BLOCK = 64  # lengths are padded to multiples of this, so that few programs are compiled
_ROOM = 512  # and the slots of a cache to multiples of this


class Score(NamedTuple):
    """Sum of the log probabilities of some tokens, and whether each was the most probable one."""

    log_likelihood: float
    is_greedy: bool


@dataclasses.dataclass(frozen=True)
class Reader:
    """A model, its tokenizer and a state method.

    Attributes:
      model: in the dtype it is to be run in.
      tokenizer: of the model.
      method: a name, a method object or a policy.
      max_length: most tokens of a context and what follows; longer contexts lose their beginning.
      stop_tokens: tokens that end a text.
    """

    model: qwen35.Model
    tokenizer: Tokenizer
    method: str | lq.Method | lq.Policy
    max_length: int = 32768
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ValueError(f"max_length must be at least 2 tokens, got {self.max_length}")

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """Scores continuations as one batch.

        Args:
          pairs: (context tokens, at least one; continuation tokens).
        """
        if not pairs or not all(context for context, _ in pairs):
            raise ValueError("every pair needs a context of at least one token: begin with the tokenizer's prefix")
        if any(len(continuation) >= self.max_length for _, continuation in pairs):
            raise ValueError(f"a continuation leaves no room for a context in max_length={self.max_length}")
        kept = [(list(c[-(self.max_length - len(t)) :]), list(t)) for c, t in pairs]
        contexts, mask = _left_padded([context for context, _ in kept])
        targets, active = _right_padded([continuation for _, continuation in kept])
        logits, cache = self._prefill(contexts, mask, targets.shape[1])
        log_p, greedy = _score(self.model, logits, cache, targets, active)
        return [Score(float(a), bool(b)) for a, b in zip(np.asarray(log_p), np.asarray(greedy), strict=True)]

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, until: Sequence[str] = (),
        sampler: Any = None, key: Array | None = None, chunk: int = 64,
    ) -> list[str]:  # fmt: skip
        """Continues prompts as one batch until a stop string, the end of the text or `max_tokens`.

        Args:
          prompts: tokens, at least one each.
          max_tokens: most tokens to add.
          until: the text ends before the first of these that occurs.
          sampler: see `qwen35.generate`; greedy if None.
          key: for a sampler that draws.
          chunk: tokens between two looks at the text for a stop string.
        """
        if max_tokens < 1 or max_tokens >= self.max_length:
            raise ValueError(f"max_tokens must lie in 1 .. max_length - 1 = {self.max_length - 1}, got {max_tokens}")
        stops = self.stop_tokens
        tokens, mask = _left_padded([list(prompt)[-(self.max_length - max_tokens) :] for prompt in prompts])
        cache = self._cache(len(prompts), tokens.shape[1] + max_tokens)
        found: list[list[int]] = [[] for _ in prompts]
        done = np.zeros(len(prompts), bool)
        while not done.all() and len(found[0]) < max_tokens:
            count = min(chunk, max_tokens - len(found[0]))
            new, cache = qwen35.generate(
                self.model, tokens, cache, num_tokens=count, sampler=sampler, key=key, mask=mask,
                pad_token=stops[0] if stops else 0,
            )  # fmt: skip
            for row, ids in enumerate(np.asarray(new).tolist()):
                found[row] += ids
                text = cut_text(self.tokenizer.decode(_before(found[row], stops)), until)
                done[row] |= any(token in stops for token in ids) or text != self.tokenizer.decode(found[row])
            tokens, mask = new[:, -1:], None
        return [cut_text(self.tokenizer.decode(_before(ids, stops)), until) for ids in found]

    def _cache(self, batch: int, length: int) -> qwen35.Cache:
        slots = -(-length // _ROOM) * _ROOM
        return qwen35.init_cache(self.model.config, batch=batch, max_length=slots, method=self.method)

    def _prefill(self, tokens: Array, mask: Array, more: int) -> tuple[Array, qwen35.Cache]:
        cache = self._cache(len(tokens), tokens.shape[1] + more)
        return qwen35.prefill(self.model, tokens, cache, mask, last_only=True)


def split_continuation(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Tokens of a context and of what follows, tokenized as one text so that the border is where the model would have it.

    Spaces at the end of the context belong to the continuation; an empty context is the tokenizer's prefix.
    """
    stripped = context.rstrip()
    context, continuation = stripped, context[len(stripped) :] + continuation
    before = tokenizer.encode(context)
    after = tokenizer.encode(context + continuation)[len(before) :]
    return [tokenizer.prefix, *before], after


def windows(tokens: Sequence[int], prefix: int, max_length: int) -> list[tuple[list[int], list[int]]]:
    """(context, tokens to score) pairs that score every token once, each text of at most `max_length` tokens.

    The first window starts from the prefix, later ones from the last token before them.
    """
    size = max_length - 1
    starts = range(0, len(tokens), size)
    return [([tokens[start - 1] if start else prefix], list(tokens[start : start + size])) for start in starts]


def cut_text(text: str, until: Sequence[str]) -> str:
    """The text before the first stop string."""
    ends = [text.find(stop) for stop in until if stop and stop in text]
    return text[: min(ends)] if ends else text


def _before(tokens: list[int], stops: tuple[int, ...]) -> list[int]:
    """The tokens before the first stop token."""
    ends = [index for index, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0]] if ends else tokens


def _left_padded(rows: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """int32 [B, T] with real tokens last, and the mask bool [B, T]."""
    width = -(-max(map(len, rows)) // _BLOCK) * _BLOCK
    tokens = np.zeros((len(rows), width), np.int32)
    mask = np.zeros((len(rows), width), bool)
    for index, row in enumerate(rows):
        tokens[index, width - len(row) :], mask[index, width - len(row) :] = row, True
    return jnp.asarray(tokens), jnp.asarray(mask)


def _right_padded(rows: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """int32 [B, T] with real tokens first, and the mask bool [B, T]."""
    width = -(-max(1, *map(len, rows)) // _BLOCK) * _BLOCK
    tokens = np.zeros((len(rows), width), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    return jnp.asarray(tokens), jnp.asarray(np.arange(width) < np.array([[len(row)] for row in rows]))


@jax.jit
def _score(
    model: qwen35.Model, logits: Array, cache: qwen35.Cache, targets: Array, active: Array
) -> tuple[Array, Array]:  # fmt: skip
    """Sum of log probabilities fp32 [B], and whether every target was the most probable token, bool [B]."""

    def one_token(carry: Any, column: tuple[Array, Array]) -> tuple[Any, None]:
        logits, cache, total, greedy = carry
        token, is_real = column
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=-1)[:, 0]
        total += jnp.where(is_real, log_p, jnp.float32(0))
        greedy &= ~is_real | (jnp.argmax(logits, axis=-1).astype(jnp.int32) == token)
        logits, cache = qwen35.decode_step(model, token, cache, active=is_real)
        return (logits, cache, total, greedy), None

    start = (logits, cache, jnp.zeros(len(targets), jnp.float32), jnp.ones(len(targets), bool))
    (_, _, total, greedy), _ = jax.lax.scan(one_token, start, (targets.T, active.T))
    return total, greedy
