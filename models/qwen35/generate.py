"""Generation: a prefill and one jitted decode loop over a ragged batch."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from models.qwen35.cache import Cache
from models.qwen35.checks import as_bool, check_room
from models.qwen35.model import Model, decode_step, prefill
from models.qwen35.sampling import Greedy, Sampler


def generate(
    model: Model, prompt: Array, cache: Cache, *, num_tokens: int, sampler: Sampler | None = None,
    key: Array | None = None, mask: Array | None = None, stop_tokens: Sequence[int] = (), pad_token: int = 0,
) -> tuple[Array, Cache]:  # fmt: skip
    """Continues every row by up to `num_tokens` tokens.

    The returned cache has seen all but the last token of each row, so a text goes on by passing that token as the next
    prompt; the two calls give the tokens that one long call would have given. A row's tokens depend on its own prompt
    and key alone: the key of a draw is folded from the row's key and the number of tokens the row has seen.

    Args:
      model: The parameters.
      prompt: int [B, T], tokens the cache has not seen. Every row needs at least one real token.
      cache: The cache before the prompt.
      num_tokens: Tokens to add to each row.
      sampler: `Greedy()` if None.
      key: One random key, folded with the row's index, or a key per row [B]. Not needed for `Greedy`.
      mask: [B, T], nonzero at real prompt tokens; None when all are.
      stop_tokens: A row ends with the first of these it produces; see `Config.eos_token_id`.
      pad_token: Fills a row after its stop token.

    Returns:
      int32 tokens [B, num_tokens] and the cache. A row that stopped after n tokens has seen n - 1 of them.

    Raises:
      ValueError: For bad shapes, a sampler without a key, or rows that would outgrow `max_length`.
    """
    sampler = Greedy() if sampler is None else sampler
    prompt = jnp.asarray(prompt)
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(f"prompt must be integers [B, T] with T >= 1, got {prompt.shape}")
    if key is None and not isinstance(sampler, Greedy):
        raise ValueError(f"{sampler} draws at random and needs a key")
    check_room(model.config, cache, prompt.shape[1] if mask is None else as_bool(mask), more=num_tokens - 1)
    keys = _row_keys(jax.random.key(0) if key is None else key, prompt.shape[0])

    logits, cache = prefill(model, prompt, cache, mask, last_only=True)
    return _decode_loop(
        model, logits, cache, keys,
        num_tokens=num_tokens, sampler=sampler, stop_tokens=tuple(stop_tokens), pad_token=pad_token,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("num_tokens", "sampler", "stop_tokens", "pad_token"))
def _decode_loop(
    model: Model, logits: Array, cache: Cache, keys: Array,
    *, num_tokens: int, sampler: Sampler, stop_tokens: tuple[int, ...], pad_token: int,
) -> tuple[Array, Cache]:  # fmt: skip
    """Samples from the prefill's logits, then feeds and samples in turn until all rows have stopped."""

    def sample(logits: Array, cache: Cache, tokens: Array, done: Array, i: Array | int) -> tuple[Array, Array, Array]:
        token = sampler(logits, jax.vmap(jax.random.fold_in)(keys, cache.lengths))
        token = jnp.where(done, jnp.int32(pad_token), token)
        for stop in stop_tokens:
            done |= token == stop
        return token, jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], i, axis=1), done

    def body(carry):
        i, token, tokens, done, cache = carry
        logits, cache = decode_step(model, token, cache, active=~done if stop_tokens else None)
        token, tokens, done = sample(logits, cache, tokens, done, i)
        return i + 1, token, tokens, done, cache

    def unfinished(carry) -> Array:
        i, _, _, done, _ = carry
        return (i < num_tokens) & ~jnp.all(done)

    batch = logits.shape[0]
    tokens = jnp.full((batch, num_tokens), pad_token, jnp.int32)
    token, tokens, done = sample(logits, cache, tokens, jnp.zeros((batch,), bool), 0)
    _, _, tokens, _, cache = jax.lax.while_loop(unfinished, body, (jnp.int32(1), token, tokens, done, cache))
    return tokens, cache


def _row_keys(key: Array, batch: int) -> Array:
    """A typed key per row."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.ndim == 0:
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(batch, dtype=jnp.int32))
    if key.shape != (batch,):
        raise ValueError(f"key must be one key or one per row ({batch}), got shape {key.shape}")
    return key
