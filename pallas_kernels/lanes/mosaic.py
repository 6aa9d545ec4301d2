"""Emits a lane program as MLIR inside a Mosaic GPU kernel body.

Memory operations are volatile inline PTX: LLVM keeps their order, so a program issues its loads where it says, and all
of them before the first wait. Everything else is ordinary LLVM arithmetic without fast-math flags.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, math, scf

from pallas_kernels.lanes.value import Lanes, Number, Pointer, Value

_COMPARE_INT = dict(eq=0, ne=1, lt=2, le=3, gt=4, ge=5)  # signed predicates of arith.cmpi
_COMPARE_FLOAT = dict(eq=1, gt=2, ge=3, lt=4, le=5, ne=13)  # ordered predicates (ne: unordered) of arith.cmpf
_VECTOR = {1: "", 2: ".v2", 4: ".v4"}


class MosaicLanes(Lanes):
    """Lane semantics on Mosaic GPU. Make one inside `plgpu.inline_mgpu`, in Lane lowering semantics."""

    def __init__(self, threads: int, blocks: int, workers_per_block: int, shared_bytes: int, shared_ref: Any):
        self.threads = threads
        self.workers = blocks * workers_per_block
        self._types = {
            "f32": ir.F32Type.get(), "i32": ir.IntegerType.get_signless(32),
            "i64": ir.IntegerType.get_signless(64), "i1": ir.IntegerType.get_signless(1),
        }  # fmt: skip
        i32 = self._types["i32"]
        self._void = ir.Type.parse("!llvm.void")
        thread = Value(self, "i32", utils.thread_idx())
        block = Value(self, "i32", arith.index_cast(i32, gpu.block_id(gpu.Dimension.x)))
        inside = utils.warp_idx()  # made uniform over the warp, so that branches on it are
        inside = Value(self, "i32", inside) // (threads // 32)
        self.thread = thread if workers_per_block == 1 else thread - inside * threads
        self._worker = block * workers_per_block + inside
        self._barrier = inside + 1  # 0 belongs to the whole block
        base = llvm.ptrtoint(i32, utils.memref_ptr(shared_ref))
        self._shared_base = (Value(self, "i32", base) + inside * shared_bytes).data

    def _asm(
        self, text: str, operands: list[Any], constraints: str, results: int, kind: str = "i32", pure: bool = False
    ):
        """Inline PTX with `results` registers of one kind; a pure one may be moved, merged or dropped."""
        result_type = self._types[kind]
        ty = (
            self._void
            if results == 0
            else result_type
            if results == 1
            else llvm.StructType.get_literal([result_type] * results)
        )
        out = llvm.inline_asm(ty, operands, text, constraints, has_side_effects=not pure)
        if results <= 1:
            return [] if results == 0 else [Value(self, kind, out)]
        return [Value(self, kind, llvm.extractvalue(result_type, out, [i])) for i in range(results)]

    def constant(self, x: Number, kind: str) -> Value:
        ty = self._types[kind]
        if kind == "f32":
            return Value(self, kind, arith.constant(ty, ir.FloatAttr.get(ty, float(x))))
        if kind == "i32":
            x = (int(x) + 2**31) % 2**32 - 2**31
        return Value(self, kind, arith.constant(ty, ir.IntegerAttr.get(ty, int(x))))

    def binary(self, op: str, a: Value, b: Value) -> Value:
        x, y, kind = a.data, b.data, a.kind
        if op in ("pack_half", "pack_half_down"):
            rounding = "rn" if op == "pack_half" else "rz"
            return self._asm(f"cvt.{rounding}.f16x2.f32 $0, $2, $1;", [x, y], "=r,f,f", 1, pure=True)[0]
        if op == "sub_half":
            return self._asm("sub.rn.f16x2 $0, $1, $2;", [x, y], "=r,r,r", 1, pure=True)[0]
        if op in _COMPARE_INT:
            compare, codes = (arith.cmpf, _COMPARE_FLOAT) if kind == "f32" else (arith.cmpi, _COMPARE_INT)
            code = ir.IntegerAttr.get(self._types["i64"], codes[op])
            return Value(self, "i1", compare(code, x, y))
        if kind == "f32":
            table = dict(add=arith.addf, sub=arith.subf, mul=arith.mulf, max=arith.maximumf, min=arith.minimumf)
        else:
            table = dict(add=arith.addi, sub=arith.subi, mul=arith.muli, div=arith.divui, rem=arith.remui, shl=arith.shli,
                         shr=arith.shrui, xor=arith.xori, max=arith.maxsi, min=arith.minsi)  # fmt: skip
            table |= {"and": arith.andi, "or": arith.ori}
        return Value(self, kind, table[op](x, y))

    def unary(self, op: str, a: Value) -> Value:
        x, f32, i32 = a.data, self._types["f32"], self._types["i32"]
        match op:
            case "abs":
                return Value(self, "f32", math.absf(x))
            case "sqrt" | "reciprocal" | "reciprocal_sqrt" | "exp2":
                name = {
                    "sqrt": "sqrt.approx.ftz",
                    "reciprocal": "rcp.approx.ftz",
                    "reciprocal_sqrt": "rsqrt.approx.ftz",
                }
                text = f"{name.get(op, 'ex2.approx')}.f32 $0, $1;"
                return self._asm(text, [x], "=f,f", 1, "f32", pure=True)[0]
            case "bits":
                return Value(self, "i32", arith.bitcast(i32, x))
            case "from_bits":
                return Value(self, "f32", arith.bitcast(f32, x))
            case "to_float":
                return Value(self, "f32", arith.sitofp(f32, x))
            case "round_to_int":
                return self._asm("cvt.rni.s32.f32 $0, $1;", [x], "=r,f", 1, pure=True)[0]
            case "half_low" | "half_high":
                pick = "{h, t}" if op == "half_low" else "{t, h}"
                text = "{ .reg .b16 h, t; mov.b32 " + pick + ", $1; cvt.f32.f16 $0, h; }"
                return self._asm(text, [x], "=f,r", 1, "f32", pure=True)[0]
            case "widen":
                return Value(self, "i64", arith.extui(self._types["i64"], x))
        raise NotImplementedError(op)

    def fma(self, a: Value, b: Value | Number, c: Value | Number) -> Value:
        return Value(self, "f32", math.fma(a.data, self.value(b, "f32").data, self.value(c, "f32").data))

    def select(self, condition: Value, a: Value | Number, b: Value | Number) -> Value:
        kind = a.kind if isinstance(a, Value) else b.kind if isinstance(b, Value) else "f32"
        return Value(self, kind, arith.select(condition.data, self.value(a, kind).data, self.value(b, kind).data))

    def permute_bytes(self, a: Value, b: Value, selector: Value | int) -> Value:
        operands = [a.data, b.data, self.value(selector).data]
        return self._asm("prmt.b32 $0, $1, $2, $3;", operands, "=r,r,r,r", 1, pure=True)[0]

    def _shuffle(self, mode: str, a: Value, amount: Value) -> Value:
        letter = "f" if a.kind == "f32" else "r"
        text = f"shfl.sync.{mode}.b32 $0, $1, $2, 31, 0xffffffff;"
        return self._asm(text, [a.data, amount.data], f"={letter},{letter},r", 1, a.kind)[0]

    def shuffle_xor(self, a: Value, mask: int) -> Value:
        return self._shuffle("bfly", a, self.value(mask))

    def shuffle(self, a: Value, source: Value | int) -> Value:
        return self._shuffle("idx", a, self.value(source))

    def transpose_halves(self, word: Value) -> Value:
        text = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
        return self._asm(text, [word.data], "=r,r", 1)[0]

    def warp_max(self, a: Value) -> Value:
        return self._asm("redux.sync.max.u32 $0, $1, 0xffffffff;", [a.data], "=r,r", 1)[0]

    def warp_barrier(self) -> None:
        self._asm("bar.warp.sync 0xffffffff;", [], "", 0)

    def barrier(self) -> None:
        self._asm(f"bar.sync $0, {self.threads};", [self._barrier.data], "r", 0)

    def thread_of(self, item: Value) -> Value:
        [opaque] = self._asm("mov.b32 $0, $1;", [item.data], "=r,r", 1)
        return self.thread + (opaque >> 31)  # items are not negative

    def for_items(
        self,
        count: int | Value,
        start: Callable[[Value], list[Value]],
        body: Callable[[Value, list[Value]], list[Value]],
    ) -> None:
        first = self._worker
        carried = start(first)
        if isinstance(count, int) and self.workers >= count:  # at most one item each
            with self.when(first < count):
                body(first, carried)
            return
        stop, step = self.value(count, "i32").data, self.constant(self.workers, "i32").data
        loop = scf.ForOp(first.data, stop, step, [x.data for x in carried])
        with ir.InsertionPoint(loop.body):
            item = Value(self, "i32", loop.induction_variable)
            inner = [Value(self, x.kind, data) for x, data in zip(carried, loop.inner_iter_args, strict=True)]
            scf.yield_([x.data for x in body(item, inner)])

    @contextlib.contextmanager
    def when(self, condition: Value):
        branch = scf.IfOp(condition.data)
        with ir.InsertionPoint(branch.then_block):
            yield
            scf.yield_([])

    def at(self, array: Any, row: Value | int = 0, row_bytes: int = 1) -> Pointer:
        i64 = self._types["i64"]
        base = llvm.ptrtoint(i64, utils.memref_ptr(array))
        if isinstance(row, int):
            return Pointer(self, array, base, row * row_bytes)
        wide = row if row.kind == "i64" else self.unary("widen", row)
        return Pointer(self, array, arith.addi(base, (wide * row_bytes).data))

    def shared(self, offset: Value | int = 0) -> Pointer:
        if isinstance(offset, int):
            return Pointer(self, None, self._shared_base, offset)
        return Pointer(self, None, arith.addi(self._shared_base, offset.data))

    def advance(self, pointer: Pointer, offset: Value) -> Pointer:
        data = offset.data if pointer.array is None else self.unary("widen", offset).data
        return Pointer(self, pointer.array, arith.addi(pointer.base, data), pointer.offset)

    def _address(self, pointer: Pointer) -> tuple[str, str]:
        """(state space, constraint of the address operand)."""
        return ("shared", "r") if pointer.array is None else ("global", "l")

    def load(self, pointer: Pointer, words: int = 1, when: Value | None = None) -> list[Value]:
        space, letter = self._address(pointer)
        outs = ["$" + str(i) for i in range(words)]
        target = outs[0] if words == 1 else "{" + ",".join(outs) + "}"
        text = f"ld.{space}{_VECTOR[words]}.b32 {target}, [${words}+{pointer.offset}];"
        if when is None:
            return self._asm(text, [pointer.base], ",".join(["=r"] * words + [letter]), words)
        zeros = " ".join(f"mov.b32 {o}, 0;" for o in outs)
        text = f"{zeros} @${words + 1} {text}"
        constraints = ",".join(["=&r"] * words + [letter, "b"])
        return self._asm(text, [pointer.base, when.data], constraints, words)

    def load_small(self, pointer: Pointer, size: int, when: Value | None = None) -> Value:
        space, letter = self._address(pointer)
        text = f"ld.{space}.{ {1: 'u8', 2: 'u16'}[size] } $0, [$1+{pointer.offset}];"
        if when is None:
            return self._asm(text, [pointer.base], f"=r,{letter}", 1)[0]
        return self._asm(f"mov.b32 $0, 0; @$2 {text}", [pointer.base, when.data], f"=&r,{letter},b", 1)[0]

    def _store(
        self, pointer: Pointer, what: str, operands: list[Any], constraints: list[str], when: Value | None
    ) -> None:
        space, letter = self._address(pointer)
        text = what.format(space=space, address=f"[$0+{pointer.offset}]")
        guard = "" if when is None else f"@${len(operands) + 1} "
        tail = [] if when is None else [when.data]
        letters = ",".join([letter, *constraints, *(["b"] if when is not None else [])])
        self._asm(guard + text, [pointer.base, *operands, *tail], letters, 0)

    def store(self, pointer: Pointer, words: list[Value], when: Value | None = None) -> None:
        names = ["$" + str(i + 1) for i in range(len(words))]
        source = names[0] if len(words) == 1 else "{{" + ",".join(names) + "}}"
        what = "st.{space}" + _VECTOR[len(words)] + ".b32 {address}, " + source + ";"
        letters = ["f" if w.kind == "f32" else "r" for w in words]
        self._store(pointer, what, [w.data for w in words], letters, when)

    def store_half(self, pointer: Pointer, word: Value, when: Value | None = None) -> None:
        i16 = ir.IntegerType.get_signless(16)
        self._store(pointer, "st.{space}.b16 {address}, $1;", [arith.trunci(i16, word.data)], ["h"], when)

    def prefetch(self, pointer: Pointer, when: Value | None = None) -> None:
        text = f"prefetch.global.L2 [$0+{pointer.offset}];"
        if when is None:
            self._asm(text, [pointer.base], "l", 0)
        else:
            self._asm("@$1 " + text, [pointer.base, when.data], "l,b", 0)

    def copy_async(self, target: Pointer, source: Pointer, size: int = 16, when: Value | None = None) -> None:
        way = "cg" if size == 16 else "ca"  # only 16 bytes at a time can go around the L1 cache
        text = f"cp.async.{way}.shared.global.L2::128B [$0+{target.offset}], [$1+{source.offset}], {size};"
        if when is None:
            self._asm(text, [target.base, source.base], "r,l", 0)
        else:
            self._asm("@$2 " + text, [target.base, source.base, when.data], "r,l,b", 0)

    def copies_done(self) -> None:
        self._asm("cp.async.wait_all;", [], "", 0)

    def _mma(self, shape: str, kind: str, acc: list[Value], a: list[Value], b: list[Value]) -> list[Value]:
        letter = "f" if kind == "f32" else "r"
        names = ["$" + str(i) for i in range(8 + len(a) + len(b))]
        groups = (names[:4], names[4 : 4 + len(a)], names[4 + len(a) : -4], names[-4:])
        text = f"mma.sync.aligned.{shape} " + ", ".join("{" + ",".join(group) + "}" for group in groups) + ";"
        constraints = ",".join([f"={letter}"] * 4 + ["r"] * (len(a) + len(b)) + [letter] * 4)
        return self._asm(text, [x.data for x in (*a, *b, *acc)], constraints, 4, kind)

    def mma_s8(self, acc: list[Value], a: list[Value], b: list[Value]) -> list[Value]:
        return self._mma("m16n8k32.row.col.s32.s8.s8.s32", "i32", acc, a, b)

    def mma_f16(self, acc: list[Value], a: list[Value], b: list[Value]) -> list[Value]:
        return self._mma(f"m16n8k{8 * len(b)}.row.col.f32.f16.f16.f32", "f32", acc, a, b)
