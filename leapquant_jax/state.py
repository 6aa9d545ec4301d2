"""The state of a request: low-bit boundary state, compensators, and the ring of records since the last rounding.

This pytree is the only state there is; no fp32 copy stands beside it. Every leaf has the batch as its first axis.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from leapquant_jax.config import LeapConfig, check_config, check_gate
from leapquant_jax.packing import packed_dtype, packed_size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LeapState:
    """B requests, H value heads, G key heads, K x V per head, window P, R compensators.

    The boundary state is `Diag(c) (Z * B) + sum_r k~_r u~_r^T`, the state after the last fold. Records with an index
    at or beyond `position` are dead: whatever they hold is never read.

    Attributes:
      codes: Z. int8 [B, H, V, K] at 8 bits; uint8 [B, H, V, ceil(K bits / 8)] packed below (see packing.py); plain
        floats [B, H, V, K] with `boundary_dtype`. Value-major: reads sum along the last axis.
      row_scales: c, fp32 [B, H, K]; None without smoothing.
      column_scales: B, fp32 [B, H, V]; None with `boundary_dtype`.
      compensator_keys: k~, [B, H, R, K] in `compensator_dtype`; None at rank 0.
      compensator_values: u~, [B, H, R, V] in `compensator_dtype`; None at rank 0.
      ring_keys: k of the window's tokens, [B, G, P, K] in `record_dtype`; once per *key* head.
      ring_values: u / ring_scales, [B, H, P, V] in `record_dtype`.
      ring_scales: power of two per record, fp32 [B, H, P].
      ring_log_decays: g of each token (not cumulative, so that no sum is ever taken apart again), fp32 [B, H, P], or
        [B, H, P, K] in fp16 (fp32 with fp32 records) for the channel gate.
      position: number of live records, int32 [B], 0 <= position < P between steps.
    """

    codes: Array
    row_scales: Array | None
    column_scales: Array | None
    compensator_keys: Array | None
    compensator_values: Array | None
    ring_keys: Array
    ring_values: Array
    ring_scales: Array
    ring_log_decays: Array
    position: Array

    @property
    def batch(self) -> int:
        return self.ring_values.shape[0]

    @property
    def num_heads(self) -> int:
        return self.ring_values.shape[1]

    @property
    def num_key_heads(self) -> int:
        return self.ring_keys.shape[1]

    @property
    def window(self) -> int:
        return self.ring_keys.shape[2]

    @property
    def key_dim(self) -> int:
        return self.ring_keys.shape[3]

    @property
    def value_dim(self) -> int:
        return self.ring_values.shape[3]

    @property
    def gate(self) -> str:
        return "scalar" if self.ring_log_decays.ndim == 3 else "channel"


def empty_state(
    config: LeapConfig, *, batch: int, num_heads: int, num_key_heads: int, key_dim: int, value_dim: int, gate: str
) -> LeapState:
    """The state of `batch` fresh requests (S = 0, empty ring). See `init_state` for the public entry."""
    check_config(config)
    check_gate(gate)
    sizes = dict(batch=batch, num_heads=num_heads, num_key_heads=num_key_heads, key_dim=key_dim, value_dim=value_dim)
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < (0 if name == "batch" else 1):
            raise ValueError(f"{name} must be a positive Python int, got {value!r}")
    if num_heads % num_key_heads:
        raise ValueError(f"num_heads ({num_heads}) must be a multiple of num_key_heads ({num_key_heads})")
    config.check_dims(key_dim, value_dim)

    heads, ring = (batch, num_heads), (batch, num_heads, config.window)
    quantized = config.boundary_dtype is None
    codes_shape = (*heads, value_dim, packed_size(key_dim, config.bits) if config.bits else key_dim)
    record, compensator = jnp.dtype(config.record_dtype), jnp.dtype(config.compensator_dtype)
    decay_dtype = jnp.float32 if gate == "scalar" or record == jnp.dtype(jnp.float32) else jnp.float16
    return LeapState(
        codes=jnp.zeros(codes_shape, packed_dtype(config.bits) if config.bits else config.boundary_dtype),
        row_scales=jnp.ones((*heads, key_dim), jnp.float32) if config.smoothing else None,
        column_scales=jnp.zeros((*heads, value_dim), jnp.float32) if quantized else None,
        compensator_keys=jnp.zeros((*heads, config.rank, key_dim), compensator) if config.rank else None,
        compensator_values=jnp.zeros((*heads, config.rank, value_dim), compensator) if config.rank else None,
        ring_keys=jnp.zeros((batch, num_key_heads, config.window, key_dim), record),
        ring_values=jnp.zeros((*ring, value_dim), record),
        ring_scales=jnp.ones(ring, jnp.float32),
        ring_log_decays=jnp.zeros(ring if gate == "scalar" else (*ring, key_dim), decay_dtype),
        position=jnp.zeros((batch,), jnp.int32),
    )


def check_state(config: LeapConfig, state: LeapState) -> None:
    """Raises ValueError unless `state` was made with an equal config (by shapes and dtypes; nothing is computed)."""
    check_config(config)
    if not isinstance(state, LeapState):
        raise ValueError(f"state must be a LeapState from init_state, got {type(state).__name__}")
    expected = _expected_state(
        config, state.batch, state.num_heads, state.num_key_heads, state.key_dim, state.value_dim, state.gate
    )
    for field in dataclasses.fields(LeapState):
        have, want = getattr(state, field.name), getattr(expected, field.name)
        described = [None if x is None else f"{x.dtype} {tuple(x.shape)}" for x in (have, want)]
        if described[0] != described[1]:
            raise ValueError(
                f"state.{field.name} is {described[0]}, but this config stores {described[1]}: pass the config the "
                "state was made with"
            )


@functools.lru_cache(maxsize=256)
def _expected_state(
    config: LeapConfig, batch: int, num_heads: int, num_key_heads: int, key_dim: int, value_dim: int, gate: str
) -> LeapState:
    """Shapes and dtypes of a state, without arrays."""
    return jax.eval_shape(
        lambda: empty_state(
            config, batch=batch, num_heads=num_heads, num_key_heads=num_key_heads, key_dim=key_dim,
            value_dim=value_dim, gate=gate,
        )
    )  # fmt: skip


_PARTS = {
    "codes": ("codes",),
    "scales": ("row_scales", "column_scales"),
    "compensators": ("compensator_keys", "compensator_values"),
    "ring": ("ring_keys", "ring_values", "ring_scales", "ring_log_decays", "position"),
}


def finite_rows(state: Any) -> Array:
    """Which requests are still sound: bool [B], False where any float of the row is NaN or inf.

    A non-finite value stays in its row and head for ever; `reset_rows` clears it. Works on the state of any method.
    Dead records count too: a row that rolled a NaN back is flagged until its window has been overwritten.
    """
    rows = [
        jnp.all(jnp.isfinite(leaf.astype(jnp.float32)), axis=tuple(range(1, leaf.ndim)))
        for leaf in jax.tree.leaves(state)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    return functools.reduce(jnp.logical_and, rows)


def state_bytes(config: LeapConfig, state: LeapState) -> dict[str, int]:
    """Bytes the whole state occupies, from shapes and bit widths; also works on `jax.eval_shape` results.

    Args:
      config: the state's config.
      state: arrays or `ShapeDtypeStruct`s.

    Returns:
      {"codes", "scales", "compensators", "ring", "at_rest", "total"}. `at_rest` is what a checkpoint with an empty ring
      has to keep (codes + scales + compensators); `total` includes the ring, its scales, log decays and positions, and
      equals the sum of `nbytes` over the leaves.

    Raises:
      ValueError: the state does not belong to the config.
    """
    check_state(config, state)

    def leaf_bytes(name: str) -> int:
        leaf = getattr(state, name)
        return 0 if leaf is None else leaf.size * jnp.dtype(leaf.dtype).itemsize

    parts = {part: sum(map(leaf_bytes, names)) for part, names in _PARTS.items()}
    at_rest = parts["codes"] + parts["scales"] + parts["compensators"]
    return {**parts, "at_rest": at_rest, "total": at_rest + parts["ring"]}


def dense_bytes(dense: Any) -> dict[str, int]:
    """`state_bytes` of a plain array state: everything is payload and nothing is in a ring."""
    size = dense.size * jnp.dtype(dense.dtype).itemsize
    return {"codes": size, "scales": 0, "compensators": 0, "ring": 0, "at_rest": size, "total": size}
