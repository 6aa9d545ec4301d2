"""One training step of the hybrid model: loss, optimizer, and the state that a stream carries from segment to segment."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

import leapquant_jax as lq
from models import qwen35
from models.ragged import full_span


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes, and all that a checkpoint must hold.

    Attributes:
        params: fp32 master parameters, a dict of dicts (see ``nnx.to_pure_dict``).
        optimizer: The state of ``make_optimizer``.
        cache: What each row of the batch remembers of its stream. No gradient flows into it.
    """

    params: dict
    optimizer: optax.OptState
    cache: qwen35.Cache


def init_train_state(
    config: qwen35.Config, key: Array, *, batch: int, longest_half_life: float
) -> tuple[Callable[[dict], qwen35.Model], TrainState]:
    """Fresh parameters and an empty cache.

    Args:
        config: The model, with ``attention_window`` set.
        key: A JAX random key.
        batch: Rows of the batch.
        longest_half_life: In tokens; see ``spread_half_lives``.

    Returns:
        A function that makes a model of ``TrainState.params``, and the state of step 0.
    """
    model = qwen35.from_config(config, key, param_dtype="float32")
    spread_half_lives(model, longest_half_life)
    graphdef, variables = nnx.split(model, nnx.Param)

    def merge(params: dict) -> qwen35.Model:
        variables_now = jax.tree.map(lambda x: x, variables)
        nnx.replace_by_pure_dict(variables_now, params)
        return nnx.merge(graphdef, variables_now)

    params = nnx.to_pure_dict(variables)
    optimizer = make_optimizer(weight_decay=0.0).init(params)
    return merge, TrainState(params, optimizer, empty_cache(config, batch))


def empty_cache(config: qwen35.Config, batch: int) -> qwen35.Cache:
    """The cache of rows that have seen nothing; every leaf is zero. The large products of the recurrence may use TF32."""
    return qwen35.init_cache(config, batch=batch, method=lq.ExactMethod(precision="default"))


def forward(model: qwen35.Model, tokens: Array, cache: qwen35.Cache) -> tuple[Array, qwen35.Cache]:
    """``qwen35.prefill`` for training: all activations are kept, and the embedding is a matrix product.

    The gradient of a look-up adds every token into one of 264 rows, which makes the threads of a GPU queue up.

    Args:
        model: The model.
        tokens: int32 [B, T].
        cache: The cache before.

    Returns:
        Logits fp32 [B, T, vocabulary] and the cache after.
    """
    dtype = jnp.dtype(model.config.dtype)
    one_hot = jax.nn.one_hot(tokens, model.config.vocab_size, dtype=dtype)
    h = jnp.einsum("btv,vd->btd", one_hot, model.embed_tokens.embedding[...].astype(dtype))
    span = full_span(cache.lengths, tokens.shape[1])
    layers = []
    for layer, layer_cache in zip(model.layers, cache.layers, strict=True):
        h, layer_cache = layer(h, layer_cache, span, step=False)
        layers.append(layer_cache)
    return model.head(model.norm(h)), qwen35.Cache(cache.lengths + span.counts, tuple(layers))


def spread_half_lives(model: qwen35.Model, longest: float, shortest: float = 16.0) -> None:
    """Spreads the heads' memories from tens of tokens to ``longest``, evenly on a log scale within each layer.

    The usual start (A ~ U(1, 16), dt log-uniform in 1e-3..1e-1) has no half-life above 700 tokens. A is kept; the bias of
    dt is set so that exp(g) halves the state in the wanted number of tokens: softplus(dt_bias) = ln 2 / (A half-life).

    Args:
        model: Changed in place.
        longest: Half-life of the last head of every layer, in tokens.
        shortest: Half-life of the first head.
    """
    for layer in model.layers:
        if layer.kind == "linear_attention":
            mixer = layer.linear_attn
            heads = mixer.dt_bias.shape[0]
            half_lives = jnp.asarray(np.geomspace(shortest, longest, heads), jnp.float32)
            time_step = jnp.float32(math.log(2)) / (half_lives * jnp.exp(mixer.A_log[...]))
            mixer.dt_bias.set_value(jnp.log(jnp.expm1(time_step)))


def make_optimizer(*, weight_decay: float, clip: float = 1.0) -> optax.GradientTransformation:
    """AdamW without its learning rate, which the step multiplies by, so that a schedule needs no recompilation.

    Only the matrices decay: a decay would pull gates, norms and convolutions towards values that mean something.
    """

    def is_matrix(params: dict) -> dict:
        return jax.tree_util.tree_map_with_path(
            lambda path, x: x.ndim == 2 and "conv1d" not in jax.tree_util.keystr(path), params
        )

    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(weight_decay, mask=is_matrix),
    )


def forget(cache: qwen35.Cache, fresh: Array) -> qwen35.Cache:
    """Empties the rows of a cache where ``fresh`` (bool [B]) is True. An empty cache is zero everywhere."""
    return jax.tree.map(lambda x: jnp.where(fresh.reshape(-1, *[1] * (x.ndim - 1)), jnp.zeros((), x.dtype), x), cache)


def make_train_step(merge: Callable[[dict], qwen35.Model], *, answer_weight: float, weight_decay: float):
    """Builds ``train_step(state, tokens, age, fresh, learning_rate) -> (state, metrics)``.

    Args:
        merge: From ``init_train_state``.
        answer_weight: Weight of an answer's byte in the loss; a byte of text has 1.
        weight_decay: Of the matrices.

    Returns:
        The jitted step. ``tokens`` and ``age`` are int32 [B, T + 1] and ``fresh`` bool [B] (see ``train_data.Segment``).
        The state is donated. Metrics are fp32 sums and counts (see ``_metrics``).
    """
    optimizer = make_optimizer(weight_decay=weight_decay)

    def loss_and_aux(params: dict, cache: qwen35.Cache, tokens: Array, age: Array):
        logits, cache = forward(merge(params), tokens[:, :-1], cache)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        weight = jnp.where(age[:, 1:] != 0, jnp.float32(answer_weight), jnp.float32(1))
        loss = jnp.sum(nll * weight) / jnp.sum(weight)
        return loss, (cache, _metrics(nll, logits, tokens[:, 1:], age[:, 1:]))

    def train_step(state: TrainState, tokens: Array, age: Array, fresh: Array, learning_rate: Array):
        cache = forget(state.cache, fresh)
        (loss, (cache, metrics)), gradient = jax.value_and_grad(loss_and_aux, has_aux=True)(
            state.params, cache, tokens, age
        )
        updates, opt_state = optimizer.update(gradient, state.optimizer, state.params)
        params = jax.tree.map(lambda p, u: p - learning_rate * u, state.params, updates)
        metrics |= {"loss": loss, "gradient_norm": optax.global_norm(gradient)}
        return TrainState(params, opt_state, cache), metrics

    return jax.jit(train_step, donate_argnames="state")


AGE_GROUPS = {"to_256": (1, 256), "to_1k": (257, 1024), "to_4k": (1025, 4096), "beyond": (4097, 1 << 30)}


def _metrics(nll: Array, logits: Array, targets: Array, age: Array) -> dict[str, Array]:
    """Text loss, and for each group of ages the number of recalled bytes, how many were right and their loss."""
    right = jnp.argmax(logits, axis=-1) == targets

    def total(chosen: Array, values: Array) -> Array:
        return jnp.sum(jnp.where(chosen, values.astype(jnp.float32), jnp.float32(0)))

    text = age == 0
    result = {"text_nll": total(text, nll) / jnp.maximum(jnp.sum(text, dtype=jnp.float32), 1)}
    for name, (first, last) in AGE_GROUPS.items():
        chosen = (age >= first) & (age <= last)
        result[f"answers_{name}"] = jnp.sum(chosen, dtype=jnp.float32)
        result[f"right_{name}"] = total(chosen, right)
        result[f"answer_nll_{name}"] = total(chosen, nll)
    return result
