"""Inputs and comparisons shared by the library's tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import leapquant_jax as lq
from tests.library import oracle

UNQUANTIZED = lq.LeapConfig(bits=None, boundary_dtype="float32", rank=0, smoothing=0, record_dtype="float32")

# The tests of batches, rows, rollback and windows share one program: 16 requests at their own window positions.
POOL = lq.LeapConfig(window=16, rank=1)
POOL_SIZES = dict(batch=16, num_heads=2, num_key_heads=1, key_dim=8, value_dim=6)


def tokens(seed, B=1, T=20, G=1, H=2, K=8, V=6, gate="scalar", half_life=30.0, dtype=np.float32):
    """Random tokens (q, k, v, g, beta) as NumPy fp32: normalised keys, decays around `half_life` tokens."""
    rng = np.random.default_rng(seed)
    q = oracle.l2norm(rng.standard_normal((B, T, G, K))) / np.sqrt(K)
    k = oracle.l2norm(rng.standard_normal((B, T, G, K)))
    v = rng.standard_normal((B, T, H, V))
    g = -np.log(2) / half_life * np.exp(rng.standard_normal((B, T, H, K) if gate == "channel" else (B, T, H)))
    beta = 1 / (1 + np.exp(-rng.standard_normal((B, T, H))))
    return tuple(x.astype(dtype) for x in (q, k, v, g, beta))


def at(arrays, t):
    """Token t of [B, T, ...] arrays."""
    return tuple(x[:, t] for x in arrays)


def span(arrays, start, stop):
    """Tokens start..stop of [B, T, ...] arrays."""
    return tuple(x[:, start:stop] for x in arrays)


def sizes(arrays, gate=None):
    """Keyword arguments of init_state that fit the tokens."""
    _, k, v, g, _ = arrays
    return dict(
        batch=v.shape[0], num_heads=v.shape[2], num_key_heads=k.shape[2], key_dim=k.shape[3], value_dim=v.shape[3],
        gate=gate or ("channel" if g.ndim == 4 else "scalar"),
    )  # fmt: skip


def relative(a, b):
    """||a - b|| / ||b||."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-300))


def bits_of(x):
    """The raw bytes of a leaf, so that NaNs and signed zeros compare too."""
    x = np.ascontiguousarray(np.asarray(x))
    return x.dtype, x.shape, x.tobytes()


def assert_bit_equal(a, b, message=""):
    """Same structure, and the same raw bits in every leaf."""
    assert jax.tree.structure(a) == jax.tree.structure(b), message
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert bits_of(x) == bits_of(y), f"{message} leaf {jax.tree_util.keystr(path)} differs"


def rows_of(state, indices):
    """Rows of every leaf, by plain NumPy (independent of lq.take_rows)."""
    return jax.tree.map(lambda x: np.asarray(x)[np.asarray(indices)], state)


step = jax.jit(lq.step, static_argnums=0, static_argnames="implementation")
decode = jax.jit(lq.decode, static_argnums=0, static_argnames="implementation")
prefill = jax.jit(lq.prefill, static_argnums=0)
fold = jax.jit(lq.fold, static_argnums=0)
rollback = jax.jit(lq.rollback, static_argnums=0)
dense_state = jax.jit(lq.dense_state, static_argnums=0)
exact_decode = jax.jit(lq.exact_decode)
chunked = jax.jit(lq.chunked_delta_rule, static_argnames=("chunk_size",))


@functools.partial(jax.jit, static_argnums=0, static_argnames=tuple(sizes(tokens(0))))
def init_from(config, dense, **options):
    """init_state of a dense state, compiled."""
    return lq.init_state(config, dense=dense, **options)


def pool_tokens(seed, T):
    """Tokens that fit POOL_SIZES."""
    return tokens(seed, B=16, T=T, G=1, H=2, K=8, V=6)


def run(config, state, arrays, active=None):
    """Python loop of compiled steps over [B, T, ...]; `active` is bool [B, T]. Returns (state, outs [B, T, H, V])."""
    outs = []
    for t in range(arrays[0].shape[1]):
        mask = np.ones(arrays[0].shape[0], bool) if active is None else active[:, t]
        state, out = step(config, state, *at(arrays, t), active=mask)
        outs.append(out)
    return state, np.stack(outs, axis=1)


def phased_pool(seed=100):
    """The pool with row n at window position n: (state, tokens [16, 15, ...], lengths)."""
    x, lengths = pool_tokens(seed, 15), np.arange(16)
    state, _ = run(POOL, lq.init_state(POOL, **POOL_SIZES), x, active=np.arange(15)[None] < lengths[:, None])
    return state


def zeros(arrays):
    """The empty dense state for the tokens."""
    s = sizes(arrays)
    return jnp.zeros((s["batch"], s["num_heads"], s["key_dim"], s["value_dim"]), jnp.float32)
