"""Runs a lane program on a CPU: all threads of one worker in lock step, one NumPy array per register."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallas_kernels.lanes.value import Lanes, Number, Pointer, Value

_TYPES = {"f32": np.float32, "i32": np.int32, "i64": np.int64, "i1": np.bool_}


def emulate(
    program: Callable[..., None], arrays: Sequence[np.ndarray], *, workers: int, threads: int, shared_bytes: int
) -> None:
    """Runs `program(lanes, *arrays)` once per worker, writing into `arrays` (C-contiguous) in place."""
    for worker in range(workers):
        lanes = EmulatedLanes(worker, workers, threads, shared_bytes)
        with np.errstate(all="ignore"):
            program(lanes, *arrays)


class _SharedRaces:
    """Finds missing barriers: a byte of shared memory that two threads touch, one of them writing, without one between.

    Lock step would hide them. Between two warps only `barrier` orders accesses, between lanes of a warp also
    `warp_barrier`; each byte remembers who wrote and who read it last, and in which interval between barriers.
    """

    def __init__(self, size: int, threads: int):
        self._thread = np.arange(threads)[:, None]
        self._block_interval, self._warp_interval = 0, 0
        self._last = {
            kind: {name: np.full(size, -1) for name in ("thread", "block", "warp")} for kind in ("write", "read")
        }

    def barrier(self) -> None:
        self._block_interval += 1
        self._warp_interval += 1

    def warp_barrier(self) -> None:
        self._warp_interval += 1

    def touch(self, mask: np.ndarray, address: np.ndarray, writes: bool) -> None:
        thread = np.broadcast_to(self._thread, address.shape)[mask]
        address = address[mask]
        for kind in ("write", "read") if writes else ("write",):
            last = {name: values[address] for name, values in self._last[kind].items()}
            same_warp = last["thread"] // 32 == thread // 32
            unordered = np.where(same_warp, last["warp"] == self._warp_interval, last["block"] == self._block_interval)
            if np.any(unordered & (last["thread"] >= 0) & (last["thread"] != thread)):
                raise RuntimeError(
                    f"race in shared memory: {'written' if writes else 'read'} after a {kind}, no barrier"
                )
        record = self._last["write" if writes else "read"]
        for name, value in (("thread", thread), ("block", self._block_interval), ("warp", self._warp_interval)):
            record[name][address] = value


class EmulatedLanes(Lanes):
    """Lane semantics on NumPy. Shared memory starts as NaN patterns, so that a read of nothing shows."""

    def __init__(self, worker: int, workers: int, threads: int, shared_bytes: int):
        self.threads, self._worker, self.workers = threads, worker, workers
        self._mask = np.ones(threads, np.bool_)
        self._shared = np.full(max(shared_bytes, 4), 0xFF, np.uint8)
        self._races = _SharedRaces(self._shared.size, threads)
        self._copies: list[Callable[[], None]] = []
        self._lane = np.arange(threads) % 32
        self._warp = np.arange(threads) // 32 * 32
        self.thread = Value(self, "i32", np.arange(threads, dtype=np.int32))

    def thread_of(self, item: Value) -> Value:
        return self.thread

    def for_items(
        self,
        count: int | Value,
        start: Callable[[Value], list[Value]],
        body: Callable[[Value, list[Value]], list[Value]],
    ) -> None:
        count = count if isinstance(count, int) else int(count.data[0])
        carried = start(self.constant(self._worker, "i32"))
        for item in range(self._worker, count, self.workers):
            carried = body(self.constant(item, "i32"), carried)

    def constant(self, x: Number, kind: str) -> Value:
        if kind == "i32" and not -(2**31) <= int(x) < 2**31:
            x = (int(x) + 2**31) % 2**32 - 2**31
        return Value(self, kind, np.full(self.threads, x, _TYPES[kind]))

    def binary(self, op: str, a: Value, b: Value) -> Value:
        x, y = a.data, b.data
        unsigned = {"i32": np.uint32, "i64": np.uint64}.get(a.kind)
        match op:
            case "add" | "sub" | "mul" | "lt" | "le" | "gt" | "ge" | "eq" | "ne":
                names = dict(add="add", sub="subtract", mul="multiply", lt="less", le="less_equal", gt="greater",
                             ge="greater_equal", eq="equal", ne="not_equal")  # fmt: skip
                data = getattr(np, names[op])(x, y)
            case "max" | "min":
                data = (np.maximum if op == "max" else np.minimum)(x, y)
            case "div" | "rem":
                data = (np.floor_divide if op == "div" else np.remainder)(x.view(unsigned), y.view(unsigned)).view(
                    x.dtype
                )
            case "and" | "or" | "xor":
                data = getattr(np, {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}[op])(x, y)
            case "shl":
                data = (x.view(unsigned) << y.view(unsigned)).view(x.dtype)
            case "shr":
                data = (x.view(unsigned) >> y.view(unsigned)).view(x.dtype)
            case "pack_half" | "pack_half_down":
                low, high = (z.astype(np.float16) for z in (x, y))
                if op == "pack_half_down":
                    low, high = (
                        np.where(np.abs(h.astype(np.float32)) > np.abs(z), np.nextafter(h, np.float16(0)), h)
                        for h, z in ((low, x), (high, y))
                    )
                low, high = (z.view(np.uint16).astype(np.uint32) for z in (low, high))
                return Value(self, "i32", (low | (high << np.uint32(16))).view(np.int32))
            case "sub_half":
                return Value(self, "i32", (x.view(np.float16) - y.view(np.float16)).view(np.int32))
            case _:
                raise NotImplementedError(op)
        return Value(self, "i1" if data.dtype == np.bool_ else a.kind, data)

    def unary(self, op: str, a: Value) -> Value:
        x = a.data
        match op:
            case "abs":
                return Value(self, "f32", np.abs(x))
            case "sqrt":
                return Value(self, "f32", np.sqrt(x))
            case "reciprocal":
                return Value(self, "f32", np.float32(1) / x)
            case "reciprocal_sqrt":
                return Value(self, "f32", np.float32(1) / np.sqrt(x))
            case "exp2":
                return Value(self, "f32", np.exp2(x))
            case "bits":
                return Value(self, "i32", x.view(np.int32))
            case "from_bits":
                return Value(self, "f32", x.view(np.float32))
            case "to_float":
                return Value(self, "f32", x.astype(np.float32))
            case "round_to_int":
                return Value(
                    self, "i32", np.nan_to_num(np.rint(x), nan=0.0).clip(-(2.0**31), 2.0**31 - 129).astype(np.int32)
                )
            case "half_low" | "half_high":
                halves = x.view(np.float16).reshape(-1, 2)[:, 0 if op == "half_low" else 1]
                return Value(self, "f32", halves.astype(np.float32))
            case "widen":
                return Value(self, "i64", x.view(np.uint32).astype(np.int64))
        raise NotImplementedError(op)

    def fma(self, a: Value, b: Value | Number, c: Value | Number) -> Value:
        b, c = self.value(b, "f32"), self.value(c, "f32")
        wide = a.data.astype(np.float64) * b.data.astype(np.float64) + c.data.astype(np.float64)
        return Value(self, "f32", wide.astype(np.float32))

    def select(self, condition: Value, a: Value | Number, b: Value | Number) -> Value:
        kind = a.kind if isinstance(a, Value) else b.kind if isinstance(b, Value) else "f32"
        a, b = self.value(a, kind), self.value(b, kind)
        return Value(self, kind, np.where(condition.data, a.data, b.data))

    def permute_bytes(self, a: Value, b: Value, selector: Value | int) -> Value:
        pool = np.concatenate([a.data.view(np.uint8).reshape(-1, 4), b.data.view(np.uint8).reshape(-1, 4)], axis=1)
        digits = self.value(selector).data
        picks = np.stack([(digits >> (4 * i)) & 7 for i in range(4)], axis=1)
        return Value(self, "i32", np.ascontiguousarray(np.take_along_axis(pool, picks, axis=1)).view(np.int32)[:, 0])

    def shuffle_xor(self, a: Value, mask: int) -> Value:
        return Value(self, a.kind, a.data[self._warp + (self._lane ^ mask)])

    def shuffle(self, a: Value, source: Value | int) -> Value:
        return Value(self, a.kind, a.data[self._warp + self.value(source).data % 32])

    def transpose_halves(self, word: Value) -> Value:
        blocks = word.data.view(np.uint16).reshape(-1, 8, 8)
        turned = np.ascontiguousarray(blocks.transpose(0, 2, 1)).reshape(-1, 2)
        return Value(self, "i32", turned.view(np.int32)[:, 0])

    def warp_max(self, a: Value) -> Value:
        per_warp = a.data.view(np.uint32).reshape(-1, 32).max(axis=1, keepdims=True)
        return Value(
            self, "i32", np.ascontiguousarray(np.broadcast_to(per_warp, (per_warp.size, 32))).reshape(-1).view(np.int32)
        )

    def warp_barrier(self) -> None:
        self._races.warp_barrier()

    def barrier(self) -> None:
        if not self._mask.all():
            raise RuntimeError("a barrier that some threads of the worker do not reach")
        self._races.barrier()

    @contextlib.contextmanager
    def when(self, condition: Value):
        if any(len(np.unique(warp)) != 1 for warp in condition.data.reshape(-1, 32)):
            raise ValueError("the condition of lanes.when differs between threads of a warp")
        saved = self._mask
        self._mask = saved & condition.data
        yield
        self._mask = saved

    def at(self, array: Any, row: Value | int = 0, row_bytes: int = 1) -> Pointer:
        if isinstance(row, int):
            return Pointer(self, array, np.full(self.threads, row * row_bytes, np.int64))
        return Pointer(self, array, row.data.astype(np.int64) * row_bytes)

    def shared(self, offset: Value | int = 0) -> Pointer:
        return Pointer(self, None, self.value(offset).data.astype(np.int64))

    def advance(self, pointer: Pointer, offset: Value) -> Pointer:
        return Pointer(self, pointer.array, pointer.base + offset.data, pointer.offset)

    def _bytes(
        self, pointer: Pointer, size: int, when: Value | None, writes: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        memory = self._shared if pointer.array is None else pointer.array.reshape(-1).view(np.uint8)
        mask = self._mask if when is None else self._mask & when.data
        address = np.where(mask, pointer.base + pointer.offset, 0)
        if np.any(address % size) or np.any(address < 0) or np.any(address + size > memory.size):
            raise IndexError(f"address out of bounds or not aligned to {size} bytes")
        address = address[:, None] + np.arange(size)
        if pointer.array is None:
            self._races.touch(mask, address, writes)
        return memory, mask, address

    def load(self, pointer: Pointer, words: int = 1, when: Value | None = None) -> list[Value]:
        memory, mask, address = self._bytes(pointer, 4 * words, when)
        loaded = np.where(mask[:, None], memory[address].view(np.int32), 0)
        return [Value(self, "i32", np.ascontiguousarray(loaded[:, i])) for i in range(words)]

    def load_small(self, pointer: Pointer, size: int, when: Value | None = None) -> Value:
        memory, mask, address = self._bytes(pointer, size, when)
        loaded = memory[address].view({1: np.uint8, 2: np.uint16}[size])[:, 0]
        return Value(self, "i32", np.where(mask, loaded, 0).astype(np.int32))

    def store(self, pointer: Pointer, words: list[Value], when: Value | None = None) -> None:
        memory, mask, address = self._bytes(pointer, 4 * len(words), when, writes=True)
        data = np.ascontiguousarray(np.stack([w.data.view(np.int32) for w in words], axis=1)).view(np.uint8)
        memory[address[mask]] = data[mask]

    def store_half(self, pointer: Pointer, word: Value, when: Value | None = None) -> None:
        memory, mask, address = self._bytes(pointer, 2, when, writes=True)
        memory[address[mask]] = word.data.view(np.uint8).reshape(-1, 4)[mask, :2]

    def prefetch(self, pointer: Pointer, when: Value | None = None) -> None:
        self._bytes(pointer, 1, when)  # in bounds?

    def copy_async(self, target: Pointer, source: Pointer, size: int = 16, when: Value | None = None) -> None:
        words = self.load(source, size // 4, when=when)
        self.store(target, [self.constant(-1, "i32")] * (size // 4), when=when)  # not there yet
        self._copies.append(lambda: self.store(target, words, when=when))

    def copies_done(self) -> None:
        for copy in self._copies:
            copy()
        self._copies = []

    def _mma(self, acc: list[Value], a: np.ndarray, b: np.ndarray, kind: str) -> list[Value]:
        """a [4 or 2 registers, threads, n], b [2 or 1, threads, n], n elements per register, in the PTX fragment order."""
        per, wide = a.shape[-1], np.float64 if kind == "f32" else np.int64
        halves = len(b)  # of the summation index
        a, b = a.astype(wide).reshape(2 * halves, -1, 8, 4, per), b.astype(wide).reshape(halves, -1, 8, 4, per)
        lhs = np.zeros((a.shape[1], 16, 4 * halves * per), wide)
        rhs = np.zeros((a.shape[1], 4 * halves * per, 8), wide)
        for i in range(2 * halves):  # register i: rows +8 for odd i, k + half for i >= 2
            lhs[:, 8 * (i % 2) : 8 * (i % 2) + 8, 4 * per * (i // 2) : 4 * per * (i // 2 + 1)] = a[i].reshape(
                -1, 8, 4 * per
            )
        for i in range(halves):
            rhs[:, 4 * per * i : 4 * per * (i + 1)] = b[i].reshape(-1, 8, 4 * per).transpose(0, 2, 1)
        product = np.einsum("wmk,wkn->wmn", lhs, rhs).reshape(-1, 2, 8, 4, 2)
        out = [product[:, i // 2, :, :, i % 2].reshape(-1) for i in range(4)]
        return [Value(self, kind, (c.data + o).astype(_TYPES[kind])) for c, o in zip(acc, out, strict=True)]

    def mma_s8(self, acc: list[Value], a: list[Value], b: list[Value]) -> list[Value]:
        fragments = [np.stack([x.data.view(np.int8).reshape(-1, 4) for x in xs]) for xs in (a, b)]
        return self._mma(acc, fragments[0], fragments[1], "i32")

    def mma_f16(self, acc: list[Value], a: list[Value], b: list[Value]) -> list[Value]:
        fragments = [np.stack([x.data.view(np.float16).reshape(-1, 2) for x in xs]) for xs in (a, b)]
        return self._mma(acc, fragments[0], fragments[1], "f32")
