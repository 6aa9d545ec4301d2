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
from experiments import tasks
from models import qwen35
from models.ragged import full_span

AGE_GROUPS = {"to_1k": (1, 1023), "to_4k": (1024, 4095), "to_8k": (4096, 8191), "beyond": (8192, 1 << 30)}


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


def make_train_step(merge: Callable[[dict], qwen35.Model], *, answer_share: float, weight_decay: float):
    """Builds ``train_step(state, tokens, task, age, fresh, learning_rate) -> (state, metrics)``.

    Args:
        merge: From ``init_train_state``.
        answer_share: The loss is this share of the mean over whole answers, and for the rest the mean over tokens of text;
            so that answers do not lose weight when the curriculum makes them rarer. An answer is the mean of its tokens.
        weight_decay: Of the matrices.

    Returns:
        The jitted step. ``tokens``, ``task`` and ``age`` are int32 [B, T + 1] and ``fresh`` bool [B] (see
        ``train_data.Segment``). The state is donated. Metrics are fp32: "loss", "gradient_norm", "text_nll", and those of
        ``answer_metrics``.
    """
    optimizer = make_optimizer(weight_decay=weight_decay)
    weights = np.array([0.0, *(1 / tasks.LENGTHS[kind] for kind in tasks.KINDS)], np.float32)

    def loss_and_aux(params: dict, cache: qwen35.Cache, tokens: Array, task: Array, age: Array):
        logits, cache = forward(merge(params), tokens[:, :-1], cache)
        targets, task, age = (x[:, 1:] for x in (tokens, task, age))
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        of_kind = jax.nn.one_hot(task, len(weights), dtype=jnp.float32)
        of_answer = jnp.einsum("btk,k->bt", of_kind, weights, precision="highest")
        text_nll, answer_nll = (jnp.sum(nll * w) / jnp.maximum(jnp.sum(w), 1) for w in (of_kind[..., 0], of_answer))
        loss = (1 - answer_share) * text_nll + answer_share * answer_nll
        metrics = {"text_nll": text_nll}
        metrics |= answer_metrics(nll, jnp.argmax(logits, axis=-1) == targets, of_kind[..., 1:], age)
        return loss, (cache, metrics)

    def train_step(state: TrainState, tokens: Array, task: Array, age: Array, fresh: Array, learning_rate: Array):
        cache = forget(state.cache, fresh)
        (loss, (cache, metrics)), gradient = jax.value_and_grad(loss_and_aux, has_aux=True)(
            state.params, cache, tokens, task, age
        )
        updates, opt_state = optimizer.update(gradient, state.optimizer, state.params)
        params = jax.tree.map(lambda p, u: p - learning_rate * u, state.params, updates)
        metrics |= {"loss": loss, "gradient_norm": optax.global_norm(gradient)}
        return TrainState(params, opt_state, cache), metrics

    return jax.jit(train_step, donate_argnames="state")


def answer_metrics(nll: Array, right: Array, of_kind: Array, age: Array) -> dict[str, Array]:
    """Sums over the tokens of answers, for every kind of task and group of ages.

    Args:
        nll: fp32 [B, T].
        right: bool [B, T], whether the most probable token is the right one.
        of_kind: fp32 [B, T, kinds], 1 at the tokens of this kind's answers.
        age: int32 [B, T].

    Returns:
        "count", "right" and "nll", fp32 [kinds, groups of ``AGE_GROUPS``].
    """
    bounds = jnp.asarray([(first, last) for first, last in AGE_GROUPS.values()], jnp.int32)
    of_group = ((age[..., None] >= bounds[None, None, :, 0]) & (age[..., None] <= bounds[None, None, :, 1])).astype(
        jnp.float32
    )
    values = jnp.stack([jnp.ones_like(nll), right.astype(jnp.float32), nll])
    sums = jnp.einsum("btk,btg,vbt->vkg", of_kind, of_group, values, precision="highest")
    return dict(zip(("count", "right", "nll"), sums, strict=True))
