"""Times the Hopper kernels: append, fold, a whole window, and decode inside `lax.scan`.

    python -m experiments.bench_kernels --output_dir=results/kernels

One linear-attention layer of Qwen3.5-9B's shape (32 value heads, 16 key heads, 128 x 128), window 16, rank 4. Kernel times
come from CUPTI, every launch on a state that is not in the L2 cache: large batches do not fit, small ones are swept out
by reading other memory first. Written per card: results.json, README.md (tables) and roofline.png.

Peers: pass --peers_json with rows {"name", "batch", "ms"} from any benchmark of theirs on the same card, or
--peers_command with a command that writes such a file (its path is appended). Kernels of other projects are not part of
this repository.
"""

import dataclasses
import functools
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import leapquant_jax as lq
import pallas_kernels
from leapquant_jax.state import LeapState
from pallas_kernels.shapes import SHAPES

_OUTPUT_DIR = flags.DEFINE_string("output_dir", "results/kernels", "A folder named after the card is made in it.")
_BATCHES = flags.DEFINE_list("batches", ["512", "128", "32", "8", "1", "1024"], "Batch sizes.")
_SHAPE = flags.DEFINE_enum("shape", "qwen3.5-9b", list(SHAPES), "Which named shape.")
_METHOD = flags.DEFINE_enum("method", "leapquant-int8", ["leapquant-int8", "leapquant-int8-paper"], "Whose config.")
_WINDOWS = flags.DEFINE_integer("windows", 3, "Windows timed per batch.")
_SCAN = flags.DEFINE_bool("scan", True, "Also time decode inside lax.scan.")
_FOLD_LAUNCH = flags.DEFINE_list("fold_launch", None, "Blocks, workers per block instead of the tuning table.")
_PEERS_JSON = flags.DEFINE_string("peers_json", None, "Rows of other kernels measured on the same card.")
_PEERS_COMMAND = flags.DEFINE_string("peers_command", None, "Command that writes such rows to the path appended to it.")

_SWEEP = 1 << 28  # bytes read to clear the L2 cache
_IN_CACHE = 1 << 28  # states below this are swept out before each launch


def head_bytes(shape, fill: float) -> dict[str, float]:
    """Bytes per value head that one token must read and write with `fill` live records, and that a fold must."""
    heads, key_heads, k, v, rank, window = shape
    boundary = v * k + 4 * (k + v) + 2 * rank * (k + v)
    record = 2 * v + 8 + 2 * k * key_heads / heads
    token = 4 * (2 * k * key_heads / heads + 2 * v + 2)  # q, k, v, gate, strength and the output, fp32
    return {
        "append": boundary + fill * record + record + token,
        "fold": 2 * boundary + window * record,
    }


def make_state(shape, batch: int) -> tuple[lq.LeapConfig, LeapState, tuple]:
    """A random row, repeated: times do not depend on the data, and nothing large has to be drawn."""
    method = lq.get_method(_METHOD.value)
    assert isinstance(method, lq.LeapMethod)
    config = dataclasses.replace(method.config, rank=shape.rank, window=shape.window)
    random = np.random.default_rng(0)
    state = lq.init_state(
        config, batch=1, num_heads=shape.heads, num_key_heads=shape.key_heads, key_dim=shape.key_dim,
        value_dim=shape.value_dim,
    )  # fmt: skip

    def fill(x: jax.Array | None) -> jax.Array:
        assert x is not None
        if x.dtype == jnp.int8:
            return jnp.asarray(random.integers(-127, 128, x.shape), jnp.int8)
        return jnp.asarray(0.1 * random.standard_normal(x.shape), x.dtype)

    def normal(*size: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(size), jnp.float32)

    state = dataclasses.replace(
        state, codes=fill(state.codes), column_scales=jnp.abs(fill(state.column_scales)) * 0.01,
        compensator_keys=fill(state.compensator_keys), compensator_values=fill(state.compensator_values),
    )  # fmt: skip
    q, k = (lq.l2norm(normal(1, shape.key_heads, shape.key_dim)) for _ in range(2))
    token = (q * shape.key_dim**-0.5, k, normal(1, shape.heads, shape.value_dim),
             -jnp.exp(normal(1, shape.heads) - 3), jax.nn.sigmoid(normal(1, shape.heads)))  # fmt: skip
    repeat = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.repeat(x, batch, axis=0), tree))
    return config, *repeat((state, token))


class KernelTimer:
    """Collects (kernel name, milliseconds) of everything launched inside a `with`."""

    def __enter__(self):
        from jax.experimental.mosaic.gpu.profiler import mosaic_gpu_lib  # only on a machine with a GPU

        self._cupti = getattr(mosaic_gpu_lib, "_mosaic_gpu_ext")  # noqa: B009 (absent from its type)
        self._cupti._cupti_init()
        self.times: list[tuple[str, float]] = []
        return self

    def __exit__(self, *_) -> None:
        self.times = list(self._cupti._cupti_get_timings(True) or [])

    def of(self, name: str) -> list[float]:
        return [ms for kernel, ms in self.times if name in kernel]


@functools.cache
def compiled(config: lq.LeapConfig, batch: int):
    """(append, fold of the full rows) for one batch size."""
    del batch  # one jitted function per batch, so that its compiled programs can be dropped together
    append = jax.jit(functools.partial(pallas_kernels.append, config), donate_argnums=0)
    tuning = None
    if _FOLD_LAUNCH.value:
        tuning = pallas_kernels.Launch(*map(int, _FOLD_LAUNCH.value))

    def fold_full(state: LeapState) -> LeapState:
        return pallas_kernels.fold(config, state, state.position >= config.window, tuning=tuning)

    return append, jax.jit(fold_full, donate_argnums=0)


def bench_windows(shape, batch: int, windows: int, staggered: bool) -> dict:
    """Kernel times over whole windows: 16 appends and the fold that closes them, in order."""
    config, state, token = make_state(shape, batch)
    window = shape.window
    append, fold = compiled(config, batch)
    sweep = jax.jit(jnp.sum)
    other = jnp.ones((_SWEEP // 4,), jnp.int32)
    cold = lq.state_bytes(config, state)["total"] < _IN_CACHE
    if staggered:
        state = dataclasses.replace(state, position=jnp.arange(batch, dtype=jnp.int32) % window)

    def one_window(state: LeapState) -> LeapState:
        for t in range(window):
            if cold:
                sweep(other).block_until_ready()
            state, _ = append(state, *token)
            if staggered or t == window - 1:
                if cold:
                    sweep(other).block_until_ready()
                state = fold(state)
        return state

    state = jax.block_until_ready(one_window(state))
    with KernelTimer() as timer:
        for _ in range(windows):
            state = one_window(state)
        jax.block_until_ready(state)
    appends = np.array(timer.of("leapquant_append")).reshape(windows, window)
    folds = np.array(timer.of("leapquant_fold")).reshape(windows, -1)
    by_fill = np.median(appends, axis=0)
    ordinary = [ms for name, ms in timer.times if "leapquant" not in name and ms < 0.02]
    return {
        "append": float(by_fill.mean()),
        "append_by_fill": [float(x) for x in by_fill],
        "fold": float(np.median(folds)),
        "mean": float(by_fill.mean() + np.median(folds.sum(axis=1)) / window),
        "xla_around": float(sum(ordinary) / windows / window),
    }


def bench_scan(shape, batch: int, staggered: bool) -> float:
    """Milliseconds per token of `lq.decode`, everything included, state donated."""
    config, state, token = make_state(shape, batch)
    length = 4 * shape.window
    tokens = tuple(jnp.repeat(x[:, None], length, axis=1) for x in token)
    if staggered:
        state = dataclasses.replace(state, position=jnp.arange(batch, dtype=jnp.int32) % shape.window)
    decode = jax.jit(lambda s, *t: lq.decode(config, s, *t, implementation="mosaic_gpu"), donate_argnums=0)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        state, out = decode(state, *tokens)
        jax.block_until_ready((state, out))
        times.append((time.perf_counter() - start) / length * 1e3)
    return statistics.median(times[1:])


def ceilings() -> dict[str, float]:
    """Bytes per second of a plain read and a plain copy of 4 GiB."""
    x = jnp.ones((1 << 30,), jnp.int32)
    read, copy = jax.jit(lambda x: jnp.sum(x.reshape(-1, 1 << 14), axis=1)), jax.jit(lambda x: x + 1)
    rates = {}
    for name, function, size in (("read", read, 4 << 30), ("copy", copy, 8 << 30)):
        jax.block_until_ready(function(x))
        with KernelTimer() as timer:
            for _ in range(4):
                jax.block_until_ready(function(x))
        rates[name] = size / (min(ms for _, ms in timer.times if ms > 0.1) / 1e3)
    return rates


def table(rows: list[dict], columns: list[tuple[str, str, str]]) -> str:
    lines = ["| " + " | ".join(title for title, _, _ in columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [format(row[key], spec) if row.get(key) is not None else "-" for _, key, spec in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_report(folder: pathlib.Path, result: dict) -> None:
    shape, read = SHAPES[result["shape"]], result["ceilings"]["read"]
    columns = [
        ("batch", "batch", "d"), ("append, ms", "append", ".4f"), ("fold, ms", "fold", ".4f"),
        ("mean per token, ms", "mean", ".4f"), ("staggered, ms", "staggered_mean", ".4f"),
        ("in scan, ms", "scan", ".4f"), ("scan, staggered, ms", "staggered_scan", ".4f"),
        ("append half full, GB/s", "half_rate", ".0f"), ("of read rate", "half_share", ".0%"),
    ]  # fmt: skip
    text = [
        f"# Kernels on {result['card']}",
        f"{result['shape']}: {shape.heads} value heads, {shape.key_heads} key heads, {shape.key_dim} x {shape.value_dim}, "
        f"window {shape.window}, rank {shape.rank}, `{result['method']}`. jax {result['jax']}. "
        f"Read {read / 1e9:.0f} GB/s, "
        f"copy {result['ceilings']['copy'] / 1e9:.0f} GB/s (measured in the same run).",
        "`mean` is kernel time over a window: 16 appends and one fold, divided by 16. `staggered`: rows at 16 different "
        "positions, a fold of 1/16 of them after every token. `in scan` is wall time per token of `lq.decode` in "
        "`lax.scan`, with everything around the kernels.",
        table(result["rows"], columns),
        "Append by number of live records (ms):",
        table(
            [{"batch": r["batch"], **{str(i): x for i, x in enumerate(r["append_by_fill"])}} for r in result["rows"]],
            [("batch", "batch", "d"), *((str(i), str(i), ".4f") for i in range(shape.window))],
        ),
    ]
    if result["peers"]:
        peers = [("kernel", "name", ""), ("batch", "batch", "d"), ("ms", "ms", ".4f")]
        text += ["Other kernels, same card (ms):", table(result["peers"], peers)]
    text.append(f"Command: `{result['command']}`")
    (folder / "README.md").write_text("\n\n".join(text) + "\n")
    (folder / "results.json").write_text(json.dumps(result, indent=1))
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return
    figure, axis = plt.subplots(figsize=(6.5, 4.2))
    rows = sorted(result["rows"], key=lambda r: r["batch"])
    batches = [r["batch"] for r in rows]
    limit = [(r["append_bytes"] + r["fold_bytes"] / shape.window) / read * 1e3 for r in rows]
    axis.loglog(batches, [r["mean"] for r in rows], "o-", label="mean over a window, fold included")
    axis.loglog(batches, [r["append"] for r in rows], "s--", label="append")
    axis.loglog(batches, limit, "k:", label="bytes / measured read rate")
    for name in dict.fromkeys(r["name"] for r in result["peers"]):
        points = sorted((r["batch"], r["ms"]) for r in result["peers"] if r["name"] == name)
        axis.loglog(*zip(*points, strict=True), lw=0.8, label=name)
    axis.set(xlabel="batch", ylabel="ms per token and layer", title=result["card"])
    axis.legend(fontsize=7)
    axis.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(folder / "roofline.png", dpi=150)


def read_peers(folder: pathlib.Path) -> list[dict]:
    path = _PEERS_JSON.value
    if _PEERS_COMMAND.value:
        path = str(folder / "peers.json")
        subprocess.run([*shlex.split(_PEERS_COMMAND.value), path], check=True)
    if not path or not os.path.exists(path):
        return []
    rows = json.loads(pathlib.Path(path).read_text())
    rows = rows["rows"] if isinstance(rows, dict) else rows
    return [{key: r[key] for key in ("name", "batch", "ms")} for r in rows if {"name", "batch", "ms"} <= set(r)]


def main(_: list[str]) -> None:
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit("bench_kernels needs a Hopper GPU")
    shape = SHAPES[_SHAPE.value]
    folder = pathlib.Path(_OUTPUT_DIR.value) / device.device_kind.lower().replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        "card": device.device_kind, "shape": _SHAPE.value, "method": _METHOD.value, "jax": jax.__version__,
        "ceilings": ceilings(), "rows": [],
        "command": " ".join(["python -m experiments.bench_kernels", *sys.argv[1:]]),
    }  # fmt: skip
    result["peers"] = read_peers(folder)
    print("ceilings, GB/s:", {name: round(rate / 1e9) for name, rate in result["ceilings"].items()}, flush=True)
    for batch in map(int, _BATCHES.value):
        row: dict = {"batch": batch, **bench_windows(shape, batch, _WINDOWS.value, staggered=False)}
        if batch >= 32:
            row |= {f"staggered_{k}": x for k, x in bench_windows(shape, batch, _WINDOWS.value, staggered=True).items()}
        half = shape.window // 2
        heads = batch * shape.heads
        row["append_bytes"] = heads * head_bytes(shape, (shape.window - 1) / 2)["append"]
        row["fold_bytes"] = heads * head_bytes(shape, 0)["fold"]
        row["half_rate"] = heads * head_bytes(shape, half)["append"] / row["append_by_fill"][half] / 1e6
        row["half_share"] = row["half_rate"] * 1e9 / result["ceilings"]["read"]
        if _SCAN.value and batch <= 512:
            row["scan"] = bench_scan(shape, batch, staggered=False)
            if batch >= 128:
                row["staggered_scan"] = bench_scan(shape, batch, staggered=True)
        result["rows"].append(row)
        print(json.dumps({k: round(x, 4) for k, x in row.items() if isinstance(x, int | float)}), flush=True)
        write_report(folder, result)  # after every batch: nothing measured is lost
    print((folder / "README.md").read_text())


if __name__ == "__main__":
    app.run(main)
