"""Random states in the middle of a window, as the kernels find them."""

import dataclasses

import jax.numpy as jnp
import numpy as np

import leapquant_jax as lq
from leapquant_jax.state import LeapState
from pallas_kernels.shapes import Shape


def random_state(shape: Shape, batch: int, *, seed: int = 0, position: list[int] | None = None) -> tuple:
    """(config, state, (q, k, v, g, beta)). Dead records are NaN; positions are random unless given."""
    random = np.random.default_rng(seed)
    heads, key_heads, key_dim, value_dim, rank, window = shape

    def normal(*size: int) -> np.ndarray:
        return random.standard_normal(size).astype(np.float32)

    def unit(*size: int) -> np.ndarray:
        x = normal(*size)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    config = lq.LeapConfig(rank=rank, window=window, refit_gain=0)
    live = np.array(position if position is not None else random.integers(0, window, batch), np.int32)
    ring = {
        "ring_keys": unit(batch, key_heads, window, key_dim).astype(np.float16),
        "ring_values": np.clip(0.4 * normal(batch, heads, window, value_dim), -1, 1).astype(np.float16),
        "ring_scales": np.exp2(random.integers(-2, 3, (batch, heads, window))).astype(np.float32),
        "ring_log_decays": -np.exp(normal(batch, heads, window) - 3),
    }
    for b, count in enumerate(live):
        for leaf in ring.values():
            leaf[b, :, count:] = np.nan
    state = LeapState(
        codes=jnp.asarray(random.integers(-127, 128, (batch, heads, value_dim, key_dim)), jnp.int8),
        row_scales=jnp.asarray(np.exp(0.3 * normal(batch, heads, key_dim))),
        column_scales=jnp.asarray(0.003 * np.exp(0.3 * normal(batch, heads, value_dim))),
        compensator_keys=jnp.asarray(0.2 * normal(batch, heads, rank, key_dim), jnp.float16),
        compensator_values=jnp.asarray(0.2 * normal(batch, heads, rank, value_dim), jnp.float16),
        position=jnp.asarray(live),
        **{name: jnp.asarray(leaf) for name, leaf in ring.items()},
    )
    token = (
        unit(batch, key_heads, key_dim) / np.float32(key_dim**0.5), unit(batch, key_heads, key_dim),
        normal(batch, heads, value_dim), -np.exp(normal(batch, heads) - 3), 1 / (1 + np.exp(-normal(batch, heads))),
    )  # fmt: skip
    return config, state, tuple(jnp.asarray(x) for x in token)


def leaves(state: LeapState) -> dict[str, np.ndarray]:
    return {field.name: np.asarray(getattr(state, field.name)) for field in dataclasses.fields(state)}
