"""How far a low-bit recurrent state drifts from the fp32 one, without a model: one head, synthetic tokens, every part by itself.

    python -m experiments.drift                                  # the article's toy head at 8 bits; ten seconds on a CPU
    python -m experiments.drift --bits=6 --window=8 --rank=2     # the same with your settings
    python -m experiments.drift --bits=8,4 --studies=all         # and heads of a known character, long runs, ring precision

Studies:

  toy    rounding every step, only the window, the window with smoothing, with compensators, and with both; relative state
         error over the steps, and how far the state's peak stands above its median before and after each part.
  heads  slow, fast, low-rank and full-rank heads: what the one subspace iteration per fold costs against an exact SVD.
  slow   4 bits on a head that forgets 0.01 % per token, with and without the MSE-optimal clip: the energy that a fold adds
         against the energy that a window's decay removes.
  rings  the ring of records in fp32, fp16 and bf16 with nothing else rounded.

Writes results.jsonl (command, versions and device in its first line), table.md and a PNG per study to --output_dir.
"""

import concurrent.futures
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax import Array
from tqdm import tqdm

import leapquant_jax as lq
from experiments import drift_report, report, toy_heads
from experiments.run_directory import RunDirectory
from experiments.toy_heads import Tokens

STUDIES = ("toy", "heads", "slow", "rings")

_STUDIES = flags.DEFINE_list("studies", ["toy"], f"Of {', '.join(STUDIES)}, or all.")
_BITS = flags.DEFINE_list("bits", ["8"], "Widths of the toy study: of 8, 6, 4.")
_WINDOW = flags.DEFINE_integer("window", 16, "Tokens between two roundings.", lower_bound=1)
_RANK = flags.DEFINE_integer("rank", 4, "Compensators.", lower_bound=0)
_SMOOTHING = flags.DEFINE_float("smoothing", 0.5, "Exponent of the key rows' mean magnitude; 0 switches smoothing off.")
_DECAY = flags.DEFINE_list("decay", ["0.9995", "0.9999"], "Smallest and largest decay per token of the toy head.")
_LENGTH = flags.DEFINE_integer("length", 4096, "Tokens of the toy study; a multiple of 64.", lower_bound=64)
_SEEDS = flags.DEFINE_integer("seeds", 16, "Independent toy heads; the median over them is reported.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Chooses the tokens.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", "runs/drift", "Folder for the results; a folder of other settings is refused.")

RECORD_EVERY = 64  # tokens between two points of a curve


@functools.partial(jax.jit, static_argnames=("method", "every"))
def state_curve(method: lq.Method, tokens: Tokens, every: int = RECORD_EVERY) -> Array:
    """Decodes and keeps the dense state after every `every` tokens: fp32 [T / every, B, K, V]."""
    batch, length, _, key_dim = tokens.k.shape
    state = method.init(batch=batch, num_heads=1, num_key_heads=1, key_dim=key_dim, value_dim=tokens.v.shape[-1])
    blocks = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(batch, length // every, every, *x.shape[2:]), 1, 0), tokens)

    def advance(state: Any, block: Tokens) -> tuple[Any, Array]:
        state, _ = method.decode(state, *block)
        return state, method.dense_state(state)[:, 0]

    return jax.lax.scan(advance, state, blocks)[1]


def error_curves(methods: Sequence[lq.Method], tokens: Tokens, exact: Array, title: str) -> list[np.ndarray]:
    """Relative state error ||S^ - S|| / ||S|| after every `RECORD_EVERY` tokens, [T / every, B] for each method.

    Nearly all of the time is compilation, so the methods share the cores.
    """

    def curve(method: lq.Method) -> np.ndarray:
        difference = jnp.linalg.norm(state_curve(method, tokens) - exact, axis=(-2, -1))
        return np.asarray(difference / jnp.linalg.norm(exact, axis=(-2, -1)))

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(tqdm(pool.map(curve, methods), desc=title, total=len(methods), unit="method"))


def parts(bits: int, window: int, rank: int, smoothing: float) -> dict[str, lq.Method]:
    """The method taken apart: what is rounded how, in the order in which the parts are added."""
    leap = functools.partial(lq.LeapConfig, bits=bits)
    clip = "mse" if bits == 4 and rank not in (0, 4) else None
    each_step = lq.LeapMethod(leap(window=1, rank=0, smoothing=0)) if bits == 6 else lq.get_method(f"step-int{bits}")
    named = {
        "each step": each_step,
        "window": lq.LeapMethod(leap(window=window, rank=0, smoothing=0)),
        "window + smoothing": lq.LeapMethod(leap(window=window, rank=0, smoothing=smoothing)),
        "window + compensators": lq.LeapMethod(leap(window=window, rank=rank, smoothing=0, clip=clip)),
        "all": lq.LeapMethod(leap(window=window, rank=rank, smoothing=smoothing, clip=clip)),
    }
    distinct: dict[str, lq.Method] = {}
    for name, method in named.items():  # with rank 0 or smoothing 0 some coincide
        if method not in distinct.values():
            distinct[name] = method
    return distinct


def toy_study(tokens: Tokens, bits: Sequence[int], window: int, rank: int, smoothing: float) -> list[dict]:
    """Error curves of every part at every width, and peak over median of the state after each part."""
    exact = state_curve(lq.get_method("exact"), tokens)
    records = []
    todo = [(width, name, method) for width in bits for name, method in parts(width, window, rank, smoothing).items()]
    for (width, name, _), curves in zip(todo, error_curves([m for *_, m in todo], tokens, exact, "toy head"), strict=True):
        curve = np.median(curves, axis=1)
        steps = RECORD_EVERY * (1 + np.arange(len(curve)))
        records.append({"measure": "toy_error", "bits": width, "part": name, "steps": steps, "error": curve})
    flatness = peak_over_median(exact[-1], lq.LeapConfig(bits=8, rank=rank, smoothing=smoothing))
    return [*records, *({"measure": "toy_peak_over_median", "after": name, "ratio": flatness[name]} for name in flatness)]


def peak_over_median(dense: Array, config: lq.LeapConfig) -> dict[str, float]:
    """max |x| / median |x| of a state, of what its compensators leave, and of that after smoothing (the paper's Figure 6).

    Args:
      dense: fp32 [B, K, V]; the median over B is reported.
      config: Rank and smoothing; a part that is off is left out.
    """
    batch, key_dim, value_dim = dense.shape
    state = lq.init_state(config, batch=batch, num_heads=1, key_dim=key_dim, value_dim=value_dim, dense=dense[:, None])
    stages = {"nothing": dense}
    if config.rank:
        factors = [x[:, 0].astype(jnp.float32) for x in (state.compensator_keys, state.compensator_values)]
        dense = dense - jnp.einsum("brk,brv->bkv", *factors, precision="highest")
        stages["compensators"] = dense
    if config.smoothing:
        stages["smoothing"] = dense / state.row_scales[:, 0, :, None]

    def ratio(x: Array) -> float:
        magnitude = np.abs(np.asarray(x)).reshape(batch, -1)
        return float(np.median(magnitude.max(axis=1) / np.median(magnitude, axis=1)))

    return {name: ratio(x) for name, x in stages.items()}


def heads_study(seed: int, length: int = 4096) -> list[dict]:
    """Mean error over the second half of the run with one subspace iteration per fold, and with an exact SVD."""
    tokens = toy_heads.heads(length, seed)
    exact = state_curve(lq.get_method("exact"), tokens)
    fits = ("subspace", "svd")
    curves = error_curves([lq.LeapMethod(lq.LeapConfig(bits=8, rank=4, fit=fit)) for fit in fits], tokens, exact, "fits")
    errors = {fit: curve[len(curve) // 2 :].mean(axis=0) for fit, curve in zip(fits, curves, strict=True)}
    return [
        {
            "measure": "fit", "head": kind, "subspace": errors["subspace"][i], "svd": errors["svd"][i],
            "ratio": errors["subspace"][i] / errors["svd"][i],
        }
        for i, kind in enumerate(toy_heads.HEAD_KINDS)
    ]  # fmt: skip


def slow_study(seed: int, length: int = 16384, decay: float = 0.9999) -> list[dict]:
    """4 bits on a slow head: error curve, and energy gained per fold, for each way to choose the scale."""
    tokens = toy_heads.slow_head(2, length, seed, decay=decay)
    exact = state_curve(lq.get_method("exact"), tokens)
    leap = functools.partial(lq.LeapConfig, bits=4, rank=6)
    configs = {
        "largest entry": leap(),
        "clip": leap(clip="mse"),
        "clip + rotation": leap(clip="mse", rotation="hadamard"),
    }
    records = []
    curves = error_curves([lq.LeapMethod(config) for config in configs.values()], tokens, exact, "slow head")
    for (name, config), curve in zip(configs.items(), curves, strict=True):
        curve = curve.mean(axis=1)
        steps = RECORD_EVERY * (1 + np.arange(len(curve)))
        gain = float(jnp.mean(energy_gain(config, tokens)))
        lost = 1 - decay ** (2 * config.window)
        records.append(
            {
                "measure": "slow_head", "scale": name, "decay": decay, "steps": steps, "error": curve,
                "energy_gain_per_fold": gain, "energy_lost_per_window": lost,
            }
        )  # fmt: skip
    return records


@functools.partial(jax.jit, static_argnames="config")
def energy_gain(config: lq.LeapConfig, tokens: Tokens) -> Array:
    """||S after a fold||^2 / ||S before it||^2 - 1, per fold: fp32 [T / (4 window), B]; every fourth fold is looked at."""
    batch, length, _, key_dim = tokens.k.shape
    every = 4 * config.window
    state = lq.init_state(config, batch=batch, num_heads=1, key_dim=key_dim, value_dim=tokens.v.shape[-1])
    blocks = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(batch, length // every, every, *x.shape[2:]), 1, 0), tokens)

    def advance(state: lq.LeapState, block: Tokens) -> tuple[lq.LeapState, Array]:
        state, _ = lq.decode(config, state, *(x[:, :-1] for x in block))
        last = [x[:, -1] for x in block]
        before, _ = lq.exact_step(lq.dense_state(config, state), *last)
        state, _ = lq.step(config, state, *last)  # fills the window, so it folds
        energies = [jnp.sum(x * x, axis=(1, 2, 3)) for x in (before, lq.dense_state(config, state))]
        return state, energies[1] / energies[0] - jnp.float32(1)

    return jax.lax.scan(advance, state, blocks)[1]


def rings_study(seed: int, length: int = 8192) -> list[dict]:
    """Records in fp32, fp16 and bf16 under an fp32 boundary state: what the ring alone costs."""
    tokens = toy_heads.ToyHead().tokens(4, length, seed)
    exact = state_curve(lq.get_method("exact"), tokens)
    off = functools.partial(lq.LeapConfig, bits=None, boundary_dtype="float32", rank=0, smoothing=0)
    dtypes: tuple[Any, ...] = ("float32", "float16", "bfloat16")
    curves = error_curves([lq.LeapMethod(off(record_dtype=dtype)) for dtype in dtypes], tokens, exact, "rings")
    records = []
    for dtype, curve in zip(dtypes, curves, strict=True):
        curve = curve.mean(axis=1)
        steps = RECORD_EVERY * (1 + np.arange(len(curve)))
        records.append({"measure": "ring", "records": dtype, "steps": steps, "error": curve})
    return records


def _settings() -> tuple[dict[str, Any], toy_heads.ToyHead, list[int]]:
    """The flags, checked: the run's configuration, the toy head, and the widths."""
    studies = list(STUDIES) if _STUDIES.value == ["all"] else _STUDIES.value
    unknown = [name for name in studies if name not in STUDIES]
    if unknown or not studies:
        raise ValueError(f"--studies must name some of {', '.join(STUDIES)}, or be all; got {_STUDIES.value}")
    if _LENGTH.value % RECORD_EVERY:
        raise ValueError(f"--length must be a multiple of {RECORD_EVERY}, got {_LENGTH.value}")
    try:
        bits = [int(width) for width in _BITS.value]
        low, high = (float(x) for x in _DECAY.value)
    except ValueError as error:
        raise ValueError(
            f"--bits takes integers and --decay two numbers, got {_BITS.value} and {_DECAY.value}"
        ) from error
    if not 0 < low <= high <= 1:
        raise ValueError(f"--decay must satisfy 0 < smallest <= largest <= 1, got {low} and {high}")
    if not bits:
        raise ValueError("--bits must name a width: 8, 6 or 4")
    head = toy_heads.ToyHead(decay=(low, high))
    for width in bits:
        config = lq.LeapConfig(bits=width, window=_WINDOW.value, rank=_RANK.value, smoothing=_SMOOTHING.value)
        config.check_dims(head.key_dim, head.value_dim)
    config = {
        "program": "drift", "studies": studies, "bits": bits, "window": _WINDOW.value, "rank": _RANK.value,
        "smoothing": _SMOOTHING.value, "length": _LENGTH.value, "seeds": _SEEDS.value, "seed": _SEED.value,
        "toy_head": {name: getattr(head, name) for name in head.__dataclass_fields__},
    }  # fmt: skip
    return config, head, bits


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    try:
        config, head, bits = _settings()
        run = RunDirectory.open(_OUTPUT_DIR.value, config)
    except ValueError as error:
        raise SystemExit(f"drift: {error}") from error
    seed = _SEED.value

    def toy() -> list[dict]:
        return toy_study(
            head.tokens(_SEEDS.value, _LENGTH.value, seed), bits, _WINDOW.value, _RANK.value, _SMOOTHING.value
        )

    studies: dict[str, Callable[[], list[dict]]] = {
        "toy": toy,
        "heads": lambda: heads_study(seed),
        "slow": lambda: slow_study(seed),
        "rings": lambda: rings_study(seed),
    }
    records = [run.header()]
    for name in config["studies"]:
        records += studies[name]()
    directory = Path(run.path)
    report.write_jsonl(directory / "results.jsonl", records)
    text = drift_report.write(directory)
    print(text)


if __name__ == "__main__":
    app.run(main)
