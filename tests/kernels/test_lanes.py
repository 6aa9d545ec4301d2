"""The emulator itself: what the other tests rely on."""

import numpy as np
import pytest

from pallas_kernels.lanes import EmulatedLanes, emulate


def lanes(threads: int = 32) -> EmulatedLanes:
    return EmulatedLanes(worker=0, workers=1, threads=threads, shared_bytes=1024)


def test_fp16_product_has_the_fragments_of_the_ptx_manual() -> None:
    random = np.random.default_rng(0)
    a, b = random.integers(-8, 8, (16, 16)), random.integers(-8, 8, (16, 8))
    machine = lanes()
    group, quad = np.arange(32) // 4, np.arange(32) % 4

    def pack(low: np.ndarray, high: np.ndarray):
        value = lambda x: machine.from_bits(type(machine.thread)(machine, "i32", x.astype(np.float32).view(np.int32)))  # noqa: E731
        return machine.pack_half(value(low), value(high))

    lhs = [pack(a[group + r, 2 * quad + c], a[group + r, 2 * quad + 1 + c]) for c in (0, 8) for r in (0, 8)]
    rhs = [pack(b[2 * quad + c, group], b[2 * quad + 1 + c, group]) for c in (0, 8)]
    out = machine.mma_f16([machine.constant(0.0, "f32")] * 4, lhs, rhs)
    product = a @ b
    for i, register in enumerate(out):
        np.testing.assert_array_equal(register.data, product[group + 8 * (i // 2), 2 * quad + i % 2])
    short = machine.mma_f16([machine.constant(0.0, "f32")] * 4, lhs[:2], rhs[:1])
    for i, register in enumerate(short):
        np.testing.assert_array_equal(register.data, (a[:, :8] @ b[:8])[group + 8 * (i // 2), 2 * quad + i % 2])
    turned = machine.transpose_halves(lhs[0])
    np.testing.assert_array_equal(machine.unpack_half(turned)[1].data, a[2 * quad + 1, group])


def test_int8_product_has_the_fragments_of_the_ptx_manual() -> None:
    random = np.random.default_rng(0)
    a, b = random.integers(-128, 128, (16, 32)).astype(np.int8), random.integers(-128, 128, (32, 8)).astype(np.int8)
    machine = lanes()
    group, quad = np.arange(32) // 4, np.arange(32) % 4

    def word(rows: np.ndarray):
        return type(machine.thread)(machine, "i32", np.ascontiguousarray(rows).view(np.int32)[:, 0])

    columns = 4 * quad[:, None] + np.arange(4)
    lhs = [word(a[(group + r)[:, None], columns + c]) for c in (0, 16) for r in (0, 8)]
    rhs = [word(b[columns + c, group[:, None]]) for c in (0, 16)]
    out = machine.mma_s8([machine.constant(0, "i32")] * 4, lhs, rhs)
    product = a.astype(int) @ b.astype(int)
    for i, register in enumerate(out):
        np.testing.assert_array_equal(register.data, product[group + 8 * (i // 2), 2 * quad + i % 2])


def test_permute_bytes_and_scatter_sum() -> None:
    machine = lanes()
    a, b = machine.constant(0x33221100, "i32"), machine.constant(0x77665544, "i32")
    assert machine.permute_bytes(a, b, 0x7250).data[0] == 0x77225500
    values = [machine.to_float(machine.thread + 100 * i) for i in range(4)]
    [total] = machine.scatter_sum(values, (16, 8))
    lane = np.arange(32)
    kept = 2 * (lane >> 4 & 1) + (lane >> 3 & 1)
    np.testing.assert_array_equal(total.data, 4 * 100 * kept + sum((lane & 7) + 8 * i for i in range(4)))


def exchange(machine: EmulatedLanes, *, barrier: bool) -> None:
    machine.store(machine.shared(machine.thread * 4), [machine.thread])
    if barrier:
        machine.barrier()
    machine.load(machine.shared((machine.threads - 1 - machine.thread) * 4))


def test_a_missing_barrier_is_found() -> None:
    emulate(lambda machine: exchange(machine, barrier=True), [], workers=1, threads=64, shared_bytes=256)
    with pytest.raises(RuntimeError, match="race"):
        emulate(lambda machine: exchange(machine, barrier=False), [], workers=1, threads=64, shared_bytes=256)


def test_out_of_bounds_and_unfinished_copies_are_found() -> None:
    array = np.zeros(4, np.float32)
    machine = lanes()
    with pytest.raises(IndexError):
        machine.load(machine.at(array) + machine.thread * 4)
    source = np.arange(128, dtype=np.int32)
    machine.copy_async(machine.shared(machine.thread * 16), machine.at(source) + machine.thread * 16)
    assert machine.load(machine.shared(machine.thread * 16))[0].data[5] == -1
    machine.copies_done()
    assert machine.load(machine.shared(machine.thread * 16))[0].data[5] == 20
