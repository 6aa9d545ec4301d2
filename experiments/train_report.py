"""What a trained model can do: recall by age, bits per byte by position, and the half-lives of its heads."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax import Array

from experiments import corpus, plots, report, tasks
from experiments.train_step import AGE_GROUPS, empty_cache
from models import qwen35
from models.qwen35.delta_net import log_decay
from models.ragged import full_span


def evaluate(model: qwen35.Model, *, num_streams: int, num_tokens: int, segment: int, seed: int = 1000) -> list[dict]:
    """Measures a model on streams that it never saw, whose state is carried from end to end.

    Args:
        model: The model; its own dtypes are used, with an fp32 state.
        num_streams: Streams of each sort.
        num_tokens: Length of each; a multiple of ``segment``.
        segment: Tokens per call.
        seed: Chooses the streams.

    Returns:
        Records with a field "measure": "recall" (per kind and octave of age), "bits_per_byte" (per octave of
        position) and "half_life" (per layer and head).
    """
    if num_tokens % segment:
        raise ValueError(f"num_tokens ({num_tokens}) must be a multiple of segment ({segment}).")
    streams = tasks.recall_streams(num_streams, num_tokens, seed)
    predicted, _ = run(model, streams.tokens, segment)
    records = [
        {"measure": "recall", **row} for row in tasks.accuracy_by_age(streams.answers, tasks.grade(streams, predicted))
    ]
    text = corpus.held_out_streams(num_streams, num_tokens, seed)
    _, nll = run(model, text, segment)
    octave = np.floor(np.log2(np.maximum(np.arange(num_tokens), 1))).astype(int)
    for value in np.unique(octave[1:]):
        bits = nll[:, 1:][:, octave[1:] == value].mean() / math.log(2)
        records.append({"measure": "bits_per_byte", "min_position": int(2**value), "bits": float(bits)})
    records.append({"measure": "bits_per_byte", "min_position": 0, "bits": float(nll[:, 1:].mean() / math.log(2))})
    decays = mean_log_decays(model, jnp.asarray(text[:, : min(num_tokens, 4 * segment)]))
    layers = [i for i, kind in enumerate(model.config.layer_types) if kind == "linear_attention"]
    for layer, heads in zip(layers, np.asarray(decays), strict=True):
        for head, decay in enumerate(heads):
            records.append(
                {"measure": "half_life", "layer": layer, "head": head, "tokens": float(math.log(2) / -decay)}
            )
    return records


def run(model: qwen35.Model, tokens: np.ndarray, segment: int) -> tuple[np.ndarray, np.ndarray]:
    """Predicts streams token by token, in segments with a carried cache.

    Args:
        model: The model.
        tokens: int32 [N, T], T a multiple of ``segment``.
        segment: Tokens per call.

    Returns:
        The most probable token and the negative log-likelihood (nats) of ``tokens[:, t]`` given those before it:
        int32 and fp32 [N, T]. Column 0, which nothing precedes, is 0.
    """
    targets = np.roll(tokens, -1, axis=1)
    cache = qwen35.init_cache(model.config, batch=len(tokens), method="exact")
    predictions, losses = [], []
    for start in range(0, tokens.shape[1], segment):
        window = slice(start, start + segment)
        predicted, nll, cache = _predict(model, tokens[:, window], targets[:, window], cache)
        predictions.append(np.asarray(predicted, np.int32))
        losses.append(np.asarray(nll))
    shifted = [np.roll(np.concatenate(parts, axis=1), 1, axis=1) for parts in (predictions, losses)]
    for array in shifted:
        array[:, 0] = 0
    return shifted[0], shifted[1]


@jax.jit
def _predict(model: qwen35.Model, tokens: Array, targets: Array, cache: qwen35.Cache):
    logits, cache = qwen35.prefill(model, tokens, cache)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.argmax(logits, axis=-1), nll, cache


@jax.jit
def mean_log_decays(model: qwen35.Model, tokens: Array) -> Array:
    """The mean of g over a batch of text int32 [B, T], from an empty state: fp32 [linear layers, value heads]."""
    cache = empty_cache(model.config, tokens.shape[0])
    h = model.embed_tokens(tokens)
    span = full_span(cache.lengths, tokens.shape[1])
    decays = []
    for layer, layer_cache in zip(model.layers, cache.layers, strict=True):
        if layer.kind == "linear_attention":
            mixer = layer.linear_attn
            gate = mixer.in_proj_a(layer.input_layernorm(h))
            decays.append(log_decay(gate, mixer.A_log[...], mixer.dt_bias[...]).mean(axis=(0, 1)))
        h, _ = layer(h, layer_cache, span, step=False)
    return jnp.stack(decays)


def progress_line(record: Mapping) -> str:
    """One line of the training log for people: per cent of the answers' bytes right, by kind and group of ages."""
    shown = [
        f"{kind} " + " ".join("-" if value is None else f"{100 * value:.0f}" for value in groups.values())
        for kind, groups in record["accuracy"].items()
    ]
    head = f"step {record['step']:,}, {record['seconds']:.0f} s, {record['tokens_per_second'] / 1e6:.2f} M tokens/s"
    return f"{head}, text {record['text_nll'] / math.log(2):.3f} bits; " + ", ".join(shown)


def plot_training(log: list[dict], path: Path) -> None:
    """Draws the loss of the text, and for each group of ages the accuracy on every kind of task, over the steps."""
    figure, (left, *others) = plt.subplots(1, 1 + len(AGE_GROUPS), figsize=(17, 3.6))
    left.plot([row["step"] for row in log], [row["text_nll"] / math.log(2) for row in log])
    left.set(xlabel="step", ylabel="bits per byte", title="Text and commands")
    for axis, (group, (first, last)) in zip(others, AGE_GROUPS.items(), strict=True):
        for kind in tasks.KINDS:
            pairs = [
                (row["step"], row["accuracy"][kind][group]) for row in log if row["accuracy"][kind][group] is not None
            ]
            axis.plot([step for step, _ in pairs], [100 * value for _, value in pairs], label=kind, linewidth=1)
        ages = f"ages to {last:,}" if first == 1 else f"ages from {first:,}"
        axis.set(xlabel="step", title=ages, ylim=(0, 101))
    others[0].set_ylabel("bytes of answers right, %")
    others[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.tight_layout()
    plots.save(figure, path)


def recall_table(records: Iterable[Mapping]) -> str:
    """Accuracy by kind and age as a Markdown table."""
    cells = {(row["kind"], row["min_age"]): row for row in records if row["measure"] == "recall"}
    ages = sorted({age for _, age in cells})
    rows = []
    for age in ages:
        row = [cells.get((kind, age)) for kind in tasks.KINDS]
        shown = [f"{100 * cell['accuracy']:.1f} % of {cell['count']}" if cell else "" for cell in row]
        rows.append([f"{age} to {2 * age - 1}", *shown])
    rows.append(["chance", *(f"{100 * tasks.CHANCE[kind]:.1f} %" for kind in tasks.KINDS)])
    return report.markdown_table(["age of the write, tokens", *tasks.KINDS], rows)


def half_life_table(records: Iterable[Mapping]) -> str:
    """Half-lives in tokens as a Markdown table, a row per layer."""
    rows = [row for row in records if row["measure"] == "half_life"]
    heads = sorted({row["head"] for row in rows})
    table = []
    for layer in sorted({row["layer"] for row in rows}):
        values = {row["head"]: row["tokens"] for row in rows if row["layer"] == layer}
        table.append([str(layer), *(f"{values[head]:,.0f}" for head in heads)])
    return report.markdown_table(["layer", *(f"head {head}" for head in heads)], table)
