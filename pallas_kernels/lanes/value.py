"""Registers and pointers of a lane program; the arithmetic itself belongs to the backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

Number = int | float


class Value:
    """One register per thread. `kind` is "f32", "i32", "i64" or "i1"; operators accept Python numbers."""

    __slots__ = ("data", "kind", "lanes")

    def __init__(self, lanes: Lanes, kind: str, data: Any):
        self.lanes, self.kind, self.data = lanes, kind, data

    def _binary(self, op: str, other: Value | Number, swap: bool = False) -> Value:
        other = self.lanes.value(other, self.kind)
        if other.kind != self.kind:
            raise TypeError(f"{op} of {self.kind} and {other.kind}: convert one of them")
        a, b = (other, self) if swap else (self, other)
        return self.lanes.binary(op, a, b)

    def __add__(self, other: Value | Number) -> Value:
        return self._binary("add", other)

    def __sub__(self, other: Value | Number) -> Value:
        return self._binary("sub", other)

    def __mul__(self, other: Value | Number) -> Value:
        return self._binary("mul", other)

    def __radd__(self, other: Number) -> Value:
        return self._binary("add", other, swap=True)

    def __rsub__(self, other: Number) -> Value:
        return self._binary("sub", other, swap=True)

    def __rmul__(self, other: Number) -> Value:
        return self._binary("mul", other, swap=True)

    def __floordiv__(self, other: Value | int) -> Value:
        return self._binary("div", other)  # of non-negative integers

    def __mod__(self, other: Value | int) -> Value:
        return self._binary("rem", other)  # of non-negative integers

    def __and__(self, other: Value | int) -> Value:
        return self._binary("and", other)

    def __or__(self, other: Value | int) -> Value:
        return self._binary("or", other)

    def __xor__(self, other: Value | int) -> Value:
        return self._binary("xor", other)

    def __lshift__(self, other: Value | int) -> Value:
        return self._binary("shl", other)

    def __rshift__(self, other: Value | int) -> Value:
        return self._binary("shr", other)  # logical

    def __lt__(self, other: Value | Number) -> Value:
        return self._binary("lt", other)

    def __le__(self, other: Value | Number) -> Value:
        return self._binary("le", other)

    def __gt__(self, other: Value | Number) -> Value:
        return self._binary("gt", other)

    def __ge__(self, other: Value | Number) -> Value:
        return self._binary("ge", other)

    def equals(self, other: Value | Number) -> Value:
        return self._binary("eq", other)

    def differs(self, other: Value | Number) -> Value:
        return self._binary("ne", other)


@dataclasses.dataclass(frozen=True)
class Pointer:
    """A byte address per thread into an array in global memory, or into the worker's shared memory (`array` None)."""

    lanes: Lanes
    array: Any
    base: Any  # backend data: 64-bit address (global) or 32-bit offset (shared)
    offset: int = 0  # static bytes on top, folded into the instruction

    def __add__(self, offset: Value | int) -> Pointer:
        if isinstance(offset, int):
            return dataclasses.replace(self, offset=self.offset + offset)
        return self.lanes.advance(self, offset)


class Lanes:
    """What a backend has to provide, and the shorthands built on it. Every method works on all threads at once."""

    # -- identity
    threads: int  # per worker
    thread: Value  # index in the worker

    def thread_of(self, item: Value) -> Value:
        """`thread`, in a form that the compiler must believe to depend on the item.

        Otherwise every index and address made from it would be loop-invariant, and the compiler would keep some forty of
        them in registers from one item to the next instead of spending a few instructions on each.
        """
        raise NotImplementedError

    workers: int  # in the whole launch

    def for_items(
        self,
        count: int | Value,
        start: Callable[[Value], list[Value]],
        body: Callable[[Value, list[Value]], list[Value]],
    ) -> None:
        """Deals items 0..count-1 to the workers in turn: worker w takes w, w + workers, ... `start(item)` gives the registers
        to carry into a worker's first item, `body(item, carried)` those for its next; `start` must also stand an item of
        `count` or more, for a worker that gets none."""
        raise NotImplementedError

    # -- registers
    def value(self, x: Value | Number, kind: str = "i32") -> Value:
        return x if isinstance(x, Value) else self.constant(x, kind)

    def constant(self, x: Number, kind: str) -> Value:
        raise NotImplementedError

    def binary(self, op: str, a: Value, b: Value) -> Value:
        raise NotImplementedError

    def unary(self, op: str, a: Value) -> Value:
        raise NotImplementedError

    def fma(self, a: Value, b: Value | Number, c: Value | Number) -> Value:
        """a b + c with one rounding."""
        raise NotImplementedError

    def select(self, condition: Value, a: Value | Number, b: Value | Number) -> Value:
        """`a` where the condition holds; the kind is that of whichever of the two is a register (f32 if neither)."""
        raise NotImplementedError

    def permute_bytes(self, a: Value, b: Value, selector: Value | int) -> Value:
        """PTX prmt: picks four of the eight bytes of (a, b), a's being 0-3; one hex digit of `selector` each."""
        raise NotImplementedError

    # -- warp and worker
    def shuffle_xor(self, a: Value, mask: int) -> Value:
        raise NotImplementedError

    def shuffle(self, a: Value, source: Value | int) -> Value:
        raise NotImplementedError

    def transpose_halves(self, word: Value) -> Value:
        """Transposes an 8 x 8 matrix of fp16 over the warp: lane l holds the entries 2 (l % 4) and the next of row l / 4."""
        raise NotImplementedError

    def warp_max(self, a: Value) -> Value:
        """Largest *unsigned* i32 of the warp, in every lane."""
        raise NotImplementedError

    def warp_barrier(self) -> None:
        raise NotImplementedError

    def barrier(self) -> None:
        raise NotImplementedError

    def when(self, condition: Value) -> Any:
        """Context: what is inside runs only where the condition, equal in all threads of a warp, holds. No `barrier` in it
        unless the condition is equal in all threads of the worker; no value made in it is used after it."""
        raise NotImplementedError

    # -- memory
    def at(self, array: Any, row: Value | int = 0, row_bytes: int = 1) -> Pointer:
        """Address of byte `row * row_bytes` of an array in global memory, in 64 bits."""
        raise NotImplementedError

    def shared(self, offset: Value | int = 0) -> Pointer:
        raise NotImplementedError

    def advance(self, pointer: Pointer, offset: Value) -> Pointer:
        raise NotImplementedError

    def load(self, pointer: Pointer, words: int = 1, when: Value | None = None) -> list[Value]:
        """1, 2 or 4 consecutive 32-bit words (aligned to their size). Lanes where `when` is false get 0 and read
        nothing."""
        raise NotImplementedError

    def load_small(self, pointer: Pointer, size: int, when: Value | None = None) -> Value:
        """One unsigned integer of `size` 1 or 2 bytes, widened to i32."""
        raise NotImplementedError

    def store(self, pointer: Pointer, words: list[Value], when: Value | None = None) -> None:
        raise NotImplementedError

    def store_half(self, pointer: Pointer, word: Value, when: Value | None = None) -> None:
        """Stores the low 16 bits of a word."""
        raise NotImplementedError

    def prefetch(self, pointer: Pointer, when: Value | None = None) -> None:
        """Asks for the 128 bytes around an address in global memory to be brought into the L2 cache."""
        raise NotImplementedError

    def copy_async(self, target: Pointer, source: Pointer, size: int = 16, when: Value | None = None) -> None:
        """Starts a copy of 8 or 16 bytes from global to shared memory; the thread that asked may read them after
        `copies_done`. Lanes where `when` is false copy nothing."""
        raise NotImplementedError

    def copies_done(self) -> None:
        """Waits for all copies this thread has started."""
        raise NotImplementedError

    # -- warp-level matrix products, fragments as in the PTX manual
    def mma_s8(self, acc: list[Value], a: list[Value], b: list[Value]) -> list[Value]:
        """[16, 32] x [32, 8] of int8 into int32, exact."""
        raise NotImplementedError

    def mma_f16(self, acc: list[Value], a: list[Value], b: list[Value]) -> list[Value]:
        """[16, 16] x [16, 8] of fp16 into fp32; with two registers of `a` and one of `b`, [16, 8] x [8, 8]."""
        raise NotImplementedError

    # -- shorthands
    def abs(self, a: Value) -> Value:
        return self.unary("abs", a)

    def sqrt(self, a: Value) -> Value:
        """To two units in the last place."""
        return self.unary("sqrt", a)

    def reciprocal(self, a: Value) -> Value:
        """1 / a to one unit in the last place; subnormals count as zero, here and in the two functions below."""
        return self.unary("reciprocal", a)

    def reciprocal_sqrt(self, a: Value) -> Value:
        """1 / sqrt(a) to two units in the last place."""
        return self.unary("reciprocal_sqrt", a)

    def maximum(self, a: Value, b: Value | Number) -> Value:
        """Larger fp32; NaN if either is."""
        return self.binary("max", a, self.value(b, a.kind))

    def minimum(self, a: Value, b: Value | Number) -> Value:
        return self.binary("min", a, self.value(b, a.kind))

    def bits(self, a: Value) -> Value:
        """The i32 with an f32's bits."""
        return self.unary("bits", a)

    def from_bits(self, a: Value) -> Value:
        return self.unary("from_bits", a)

    def floats(self, words: list[Value]) -> list[Value]:
        return [self.from_bits(w) for w in words]

    def to_float(self, a: Value) -> Value:
        """i32 (signed) to f32."""
        return self.unary("to_float", a)

    def round_to_int(self, a: Value) -> Value:
        """Nearest i32, ties to even; NaN gives 0."""
        return self.unary("round_to_int", a)

    def unpack_half(self, word: Value) -> tuple[Value, Value]:
        """The two fp16 of a word, (low, high), as f32."""
        return self.unary("half_low", word), self.unary("half_high", word)

    def pack_half(self, low: Value, high: Value) -> Value:
        """Two f32 rounded to fp16 (nearest even) in one word."""
        return self.binary("pack_half", low, high)

    def pack_half_down(self, low: Value, high: Value) -> Value:
        """Two f32 rounded to fp16 towards zero in one word."""
        return self.binary("pack_half_down", low, high)

    def unpack_bfloat(self, word: Value) -> tuple[Value, Value]:
        return self.from_bits(word << 16), self.from_bits(word & -65536)

    def exp(self, a: Value) -> Value:
        """e^a to about one unit in the last place: 2^y with y = a log2(e) split in two."""
        y = a * 1.4426950408889634
        rest = self.fma(a, 1.4426950408889634, y * -1.0)  # exact: what rounding y dropped
        rest = self.fma(a, 1.925963033500692e-08, rest)  # log2(e) - fp32(log2(e))
        power = self.unary("exp2", y)
        return self.fma(power, rest * 0.6931471805599453, power)

    def all_sum(self, a: Value, masks: tuple[int, ...]) -> Value:
        """Sum over the lanes reached by xor with `masks`, in each of them."""
        for mask in masks:
            a = a + self.shuffle_xor(a, mask)
        return a

    def scatter_sum(self, values: list[Value], masks: tuple[int, ...]) -> list[Value]:
        """Sums each of `values` over the lanes reached by `masks`, leaving 1 / 2^len(masks) of the sums in each lane.

        A lane whose index has bit `masks[0]` keeps the second half of the list, and so on: half the shuffles of
        `all_sum` for every halving.
        """
        for mask in masks:
            half = len(values) // 2
            upper = (self.thread & mask).differs(0)
            kept = [self.select(upper, b, a) for a, b in zip(values[:half], values[half:], strict=True)]
            sent = [self.select(upper, a, b) for a, b in zip(values[:half], values[half:], strict=True)]
            values = [k + self.shuffle_xor(s, mask) for k, s in zip(kept, sent, strict=True)]
        return values

    def scatter_max(self, values: list[Value], masks: tuple[int, ...]) -> list[Value]:
        """`scatter_sum` with the larger value (NaN wins) in place of the sum."""
        for mask in masks:
            half = len(values) // 2
            upper = (self.thread & mask).differs(0)
            kept = [self.select(upper, b, a) for a, b in zip(values[:half], values[half:], strict=True)]
            sent = [self.select(upper, a, b) for a, b in zip(values[:half], values[half:], strict=True)]
            values = [self.maximum(k, self.shuffle_xor(s, mask)) for k, s in zip(kept, sent, strict=True)]
        return values
