"""The method in float64 NumPy, one token and one head at a time, written from the equations and not from the library.

Heads are looped over in Python and nothing is batched, cumulated or chunked, so no trick of the library can be wrong in
the same way here. Only what the method *stores* is narrow: records, compensators, scales and codes.
"""

import dataclasses

import ml_dtypes
import numpy as np

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
LARGEST_CODE = {8: 127, 6: 31, 4: 7}


def round_to(x, dtype: str) -> np.ndarray:
    """Round-trips float64 through fp32 (which the library computes in) and the storage type."""
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float32).astype(DTYPES[dtype]).astype(np.float64)


def l2norm(x, eps=1e-6):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + eps)


def key_head(value_head: int, num_heads: int, num_key_heads: int) -> int:
    """Consecutive value heads share a key head."""
    return value_head // (num_heads // num_key_heads)


def exact_token(S, q, k, v, g, beta):
    """One head: S [K, V], q and k [K], v [V], g a number or [K], beta a number. Returns (S, o)."""
    decay = np.exp(np.asarray(g, np.float64))
    S = np.broadcast_to(decay, k.shape)[:, None] * S
    u = beta * (v - S.T @ k)
    S = S + np.outer(k, u)
    return S, S.T @ q


def exact(S, q, k, v, g, beta, history=False):
    """The recurrence over [B, T, ...] arrays from S [B, H, K, V].

    Returns (S, outputs [B, T, H, V]), and with `history` also the states after each token [B, T, H, K, V].
    """
    S, q, k, v, g, beta = (np.array(x, np.float64) for x in (S, q, k, v, g, beta))
    batch, length, num_heads, value_dim = v.shape
    outs = np.zeros((batch, length, num_heads, value_dim))
    states = np.zeros((batch, length, *S.shape[1:])) if history else None
    for b in range(batch):
        for h in range(num_heads):
            j = key_head(h, num_heads, k.shape[2])
            for t in range(length):
                S[b, h], outs[b, t, h] = exact_token(
                    S[b, h], q[b, t, j], k[b, t, j], v[b, t, h], g[b, t, h], beta[b, t, h]
                )
                if states is not None:
                    states[b, t, h] = S[b, h]
    return (S, outs, states) if history else (S, outs)


def svd_compensators(S, rank):
    """The best rank-one parts of S [K, V], their norm split evenly: (keys [R, K], values [R, V])."""
    left, sigma, right = np.linalg.svd(S, full_matrices=False)
    root = np.sqrt(sigma[:rank])
    return (left[:, :rank] * root).T, right[:rank] * root[:, None]


def rotation_matrix(size):
    """Entry (i, j) is (-1)^(number of common one bits) / sqrt(size), with fixed random signs on the columns."""
    hadamard = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(size)] for i in range(size)])
    return hadamard / np.sqrt(size) * (2.0 * np.random.RandomState(1).randint(0, 2, size) - 1)


@dataclasses.dataclass
class Rounded:
    """A residual after rounding: codes Z [K, V], c [K], B [V]."""

    codes: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    rotation: np.ndarray

    def dense(self):
        return self.rows[:, None] * (self.rotation.T @ (self.codes * self.columns))

    def half_step(self):
        """Largest rounding error allowed per element (without rotation)."""
        return 0.5 * self.rows[:, None] * self.columns


def quantize(R, bits=8, smoothing=0.5, rotation=False):
    """c_i = mean_j |R_ij|^s, B_j = max_i |R_ij / c_i| / qmax, codes to nearest even."""
    R = np.asarray(R, np.float64)
    largest = LARGEST_CODE[bits]
    rows = np.abs(R).mean(1) ** smoothing if smoothing else np.ones(len(R))
    rows = np.where(np.abs(R).max(1) > 0, rows, 1.0).astype(np.float32).astype(np.float64)
    Q = rotation_matrix(len(R)) if rotation else np.eye(len(R))
    scaled = Q @ (R / rows[:, None])
    columns = (np.abs(scaled).max(0) / largest).astype(np.float32).astype(np.float64)
    codes = np.zeros_like(R)
    used = columns > 0
    codes[:, used] = np.clip(np.rint(scaled[:, used] / columns[used]), -largest, largest)
    return Rounded(codes, rows, columns, Q)


class WindowedHead:
    """One head of the windowed method. The boundary state is rounded once per window, a token is one record."""

    def __init__(
        self, key_dim, value_dim, *, bits=8, window=16, rank=4, smoothing=0.5, record_dtype="float16",
        compensator_dtype="float16", boundary_dtype=None, rotation=False, channel=False,
    ):  # fmt: skip
        self.boundary = np.zeros((key_dim, value_dim))
        self.bits, self.window, self.rank, self.smoothing = bits, window, rank, smoothing
        self.record_dtype, self.compensator_dtype = record_dtype, compensator_dtype
        self.boundary_dtype, self.rotation, self.channel = boundary_dtype, rotation, channel
        self.records: list[tuple] = []  # (k as stored, u as stored, g)
        self.folds = 0

    def state(self):
        """S_l = Gamma_{1:l} S_0 + sum_j Gamma_{j+1:l} k_j u_j^T, by walking through the records."""
        S = self.boundary
        for k, u, g in self.records:
            S = np.broadcast_to(np.exp(g), k.shape)[:, None] * S + np.outer(k, u)
        return S

    def token(self, q, k, v, g, beta):
        g = np.asarray(g, np.float64)
        if self.channel and self.record_dtype != "float32":
            g = round_to(np.maximum(g, -128.0), "float16")  # stored narrow; -128 is a full erase
        S = np.broadcast_to(np.exp(g), k.shape)[:, None] * self.state()
        u = beta * (v - S.T @ k)
        power = 2.0 ** np.floor(np.log2(np.abs(u).max()) + 1) if np.abs(u).max() > 0 else 1.0
        k, u = round_to(k, self.record_dtype), round_to(u / power, self.record_dtype) * power
        out = S.T @ q + u * (k @ q)
        self.records.append((k, u, g))
        if len(self.records) == self.window:
            self.fold()
        return out

    def fold(self, compensators=None):
        S = self.state()
        self.records, self.folds = [], self.folds + 1
        if self.boundary_dtype:
            self.boundary = round_to(S, self.boundary_dtype)
            return
        low_rank = np.zeros_like(S)
        if self.rank:
            keys, values = compensators or svd_compensators(S, self.rank)
            keys, values = round_to(keys, self.compensator_dtype), round_to(values, self.compensator_dtype)
            low_rank = keys.T @ values
        # against the *rounded* compensators, otherwise their own rounding error is never corrected
        self.boundary = low_rank + quantize(S - low_rank, self.bits, self.smoothing, self.rotation).dense()


def windowed(q, k, v, g, beta, **options):
    """All heads of [B, T, ...] arrays from the zero state: (states [B, H, K, V], outputs [B, T, H, V])."""
    q, k, v, g, beta = (np.array(x, np.float64) for x in (q, k, v, g, beta))
    batch, length, num_heads, value_dim = v.shape
    states = np.zeros((batch, num_heads, k.shape[-1], value_dim))
    outs = np.zeros((batch, length, num_heads, value_dim))
    for b in range(batch):
        for h in range(num_heads):
            j = key_head(h, num_heads, k.shape[2])
            head = WindowedHead(k.shape[-1], value_dim, channel=g.ndim == 4, **options)
            for t in range(length):
                outs[b, t, h] = head.token(q[b, t, j], k[b, t, j], v[b, t, h], g[b, t, h], beta[b, t, h])
            states[b, h] = head.state()
    return states, outs


def pack_bits(codes, bits):
    """One row of codes to bytes, bit by bit: low nibbles first (halves of the row share a byte), then the top pairs."""
    if bits == 8:
        return [c % 256 for c in codes]
    group = {6: 4, 4: 2}[bits]
    codes = list(codes) + [0] * (-len(codes) % group)
    unsigned = [c % 256 for c in codes]
    half, quarter = len(codes) // 2, len(codes) // 4
    packed = [(unsigned[i] % 16) + 16 * (unsigned[i + half] % 16) for i in range(half)]
    if bits == 6:
        packed += [sum((unsigned[i + n * quarter] // 16 % 4) * 4**n for n in range(4)) for i in range(quarter)]
    return packed


def bytes_per_head(K, V, *, bits=8, rank=4, smoothing=True, compensator_bytes=2):
    """At rest: codes, one fp32 scale per key row and value column, rank factors of length K and V."""
    code_bytes = V * {8: K, 6: -(-K // 4) * 3, 4: -(-K // 2)}[bits]
    return code_bytes + 4 * (K * bool(smoothing) + V) + compensator_bytes * rank * (K + V)
