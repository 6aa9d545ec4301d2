"""One layer whose heads are stored in different ways: heads differ more than layers do.

In a trained layer some heads hold a few strong directions and need 4 bits, others are flat and need 8 or 16. Arrays of
different widths cannot share a leaf, so the heads are split into groups, each with a state of its own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from leapquant_jax import inputs
from leapquant_jax import transitions as leap
from leapquant_jax.config import LeapConfig, check_config
from leapquant_jax.state import LeapState, state_bytes


@dataclasses.dataclass(frozen=True)
class HeadGroup:
    """Value heads that are stored alike.

    Attributes:
      config: how.
      heads: which of the layer's value heads, ascending; None for all of them.
    """

    config: LeapConfig
    heads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_config(self.config)
        if self.heads is None:
            return
        heads = self.heads
        if not heads or not isinstance(heads, tuple) or any(type(h) is not int or h < 0 for h in heads):
            raise ValueError(f"heads must be a tuple of head indices >= 0, or None for all, got {heads!r}")
        if list(heads) != sorted(set(heads)):
            raise ValueError(f"heads must be ascending, each once, got {heads}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixedState:
    """One `LeapState` per group of heads, each with its own ring."""

    parts: tuple[LeapState, ...]


@dataclasses.dataclass(frozen=True)
class MixedMethod:
    """A state method (see `leapquant_jax.methods.Method`) with a config per group of heads.

    A group reads the keys of its own heads. Its ring holds each key head once if all value heads of that key head are
    in the group; otherwise it holds the keys of every value head, so that splitting the value heads of a key head costs
    active bytes (none at rest). A step runs once per group: few groups are faster than many.

    Attributes:
      groups: they name each head of the layer exactly once.
      name: for tables.

    Raises:
      ValueError: a head is missing or named twice.
    """

    groups: tuple[HeadGroup, ...]
    name: str = "mixed"

    def __post_init__(self) -> None:
        named = [head for group in self.groups for head in group.heads or (-1,)]
        if sorted(named) != list(range(len(named))):
            raise ValueError(
                "groups must name every head from 0 on exactly once (one config for all heads is a LeapMethod), got "
                f"{[group.heads for group in self.groups]}"
            )

    @property
    def num_heads(self) -> int:
        return sum(len(group.heads or ()) for group in self.groups)

    def init(
        self, *, dense: Array | None = None, num_heads: int, num_key_heads: int | None = None, **sizes: Any
    ) -> MixedState:
        if num_heads != self.num_heads:
            raise ValueError(f"num_heads is {num_heads}, but the groups name {self.num_heads} heads")
        num_key_heads = num_heads if num_key_heads is None else num_key_heads
        parts = [
            leap.init_state(
                group.config, dense=None if dense is None else dense[:, np.array(group.heads)],
                num_heads=len(group.heads or ()), num_key_heads=len(_key_heads(group, num_heads, num_key_heads)), **sizes,
            )
            for group in self.groups
        ]  # fmt: skip
        return MixedState(tuple(parts))

    def step(
        self, state: MixedState, *token: Array, active: Array | None = None, implementation: str | None = None
    ) -> tuple[MixedState, Array]:
        def one(config: LeapConfig, part: LeapState, *arrays: Array) -> tuple[LeapState, Array]:
            return leap.step(config, part, *arrays, active=active, implementation=implementation)

        return self._for_each_group(one, state, token, axis=1)

    def decode(
        self, state: MixedState, *tokens: Array, active: Array | None = None, implementation: str | None = None
    ) -> tuple[MixedState, Array]:
        def step(state: MixedState, *token: Array, active: Array | None) -> tuple[MixedState, Array]:
            return self.step(state, *token, active=active, implementation=implementation)

        return inputs.scan_tokens(step, state, tokens, active)

    def prefill(self, state: MixedState, *tokens: Array, mask: Array | None = None) -> tuple[MixedState, Array]:
        def one(config: LeapConfig, part: LeapState, *arrays: Array) -> tuple[LeapState, Array]:
            return leap.prefill(config, part, *arrays, mask=mask)

        return self._for_each_group(one, state, tokens, axis=2)

    def dense_state(self, state: MixedState) -> Array:
        parts = [leap.dense_state(group.config, part) for group, part in zip(self.groups, state.parts, strict=True)]
        return self._in_order(parts, axis=1)

    def state_bytes(self, state: MixedState) -> dict[str, int]:
        parts = [state_bytes(group.config, part) for group, part in zip(self.groups, state.parts, strict=True)]
        return {name: sum(part[name] for part in parts) for name in parts[0]}

    def _for_each_group(
        self, run: Callable[..., tuple[LeapState, Array]], state: MixedState, tokens: tuple[Array, ...], axis: int
    ) -> tuple[MixedState, Array]:
        """Runs a transition on each group's heads; `axis` is that of the heads in tokens and outputs."""
        q, k, *of_value_heads = tokens
        results = []
        for group, part in zip(self.groups, state.parts, strict=True):
            key_heads = np.array(_key_heads(group, self.num_heads, q.shape[axis]))
            arrays = [jnp.take(x, key_heads, axis=axis) for x in (q, k)]
            arrays += [jnp.take(x, np.array(group.heads), axis=axis) for x in of_value_heads]
            results.append(run(group.config, part, *arrays))
        states, outs = zip(*results, strict=True)
        return MixedState(tuple(states)), self._in_order(outs, axis=axis)

    def _in_order(self, parts: Any, axis: int) -> Array:
        """The groups' heads side by side, in the layer's order."""
        named = [head for group in self.groups for head in group.heads or ()]
        return jnp.take(jnp.concatenate(parts, axis=axis), np.argsort(named), axis=axis)


def _key_heads(group: HeadGroup, num_heads: int, num_key_heads: int) -> list[int]:
    """Key heads whose keys a group's ring holds: each once if it serves all its value heads here, else one per head."""
    if num_heads % num_key_heads:
        raise ValueError(f"num_heads ({num_heads}) must be a multiple of num_key_heads ({num_key_heads})")
    served = num_heads // num_key_heads
    of_heads = [head // served for head in group.heads or ()]
    distinct = sorted(set(of_heads))
    return distinct if len(of_heads) == served * len(distinct) else of_heads
