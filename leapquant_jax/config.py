"""What can be chosen about a low-bit recurrent state; validated once, hashable, static under jit."""

import dataclasses
import typing
from typing import Literal

BITS = (8, 6, 4)
FLOATS = ("float16", "bfloat16", "float32")

Float = Literal["float16", "bfloat16", "float32"]
Gate = Literal["scalar", "channel"]
Implementation = Literal["xla", "mosaic_gpu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeapConfig:
    """How a recurrent state is stored between tokens.

    The defaults are the paper's 8-bit method with `refit_gain`: 19,456 bytes for a 128 x 128 head at rest. `leapquant-int8`,
    `-int6` and `-int4` (`get_method`) choose more for themselves.

    Attributes:
      bits: width of the integer codes of the boundary state, 8, 6 or 4 (6 and 4 are really packed), or None together
        with `boundary_dtype`.
      window: tokens between two roundings (p). A ring keeps that many records.
      rank: compensators (r), rank-one parts of the state kept in `compensator_dtype`; 0 for none.
      smoothing: exponent s of c_i = (mean_j |R_ij|)^s, the factor divided out of key row i before rounding; 0 for none.
        Eq. 7 has s = 0.5. With 1 every key row is rounded to the same relative precision, which keeps what is written
        under rarely used keys: on checkpoints/tiny-hybrid twice as many copies survive 8 bits, at the same state error.
      record_dtype: of the ring's keys and corrections. fp16 is 6-8 times more accurate than bf16 at the same bytes;
        each record carries a power-of-two scale, so its range is not limited.
      compensator_dtype: of the compensators.
      fit: "subspace" (warm-started from the previous window's compensators), "svd" (the exact oracle, slow) or "cold"
        (subspace iterations from the same fixed directions at every fold: what the warm start is worth).
      fit_iterations: subspace iterations per fold.
      refit_gain: a fold keeps a head's previous compensators, decayed, unless new ones leave at least this share less
        residual energy; 0 refits every time, as the paper does. In a head that hardly changes the residual sits on its
        grid while refitted compensators wander, and each fold adds an error that no rounding takes back.
      rotation: "hadamard" rotates the smoothed residual over its key rows before rounding, by an orthonormal Hadamard
        matrix with fixed random signs (K a power of two). Beyond the paper.
      clip: "mse" shrinks each column's scale where that lowers its squared rounding error, and then sets it to the
        least-squares scale of the codes, so that a fold never adds energy. Beyond the paper.
      boundary_dtype: stores the boundary state as plain floats of this type instead of codes ("float32" switches
        quantization off, "bfloat16" is the windowed bf16 baseline). Needs bits=None, rank=0, smoothing=0.

    Raises:
      ValueError: a value is unknown, or an option would have no effect.
    """

    bits: int | None = 8
    window: int = 16
    rank: int = 4
    smoothing: float = 0.5
    record_dtype: Float = "float16"
    compensator_dtype: Float = "float16"
    fit: Literal["subspace", "svd", "cold"] = "subspace"
    fit_iterations: int = 1
    refit_gain: float = 0.02
    rotation: Literal["hadamard"] | None = None
    clip: Literal["mse"] | None = None
    boundary_dtype: Float | None = None

    def __post_init__(self) -> None:
        for name in ("window", "rank", "fit_iterations"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be a Python int (it shapes the compiled program), got {value!r}")
        for name in ("smoothing", "refit_gain"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} must be a Python number, got {value!r}")
            object.__setattr__(self, name, float(value))
        if self.window < 1:
            raise ValueError(f"window must be at least 1 token, got {self.window}")
        if self.rank < 0:
            raise ValueError(f"rank must be at least 0, got {self.rank}")
        if self.fit_iterations < 1:
            raise ValueError(
                f"fit_iterations must be at least 1, got {self.fit_iterations}; use rank=0 for no compensators"
            )
        if not 0.0 <= self.smoothing <= 1.0:
            raise ValueError(f"smoothing is an exponent in [0, 1], got {self.smoothing}")
        if not 0.0 <= self.refit_gain < 1.0:
            raise ValueError(f"refit_gain is a share of the residual energy in [0, 1), got {self.refit_gain}")
        for name, allowed in (
            ("record_dtype", FLOATS), ("compensator_dtype", FLOATS), ("fit", ("subspace", "svd", "cold")),
            ("rotation", (None, "hadamard")), ("clip", (None, "mse")), ("boundary_dtype", (None, *FLOATS)),
        ):  # fmt: skip
            value = getattr(self, name)
            if not (value is None or isinstance(value, str)) or value not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
        if self.boundary_dtype is None and (isinstance(self.bits, bool) or self.bits not in BITS):
            raise ValueError(f"bits must be one of {BITS} (or None with boundary_dtype), got {self.bits!r}")
        if self.boundary_dtype is not None:
            if self.bits is not None:
                raise ValueError(
                    f"boundary_dtype={self.boundary_dtype!r} stores floats, not codes: pass bits=None with it"
                )
            self._refuse_idle(
                f"boundary_dtype={self.boundary_dtype!r}, which quantizes nothing",
                rank=0, smoothing=0.0, rotation=None, clip=None,
            )  # fmt: skip
        if self.rank == 0:
            self._refuse_idle(
                "rank=0, which fits no compensators",
                fit="subspace", fit_iterations=1, refit_gain=self.refit_gain and 0.02, compensator_dtype="float16",
            )  # fmt: skip
        elif self.fit == "svd":
            self._refuse_idle("fit='svd', which does not iterate", fit_iterations=1)

    def _refuse_idle(self, partner: str, **off: object) -> None:
        """Raises ValueError if an option that has no effect beside `partner` is not at its `off` value."""
        idle = [name for name, value in off.items() if getattr(self, name) != value]
        if idle:
            instead = ", ".join(f"{name}={off[name]!r}" for name in idle)
            raise ValueError(f"{', '.join(idle)} would have no effect with {partner}: pass {instead}")

    @property
    def largest_code(self) -> int:
        """Largest code, 127, 31 or 7: codes are symmetric integers."""
        if self.bits is None:
            raise ValueError("a state stored as floats has no codes")
        return 2 ** (self.bits - 1) - 1

    def check_dims(self, key_dim: int, value_dim: int) -> None:
        """Raises ValueError when the options do not fit a head of `key_dim` x `value_dim`."""
        if self.rank and self.rank >= min(key_dim, value_dim):
            raise ValueError(
                f"rank ({self.rank}) must be below min(key_dim, value_dim) = {min(key_dim, value_dim)}: that many "
                "compensators would hold the whole state"
            )
        if self.rotation == "hadamard" and key_dim & (key_dim - 1):
            raise ValueError(f"rotation='hadamard' needs a key_dim that is a power of two, got {key_dim}")


def check_config(config: object) -> LeapConfig:
    """Returns `config`, or raises ValueError naming what to pass."""
    if not isinstance(config, LeapConfig):
        raise ValueError(
            f"config must be a LeapConfig, got {type(config).__name__}; for methods by name see get_method"
        )
    return config


def check_gate(gate: str) -> None:
    """Raises ValueError unless `gate` is "scalar" (one decay per head) or "channel" (one per key channel)."""
    if gate not in typing.get_args(Gate):
        raise ValueError(f"gate must be one of {typing.get_args(Gate)}, got {gate!r}")


def check_implementation(implementation: str | None) -> None:
    """Raises ValueError for an unknown implementation name."""
    if implementation is not None and implementation not in typing.get_args(Implementation):
        raise ValueError(
            f"implementation must be None or one of {typing.get_args(Implementation)}, got {implementation!r}"
        )
