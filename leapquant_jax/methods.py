"""Every way to keep a recurrent state, behind one protocol, by name.

    method = lq.get_method("leapquant-int8")
    state = method.init(batch=1, num_heads=32, num_key_heads=16, key_dim=128, value_dim=128)
    state, out = method.step(state, q, k, v, g, beta)

Methods are frozen and hashable, so they can be static arguments under jit; states are pytrees with the batch as the
first axis of every leaf.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from leapquant_jax import inputs, stepwise
from leapquant_jax import transitions as leap
from leapquant_jax.chunked import chunked_delta_rule
from leapquant_jax.config import LeapConfig, check_gate, check_implementation
from leapquant_jax.exact import exact_step
from leapquant_jax.numerics import HIGHEST
from leapquant_jax.state import LeapState, dense_bytes, state_bytes


class Method(Protocol):
    """What an experiment needs of a method; arguments and shapes as in `init_state`, `step`, `decode` and `prefill`."""

    @property
    def name(self) -> str: ...

    def init(self, *, dense: Array | None = None, **sizes: Any) -> Any:
        """A fresh state, or one continuing from `dense`; sizes are those of `init_state`."""
        ...

    def step(
        self, state: Any, *token: Array, active: Array | None = None, implementation: str | None = None
    ) -> tuple[Any, Array]:
        """One token (q, k, v, g, beta)."""
        ...

    def decode(
        self, state: Any, *tokens: Array, active: Array | None = None, implementation: str | None = None
    ) -> tuple[Any, Array]:
        """T tokens, one step each."""
        ...

    def prefill(self, state: Any, *tokens: Array, mask: Array | None = None) -> tuple[Any, Array]:
        """T tokens as matrix products, real tokens first in every row."""
        ...

    def dense_state(self, state: Any) -> Array:
        """fp32 [B, H, K, V]."""
        ...

    def state_bytes(self, state: Any) -> dict[str, int]:
        """As `leapquant_jax.state_bytes`."""
        ...


@dataclasses.dataclass(frozen=True)
class LeapMethod:
    """The windowed state of a `LeapConfig`: LeapQuant itself, and its ablations."""

    config: LeapConfig
    name: str = "leapquant"

    def init(self, *, dense: Array | None = None, **sizes: Any) -> LeapState:
        return leap.init_state(self.config, dense=dense, **sizes)

    def step(
        self, state: LeapState, *token: Array, active: Array | None = None, implementation: str | None = None
    ) -> tuple[LeapState, Array]:
        return leap.step(self.config, state, *token, active=active, implementation=implementation)

    def decode(
        self, state: LeapState, *tokens: Array, active: Array | None = None, implementation: str | None = None
    ) -> tuple[LeapState, Array]:
        return leap.decode(self.config, state, *tokens, active=active, implementation=implementation)

    def prefill(self, state: LeapState, *tokens: Array, mask: Array | None = None) -> tuple[LeapState, Array]:
        return leap.prefill(self.config, state, *tokens, mask=mask)

    def dense_state(self, state: LeapState) -> Array:
        return leap.dense_state(self.config, state)

    def state_bytes(self, state: LeapState) -> dict[str, int]:
        return state_bytes(self.config, state)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseState:
    """A dense state: fp32 [B, H, K, V]."""

    dense: Array


@dataclasses.dataclass(frozen=True)
class ExactMethod:
    """The fp32 recurrence: the reference of every comparison.

    Attributes:
      precision: of the matrix products of `prefill`; None is full fp32. "default" (TF32 on Hopper) serves training.
    """

    name: str = "exact"
    precision: str | None = None

    def init(self, *, dense: Array | None = None, **sizes: Any) -> DenseState:
        shape = _dense_shape(dense, **sizes)
        return DenseState(jnp.zeros(shape, jnp.float32) if dense is None else dense)

    def step(
        self, state: DenseState, *token: Array, active: Array | None = None, implementation: str | None = None
    ) -> tuple[DenseState, Array]:
        _only_xla(self.name, implementation)
        dense, out = exact_step(state.dense, *token, active=active)
        return DenseState(dense), out

    def decode(
        self, state: DenseState, *tokens: Array, active: Array | None = None, implementation: str | None = None
    ) -> tuple[DenseState, Array]:
        _only_xla(self.name, implementation)
        return inputs.scan_tokens(self.step, state, tokens, active)

    def prefill(self, state: DenseState, *tokens: Array, mask: Array | None = None) -> tuple[DenseState, Array]:
        precision = HIGHEST if self.precision is None else self.precision
        dense, outs = chunked_delta_rule(state.dense, *tokens, mask=mask, precision=precision)
        return DenseState(dense), outs

    def dense_state(self, state: DenseState) -> Array:
        return state.dense

    def state_bytes(self, state: DenseState) -> dict[str, int]:
        return dense_bytes(state.dense)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepState:
    """A state rounded at every token. `key_dim` cannot be read off packed values, so it is kept beside them."""

    rounded: stepwise.RoundedState
    key_dim: int = dataclasses.field(metadata=dict(static=True))


@dataclasses.dataclass(frozen=True)
class StepMethod:
    """A dense state rounded after every token to a narrow format."""

    format: stepwise.Format
    name: str = "step"

    def init(self, *, dense: Array | None = None, **sizes: Any) -> StepState:
        batch, num_heads, key_dim, value_dim = _dense_shape(dense, **sizes)
        if dense is not None:
            return StepState(stepwise.round_dense(dense, self.format), key_dim)
        zeros = stepwise.zeros(self.format, batch=batch, num_heads=num_heads, key_dim=key_dim, value_dim=value_dim)
        return StepState(zeros, key_dim)

    def step(
        self, state: StepState, *token: Array, active: Array | None = None, implementation: str | None = None
    ) -> tuple[StepState, Array]:
        _only_xla(self.name, implementation)
        rounded, out = stepwise.rounded_step(self.format, state.rounded, *token, active=active)
        return StepState(rounded, state.key_dim), out

    def decode(
        self, state: StepState, *tokens: Array, active: Array | None = None, implementation: str | None = None
    ) -> tuple[StepState, Array]:
        _only_xla(self.name, implementation)
        return inputs.scan_tokens(self.step, state, tokens, active)

    def prefill(self, state: StepState, *tokens: Array, mask: Array | None = None) -> tuple[StepState, Array]:
        """Matrix products in fp32, rounded once at the end of the call; a row without real tokens keeps its bits."""
        dense, outs = chunked_delta_rule(self.dense_state(state), *tokens, mask=mask)
        new = stepwise.round_dense(dense, self.format)
        if mask is not None:
            any_real = jnp.any(mask, axis=1)
            new = jax.tree.map(
                lambda a, b: jnp.where(any_real.reshape(-1, *(1,) * (a.ndim - 1)), a, b), new, state.rounded
            )
        return StepState(new, state.key_dim), outs

    def dense_state(self, state: StepState) -> Array:
        return stepwise.dense_values(state.rounded, self.format, state.key_dim)

    def state_bytes(self, state: StepState) -> dict[str, int]:
        parts = dense_bytes(state.rounded.values)
        scales = 0 if state.rounded.column_scales is None else 4 * state.rounded.column_scales.size
        return {**parts, "scales": scales, **{k: parts[k] + scales for k in ("at_rest", "total")}}


_REGISTRY: dict[str, Method] = {
    method.name: method
    for method in (
        ExactMethod(),
        StepMethod("bfloat16", "step-bf16"),
        StepMethod("float16", "step-fp16"),
        StepMethod("int8", "step-int8"),
        StepMethod("float8_e4m3fn", "step-fp8"),
        StepMethod("int4", "step-int4"),
        LeapMethod(LeapConfig(bits=None, boundary_dtype="bfloat16", rank=0, smoothing=0), "window-bf16"),
        LeapMethod(LeapConfig(bits=8, rank=0, smoothing=0), "window-int8"),
        LeapMethod(LeapConfig(bits=8, rank=4, refit_gain=0), "leapquant-int8-paper"),
        LeapMethod(LeapConfig(bits=8, rank=4, smoothing=1), "leapquant-int8"),
        LeapMethod(LeapConfig(bits=6, rank=6, smoothing=1, clip="mse"), "leapquant-int6"),
        LeapMethod(LeapConfig(bits=4, rank=6, smoothing=1, rotation="hadamard", clip="mse"), "leapquant-int4"),
    )
}


def list_methods() -> list[str]:
    """Names that `get_method` knows, the exact reference first."""
    return list(_REGISTRY)


def get_method(method: str | Method) -> Method:
    """The method of that name; a method object is returned as it is.

    Raises:
      ValueError: unknown name; the message lists the known ones.
    """
    if not isinstance(method, str):
        if not all(
            hasattr(method, name)
            for name in ("name", "init", "step", "decode", "prefill", "dense_state", "state_bytes")
        ):
            raise ValueError(f"a method is a name or an object with the Method protocol, got {type(method).__name__}")
        return method
    if method not in _REGISTRY:
        raise ValueError(f"unknown method {method!r}; known: {', '.join(_REGISTRY)}")
    return _REGISTRY[method]


def _dense_shape(
    dense: Array | None, *, batch: int, num_heads: int, key_dim: int, value_dim: int, num_key_heads: int | None = None,
    gate: str = "scalar",
) -> tuple[int, int, int, int]:  # fmt: skip
    """Validates the sizes of a dense state and returns (B, H, K, V)."""
    check_gate(gate)
    shape = (batch, num_heads, key_dim, value_dim)
    if num_key_heads is not None and num_heads % num_key_heads:
        raise ValueError(f"num_heads ({num_heads}) must be a multiple of num_key_heads ({num_key_heads})")
    if dense is not None and inputs.dense_shape(dense) != shape:
        raise ValueError(f"dense has shape {tuple(dense.shape)}, expected [B, H, K, V] = {shape}")
    return shape


def _only_xla(name: str, implementation: str | None) -> None:
    check_implementation(implementation)
    if implementation == "mosaic_gpu":
        raise NotImplementedError(
            f"{name} has no Mosaic GPU kernel: it is a baseline for accuracy; use implementation='xla'"
        )
