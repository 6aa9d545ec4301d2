"""A trace: what one linear-attention layer was fed over a stretch of tokens, enough to replay any state method on it."""

import dataclasses
from typing import Any

import jax
from jax import Array

from leapquant_jax import inputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Trace:
    """The inputs of one layer over T tokens; q and k as the recurrence takes them (L2-normalised, q scaled).

    Attributes:
      q, k: fp32 [B, T, G, K].
      v: fp32 [B, T, H, V].
      g: fp32 log decay, [B, T, H] (scalar gate) or [B, T, H, K] (channel gate).
      beta: fp32 [B, T, H].
      dense: fp32 [B, H, K, V], the exact state before the first token.
      layer: index of the layer in its model.
    """

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    dense: Array
    layer: int = dataclasses.field(default=0, metadata=dict(static=True))

    @property
    def tokens(self) -> tuple[Array, Array, Array, Array, Array]:
        """(q, k, v, g, beta), the arguments of `decode` and `prefill`."""
        return self.q, self.k, self.v, self.g, self.beta

    @property
    def gate(self) -> str:
        return "scalar" if self.g.ndim == 3 else "channel"

    @property
    def sizes(self) -> dict[str, Any]:
        """The keyword arguments of `init_state`."""
        batch, heads, key_dim, value_dim = self.dense.shape
        return dict(
            batch=batch, num_heads=heads, num_key_heads=self.q.shape[2], key_dim=key_dim, value_dim=value_dim,
            gate=self.gate,
        )  # fmt: skip


def check_trace(trace: Trace) -> None:
    """Raises ValueError, naming the array, when shapes or dtypes of a trace do not fit each other."""
    batch, heads, key_dim, value_dim = inputs.dense_shape(trace.dense)
    length = inputs.time_length(trace.q)
    if length == 0:
        raise ValueError("the trace has no tokens: record at least one")
    inputs.check_tokens(
        *trace.tokens, batch=batch, num_heads=heads, num_key_heads=trace.q.shape[2], key_dim=key_dim,
        value_dim=value_dim, length=length,
    )  # fmt: skip
