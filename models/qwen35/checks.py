"""Checks of the arguments of a call, before anything is traced.

Values can only be checked when they are there: inside a user's jit they are tracers, and those checks are skipped. All
reading is done by NumPy, so that a concrete argument inside a trace stays concrete.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from models.qwen35.attention import AttentionCache
from models.qwen35.cache import Cache
from models.qwen35.config import Config


def check_prompt(config: Config, tokens: Array, cache: Cache, mask: Array | None) -> tuple[Array, Array | None]:
    """The tokens [B, T] and mask [B, T] of a prefill as arrays, the mask as bool.

    Raises:
      ValueError: For shapes or dtypes that do not fit, token ids outside the vocabulary, or too little room.
    """
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be integers [B, T], got {tokens.dtype} {tokens.shape}")
    if mask is not None:
        mask = as_bool(mask)
        if mask.shape != tokens.shape:
            raise ValueError(f"mask must have the shape of tokens, {tokens.shape}, got {mask.shape}")
    _check_cache(config, cache, tokens.shape[0])
    ids, real = _values(tokens), True if mask is None else _values(mask)
    if ids is not None and real is not None:
        wrong = ids[((ids < 0) | (ids >= config.vocab_size)) & real]
        if wrong.size:
            raise ValueError(f"token ids must lie in 0..{config.vocab_size - 1}, got {wrong[0]}")
    check_room(config, cache, tokens.shape[1] if mask is None else mask)
    return tokens, mask


def check_step(config: Config, tokens: Array, cache: Cache, active: Array | None) -> Array:
    """The tokens [B] of a decode step as an array.

    Raises:
      ValueError: For shapes or dtypes that do not fit, or too little room.
    """
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 1 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be integers [B], got {tokens.dtype} {tokens.shape}")
    if active is not None and (active.shape != tokens.shape or active.dtype != jnp.bool_):
        raise ValueError(f"active must be bool {tokens.shape}, got {active.dtype} {active.shape}")
    _check_cache(config, cache, tokens.shape[0])
    check_room(config, cache, 1 if active is None else active[:, None])
    return tokens


def check_room(config: Config, cache: Cache, added: Array | int, *, more: int = 0) -> None:
    """Refuses tokens that a plain attention cache has no slots for.

    Args:
      config: The model's configuration.
      cache: The cache before the call.
      added: The tokens to come, as a mask bool [B, T] or as their number in every row.
      more: Further tokens of every row.

    Raises:
      ValueError: If a row would hold more than `max_length` tokens.
    """
    slots = _attention_slots(cache)
    if not slots or config.attention_window is not None:
        return
    lengths = _values(cache.lengths)
    counts = added if isinstance(added, int) else _values(added)
    if lengths is None or counts is None:
        return
    longest = int(np.max(lengths + np.sum(counts, axis=None if isinstance(counts, int) else 1))) + more
    if longest > slots[0]:
        raise ValueError(
            f"a row would hold {longest} tokens but the cache was made for max_length={slots[0]}; "
            "use a larger max_length in init_cache"
        )


def as_bool(mask: Array) -> Array:
    """A mask of any dtype as bool."""
    return mask != 0 if _is_traced(mask) else jnp.asarray(np.asarray(mask) != 0)


def _check_cache(config: Config, cache: Cache, batch: int) -> None:
    if cache.lengths.shape != (batch,):
        raise ValueError(f"tokens have {batch} rows but the cache has {cache.lengths.shape[0]}")
    if len(cache.layers) != config.num_hidden_layers:
        raise ValueError(f"cache has {len(cache.layers)} layers, the model {config.num_hidden_layers}")
    window = config.attention_window
    if window is not None and any(slots != window for slots in _attention_slots(cache)):
        raise ValueError(
            f"the cache was not made for attention_window={window}: use init_cache with the model's config"
        )


def _attention_slots(cache: Cache) -> list[int]:
    return [layer.keys.shape[2] for layer in cache.layers if isinstance(layer, AttentionCache)]


def _values(x: Array) -> np.ndarray | None:
    """The values of x, or None if a trace hides them."""
    return None if _is_traced(x) else np.asarray(x)


def _is_traced(x: Array) -> bool:
    return isinstance(x, Tracer)
