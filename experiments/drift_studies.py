"""The studies of the drift experiment: pure functions from settings to records."""

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

import leapquant_jax as lq
from experiments import toy_heads
from experiments.toy_heads import Tokens

RECORD_EVERY = 64  # tokens between two points of a curve


@functools.partial(jax.jit, static_argnames=("method", "every"))
def state_curve(method: lq.Method, tokens: Tokens, every: int = RECORD_EVERY) -> Array:
    """Decodes and keeps the dense state after every `every` tokens: fp32 [T / every, B, K, V]."""
    batch, _, _, key_dim = tokens.k.shape
    state = method.init(batch=batch, num_heads=1, num_key_heads=1, key_dim=key_dim, value_dim=tokens.v.shape[-1])

    def advance(state: Any, block: Tokens) -> tuple[Any, Array]:
        state, _ = method.decode(state, *block)
        return state, method.dense_state(state)[:, 0]

    return jax.lax.scan(advance, state, _blocks(tokens, every))[1]


def error_curves(methods: Sequence[lq.Method], tokens: Tokens, exact: Array, title: str) -> list[np.ndarray]:
    """Relative state error ||S^ - S|| / ||S|| after every `RECORD_EVERY` tokens, [T / every, B] for each method.

    Nearly all of the time is compilation, so the methods share the cores.
    """

    def curve(method: lq.Method) -> np.ndarray:
        difference = jnp.linalg.norm(state_curve(method, tokens) - exact, axis=(-2, -1))
        return np.asarray(difference / jnp.linalg.norm(exact, axis=(-2, -1)))

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(tqdm(pool.map(curve, methods), desc=title, total=len(methods), unit="method"))


def parts(config: lq.LeapConfig) -> dict[str, lq.Method]:
    """A method taken apart: what is rounded how, in the order in which the parts are added."""
    bare = dataclasses.replace(config, rank=0, smoothing=0)
    if config.bits == 6:  # the library has no 6-bit format that is rounded every token; a window of one is the same
        each_step = lq.LeapMethod(dataclasses.replace(bare, window=1))
    else:
        each_step = lq.get_method(f"step-int{config.bits}")
    named = {
        "each step": each_step,
        "window": lq.LeapMethod(bare),
        "window + smoothing": lq.LeapMethod(dataclasses.replace(config, rank=0)),
        "window + compensators": lq.LeapMethod(dataclasses.replace(config, smoothing=0)),
        "all": lq.LeapMethod(config),
    }
    distinct: dict[str, lq.Method] = {}
    for name, method in named.items():  # with rank 0 or smoothing 0 some coincide
        if method not in distinct.values():
            distinct[name] = method
    return distinct


def toy_study(tokens: Tokens, configs: Sequence[lq.LeapConfig]) -> list[dict]:
    """Error curves of every part at every width, and peak over median of the state after each part."""
    exact = state_curve(lq.get_method("exact"), tokens)
    todo = [(config.bits, name, method) for config in configs for name, method in parts(config).items()]
    curves = error_curves([method for *_, method in todo], tokens, exact, "toy head")
    records = []
    for (bits, name, _), heads in zip(todo, curves, strict=True):
        curve = np.median(heads, axis=1)
        records.append({"measure": "toy_error", "bits": bits, "part": name, "steps": _steps(curve), "error": curve})
    flatness = peak_over_median(exact[-1], configs[0])
    for name, ratio in flatness.items():
        records.append({"measure": "toy_peak_over_median", "after": name, "ratio": ratio})
    return records


def peak_over_median(dense: Array, config: lq.LeapConfig) -> dict[str, float]:
    """max |x| / median |x| of a state, of what its compensators leave, and of that after smoothing (paper, Figure 6).

    Args:
      dense: fp32 [B, K, V]; the median over B is reported.
      config: Rank and smoothing; a part that is off is left out.
    """
    batch, key_dim, value_dim = dense.shape
    state = lq.init_state(config, batch=batch, num_heads=1, key_dim=key_dim, value_dim=value_dim, dense=dense[:, None])
    stages = {"nothing": dense}
    if state.compensator_keys is not None and state.compensator_values is not None:
        keys, values = (x[:, 0].astype(jnp.float32) for x in (state.compensator_keys, state.compensator_values))
        dense = dense - jnp.einsum("brk,brv->bkv", keys, values, precision="highest")
        stages["compensators"] = dense
    if state.row_scales is not None:
        stages["smoothing"] = dense / state.row_scales[:, 0, :, None]

    def ratio(x: Array) -> float:
        magnitude = np.abs(np.asarray(x)).reshape(batch, -1)
        return float(np.median(magnitude.max(axis=1) / np.median(magnitude, axis=1)))

    return {name: ratio(x) for name, x in stages.items()}


def heads_study(seed: int, length: int = 2048) -> list[dict]:
    """Mean error over the second half of the run with one subspace iteration per fold, and with an exact SVD."""
    tokens = toy_heads.heads(length, seed)
    exact = state_curve(lq.get_method("exact"), tokens)
    fits = ("subspace", "svd")
    methods = [lq.LeapMethod(lq.LeapConfig(bits=8, rank=4, fit=fit)) for fit in fits]
    curves = error_curves(methods, tokens, exact, "fits")
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
        gain = float(jnp.mean(energy_gain(config, tokens)))
        lost = 1 - decay ** (2 * config.window)
        records.append(
            {
                "measure": "slow_head", "scale": name, "decay": decay, "steps": _steps(curve), "error": curve,
                "energy_gain_per_fold": gain, "energy_lost_per_window": lost,
            }
        )  # fmt: skip
    return records


@functools.partial(jax.jit, static_argnames="config")
def energy_gain(config: lq.LeapConfig, tokens: Tokens) -> Array:
    """||S after a fold||^2 / ||S before it||^2 - 1 of every fourth fold: fp32 [T / (4 window), B]."""
    batch, _, _, key_dim = tokens.k.shape
    every = 4 * config.window
    state = lq.init_state(config, batch=batch, num_heads=1, key_dim=key_dim, value_dim=tokens.v.shape[-1])

    def advance(state: lq.LeapState, block: Tokens) -> tuple[lq.LeapState, Array]:
        state, _ = lq.decode(config, state, *(x[:, :-1] for x in block))
        last = [x[:, -1] for x in block]
        before, _ = lq.exact_step(lq.dense_state(config, state), *last)
        state, _ = lq.step(config, state, *last)  # fills the window, so it folds
        energies = [jnp.sum(x * x, axis=(1, 2, 3)) for x in (before, lq.dense_state(config, state))]
        return state, energies[1] / energies[0] - jnp.float32(1)

    return jax.lax.scan(advance, state, _blocks(tokens, every))[1]


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
        records.append({"measure": "ring", "records": dtype, "steps": _steps(curve), "error": curve})
    return records


def _blocks(tokens: Tokens, every: int) -> Tokens:
    """[B, T, ...] -> [T / every, B, every, ...], for a scan over blocks."""

    def split(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, every, *x.shape[2:]), 1, 0)

    return Tokens(*map(split, tokens))


def _steps(curve: np.ndarray) -> np.ndarray:
    return RECORD_EVERY * (1 + np.arange(len(curve)))
