"""Named shapes of real models, for tests and benchmarks: value heads, key heads, and one head's size."""

from typing import NamedTuple


class Shape(NamedTuple):
    heads: int
    key_heads: int
    key_dim: int = 128
    value_dim: int = 128
    rank: int = 4
    window: int = 16


SHAPES: dict[str, Shape] = {
    "qwen3.5-0.8b": Shape(16, 16),
    "qwen3.5-9b": Shape(32, 16),
    "qwen3.5-27b": Shape(48, 16),
    "qwen3.5-122b": Shape(64, 16),
    "kimi-linear": Shape(32, 32),  # its heads; its gate is one decay per channel, which the kernels do not run
    "odd": Shape(6, 2, 64, 64, rank=3, window=8),
}
