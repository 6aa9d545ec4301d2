"""The exact recurrence for training: chunk-parallel, with all that does not read the state taken out of the scan.

``leapquant_jax.chunked_delta_rule`` visits the chunks one after another and solves a triangular system in each, which on a
GPU is a long chain of small kernels. Here the systems of all chunks are inverted at once (the WY form), and the scan over
the chunks holds two matrix products. It is the same function up to rounding; a test says so.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

HIGHEST = jax.lax.Precision.HIGHEST
_SMALLEST_BLOCK = 8


@dataclasses.dataclass(frozen=True)
class ExactForTraining:
    """A state method for ``qwen35.init_cache`` that keeps the fp32 state as it is. Prefill only.

    Attributes:
        chunk_size: Tokens per chunk.
        operand_dtype: Of the large matrix products. "bfloat16" is what training kernels use; "float32" is exact.
    """

    chunk_size: int = 64
    operand_dtype: str = "float32"
    name: str = "exact"

    def init(
        self, *, batch: int, num_heads: int, num_key_heads: int, key_dim: int, value_dim: int, gate: str = "scalar"
    ) -> Array:
        """A zero state, fp32 [B, H, K, V]."""
        del num_key_heads, gate
        return jnp.zeros((batch, num_heads, key_dim, value_dim), jnp.float32)

    def prefill(
        self, state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, *, mask: Array | None = None
    ) -> tuple[Array, Array]:
        """See ``parallel_delta_rule``; padding is not supported."""
        if mask is not None:
            raise ValueError("Training streams have no padding: pass mask=None, or use the method 'exact'.")
        return parallel_delta_rule(
            state, q, k, v, g, beta, chunk_size=self.chunk_size, operand_dtype=self.operand_dtype
        )

    def step(self, state: Array, *unused, **unused_options) -> tuple[Array, Array]:
        raise NotImplementedError("ExactForTraining has no single-token step: decode with the method 'exact'.")

    def dense_state(self, state: Array) -> Array:
        """The state itself, fp32 [B, H, K, V]."""
        return state


def parallel_delta_rule(
    dense: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, *, chunk_size: int = 64,
    operand_dtype: DTypeLike = jnp.float32,
) -> tuple[Array, Array]:  # fmt: skip
    """T tokens of the gated delta rule (eqs. 4 and 10 of the method) with a scalar gate. Differentiable.

    Args:
        dense: State before, fp32 [B, H, K, V].
        q, k: Floating point [B, T, G, K]; L2-normalised, q scaled.
        v: [B, T, H, V].
        g: Log decay <= 0, finite, fp32 [B, T, H].
        beta: Write strength, fp32 [B, T, H].
        chunk_size: C = 8, 16, 32, ...; T must be a multiple of it.
        operand_dtype: What the operands of the large products are rounded to. Sums, the state that is carried, decays
            and the triangular inverse are fp32 in any case.

    Returns:
        The state after T tokens and the outputs, fp32 [B, T, H, V].

    Raises:
        ValueError: If T is not a whole number of chunks, C is not 8 times a power of two, or the gate is per channel.
    """
    batch, length, heads, value_dim = v.shape
    chunk, blocks = chunk_size, chunk_size // _SMALLEST_BLOCK
    if blocks < 1 or chunk % _SMALLEST_BLOCK or blocks & (blocks - 1):
        raise ValueError(f"chunk_size must be 8 times a power of two, but is {chunk}.")
    if length % chunk:
        raise ValueError(f"{length} tokens are not a whole number of chunks of {chunk}: change the segment length.")
    if g.ndim != 3:
        raise ValueError("Only the scalar gate [B, T, H] is supported here: use leapquant_jax.chunked_delta_rule.")
    rounded = jnp.dtype(operand_dtype)

    def to_chunks(x: Array) -> Array:  # [B, T, H, ...] -> [N, B, H, C, ...]
        x = x.reshape(batch, length // chunk, chunk, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2))

    def product(pattern: str, a: Array, b: Array, result: DTypeLike = jnp.float32) -> Array:
        a, b = a.astype(rounded), b.astype(rounded)
        return jnp.einsum(pattern, a, b, precision=HIGHEST, preferred_element_type=jnp.dtype(result))

    def weighted(weight: Array, x: Array) -> Array:
        return weight.astype(rounded) * x

    q, k, v = (x.astype(rounded) for x in (q, k, v))
    q, k = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (q, k))
    q, k, v, g, beta = (to_chunks(x) for x in (q, k, v, g.astype(jnp.float32), beta.astype(jnp.float32)))
    beta = beta[..., None]

    # Gamma_{a:b} from differences of cumulative log decays: their fp32 error is far below what training can notice.
    cumulative = jnp.cumsum(g, axis=-1)
    lower = jnp.tril(jnp.ones((1, 1, 1, chunk, chunk), bool))
    between = jnp.exp(jnp.where(lower, cumulative[..., :, None] - cumulative[..., None, :], -jnp.inf))  # Gamma_{j+1:i}
    from_start = jnp.exp(cumulative)[..., None]  # Gamma_{1:i}
    to_end = jnp.exp(cumulative[..., -1:] - cumulative)[..., None]  # Gamma_{j+1:C}
    end = from_start[..., -1:, :]  # Gamma_{1:C}

    inverse = unit_lower_inverse(beta * product("nbhik,nbhjk->nbhij", k, k) * between)
    writes = product("nbhij,nbhjv->nbhiv", inverse, weighted(beta, v), rounded)  # u if the state were zero
    erases = product("nbhij,nbhjk->nbhik", inverse, weighted(beta * from_start, k), rounded)  # u = writes - erases S

    def one_chunk(dense: Array, chunk_terms: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        writes, erases, kept_keys, end = chunk_terms
        start = dense.astype(rounded)
        u = writes - product("bhik,bhkv->bhiv", erases, start, rounded)
        return end * dense + product("bhik,bhiv->bhkv", kept_keys, u), (start, u)

    dense, (starts, u) = jax.lax.scan(one_chunk, dense, (writes, erases, weighted(to_end, k), end))
    outs = product("nbhik,nbhkv->nbhiv", weighted(from_start, q), starts)
    outs += product("nbhij,nbhjv->nbhiv", product("nbhik,nbhjk->nbhij", q, k) * between, u)
    return dense, jnp.moveaxis(outs, (0, 2), (1, 3)).reshape(batch, length, heads, value_dim)


@jax.custom_vjp
def unit_lower_inverse(system: Array) -> Array:
    """(I + A)^-1, where A is the strictly lower part of ``system``, by matrix products alone.

    A library's triangular solve walks through the rows one by one, for every matrix of the batch. Here blocks of 8 are
    inverted by their Neumann series, which ends because A^8 = 0 and is too short to lose digits, and pairs of neighbouring
    blocks are merged, [[X, 0], [-Y L X, Y]], until one is left. The derivative is written out: -X^T dX X^T.

    Args:
        system: fp32 [..., C, C], C = 8, 16, 32, ...

    Returns:
        fp32 [..., C, C], unit lower triangular.
    """
    return _merge_blocks(jnp.tril(system, -1))


def _merge_blocks(strictly_lower: Array) -> Array:
    size, width = strictly_lower.shape[-1], _SMALLEST_BLOCK
    lead = strictly_lower.shape[:-2]
    identity = jnp.broadcast_to(jnp.eye(width, dtype=jnp.float32), (*lead, size // width, width, width))
    a = _blocks_on_diagonal(strictly_lower, width)
    a2 = _exact_product(a, a)
    inverse = _exact_product(_exact_product(identity - a, identity + a2), identity + _exact_product(a2, a2))
    while width < size:
        below = _blocks_on_diagonal(strictly_lower, 2 * width)[..., width:, :width]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_exact_product(_exact_product(second, below), first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        width *= 2
    return inverse[..., 0, :, :]


def _blocks_on_diagonal(matrix: Array, width: int) -> Array:
    """[..., C, C] to [..., C / width, width, width]."""
    starts = range(0, matrix.shape[-1], width)
    return jnp.stack([matrix[..., i : i + width, i : i + width] for i in starts], axis=-3)


def _exact_product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=HIGHEST)


def _inverse_forward(system: Array) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(system)
    return inverse, inverse


def _inverse_backward(inverse: Array, cotangent: Array) -> tuple[Array]:
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.tril(_exact_product(_exact_product(transposed, cotangent), transposed), -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)
