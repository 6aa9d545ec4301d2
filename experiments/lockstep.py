"""Decoding the same tokens with several state methods, segment after segment, each compared with `exact` at once.

The tokens are given, so a segment is read layer by layer: projections, convolutions and attention as matrix products over
its tokens, the recurrent state token by token, as in generation. That is the arithmetic of `decode_step` in another order
(up to fp32 rounding), at a fraction of its time.

For every segment `exact` runs first and its logits are kept; then every other method reads the same tokens and is compared
with them. So nothing grows with the length of the streams: a run holds one cache per method, and one segment of logits.
Every method is compiled once, ahead of the first token.
"""

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from tqdm import tqdm

import leapquant_jax as lq
from experiments import tally as tallies
from experiments.streams import Streams
from experiments.tally import Tally
from models import qwen35
from models.qwen35.config import LINEAR
from models.recurrent import RecurrentCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenMetrics:
    """How a method predicts a token: nll and kl fp32, right and agrees bool, all [..., N]; see `Tally`."""

    nll: Array
    kl: Array
    right: Array
    agrees: Array


def compare(logits: Array, reference: Array, targets: Array) -> TokenMetrics:
    """Judges logits [..., N, vocabulary] against those of `exact` and the token that came, int32 [..., N]."""
    log_p, log_reference = jax.nn.log_softmax(logits), jax.nn.log_softmax(reference)
    top, reference_top = jnp.argmax(logits, axis=-1), jnp.argmax(reference, axis=-1)
    return TokenMetrics(
        nll=-jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0],
        kl=jnp.sum(jnp.exp(log_reference) * (log_reference - log_p), axis=-1),
        right=top == targets.astype(top.dtype),
        agrees=top == reference_top,
    )


@dataclasses.dataclass(frozen=True)
class TokenByToken:
    """`method`, which takes each token of a prefill as a decode step: states are rounded as often as in generation."""

    method: lq.Method

    def prefill(self, state: Any, *tokens: Array, mask: Array | None = None) -> tuple[Any, Array]:
        return self.method.decode(state, *tokens, active=mask)

    def __getattr__(self, name: str) -> Any:  # all else is the method's own
        return getattr(self.method, name)


@functools.partial(jax.jit, static_argnames="graphdef", donate_argnames="cache")
def exact_segment(
    graphdef: Any, params: Any, cache: qwen35.Cache, tokens: Array, targets: Array
) -> tuple[qwen35.Cache, Array, TokenMetrics]:
    """Reads tokens [N, S]: (cache, logits [N, S, vocabulary], metrics [N, S])."""
    logits, cache = qwen35.prefill(nnx.merge(graphdef, params), tokens, cache)
    return cache, logits, compare(logits, logits, targets)


@functools.partial(jax.jit, static_argnames="graphdef", donate_argnames="cache")
def method_segment(
    graphdef: Any, params: Any, cache: qwen35.Cache, tokens: Array, targets: Array, reference: Array
) -> tuple[qwen35.Cache, TokenMetrics]:
    """Reads tokens [N, S] and compares with the logits of `exact_segment`: (cache, metrics [N, S])."""
    logits, cache = qwen35.prefill(nnx.merge(graphdef, params), tokens, cache)
    return cache, compare(logits, reference, targets)


@jax.jit
def state_errors(cache: qwen35.Cache, exact: qwen35.Cache) -> Array:
    """||S^ - S|| / ||S|| for every head: fp32 [L, N, H]. 0 where both are zero, infinite where only S is."""
    errors = []
    for state, truth in zip(qwen35.recurrent_states(cache), qwen35.recurrent_states(exact), strict=True):
        distance, size = (jnp.linalg.norm(x, axis=(-2, -1)) for x in (state - truth, truth))
        errors.append(jnp.where(distance == jnp.float32(0), distance, distance / size))
    return jnp.stack(errors)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Progress:
    """All that a run has computed so far: a cache and a tally for each method, `exact` first."""

    caches: list[qwen35.Cache]
    tallies: list[Tally]


class _Programs(NamedTuple):
    """The compiled programs of one method: `exact_segment` or `method_segment`, and `state_errors`."""

    decode: Any
    state_errors: Any


class Lockstep:
    """Streams, methods and their compiled programs."""

    def __init__(
        self, model: qwen35.Model, methods: Sequence[lq.Method | lq.Policy], streams: Streams, *, segment: int,
        measure_at: list[int],
    ):  # fmt: skip
        """Computes nothing yet.

        Args:
          model: The model, in the dtype in which it is to be run.
          methods: `exact`, then those to compare with it.
          streams: The streams, of a whole number of segments.
          segment: Tokens per segment.
          measure_at: Ends of segments at which states are compared.
        """
        num_tokens = streams.tokens.shape[1]
        if num_tokens % segment:
            raise ValueError(f"--num_tokens ({num_tokens}) must be a multiple of --segment ({segment})")
        self.streams, self.segment, self.measure_at = streams, segment, measure_at
        self.names = [method.name for method in methods]
        self.methods = list(methods)
        self.config = model.config
        self.graphdef, self.params = nnx.split(model)
        self._targets = np.roll(streams.tokens, -1, axis=1)
        self._programs: list[_Programs] = []
        self._workers = os.cpu_count() if jax.default_backend() == "cpu" else 1

    @property
    def num_segments(self) -> int:
        return self.streams.tokens.shape[1] // self.segment

    def start(self) -> Progress:
        """Empty caches and tallies."""
        num_streams, num_tokens = self.streams.tokens.shape
        empty = tallies.empty_tally(
            num_streams=num_streams, num_tokens=num_tokens, num_answers=len(self.streams.answers),
            num_positions=len(self.measure_at), num_layers=self.config.num_linear_layers,
            num_heads=self.config.linear_num_value_heads,
        )  # fmt: skip
        return Progress([self._fresh_cache(method) for method in self.methods], [empty] * len(self.methods))

    def compile(self) -> None:
        """Compiles one program per method, and one that compares its states with those of `exact`."""
        tokens = jax.ShapeDtypeStruct((len(self.streams.tokens), self.segment), jnp.int32)
        logits = jax.ShapeDtypeStruct((*tokens.shape, self.config.vocab_size), jnp.float32)
        caches = [jax.eval_shape(functools.partial(self._fresh_cache, method)) for method in self.methods]

        def compile_one(method: lq.Method | lq.Policy, cache: Any) -> _Programs:
            arguments = (self.graphdef, self.params, cache, tokens, tokens)
            is_exact = method is self.methods[0]
            decode = exact_segment.lower(*arguments) if is_exact else method_segment.lower(*arguments, logits)
            return _Programs(decode.compile(), state_errors.lower(cache, caches[0]).compile())

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = pool.map(compile_one, self.methods, caches)
            self._programs = list(tqdm(compiled, desc="compiling", total=len(caches), unit="method"))

    def run_segment(self, progress: Progress, index: int, tick: Callable[[], object] = lambda: None) -> Progress:
        """Reads one segment with every method in turn.

        Args:
          progress: After the segments before; its caches are consumed (donated).
          index: Of the segment.
          tick: Called after each method.
        """
        start = index * self.segment
        window = slice(start, start + self.segment)
        tokens, targets = (jnp.asarray(x[:, window]) for x in (self.streams.tokens, self._targets))
        answers, num_tokens = self.streams.answers, self.streams.tokens.shape[1]
        (exact, *programs), (exact_cache, *caches) = self._programs, progress.caches
        exact_cache, logits, exact_metrics = exact.decode(self.params, exact_cache, tokens, targets)

        def finish(program: _Programs, cache: qwen35.Cache, metrics: TokenMetrics, count: Tally) -> Tally:
            seen = {field: np.asarray(value) for field, value in vars(metrics).items()}
            count = tallies.add_segment(count, start, **seen, answers=answers, num_tokens=num_tokens)
            if window.stop in self.measure_at:
                errors = np.asarray(program.state_errors(cache, exact_cache))
                count = tallies.add_state_errors(count, self.measure_at.index(window.stop), errors)
            tick()
            return count

        def run_method(program: _Programs, cache: qwen35.Cache, count: Tally) -> tuple[qwen35.Cache, Tally]:
            cache, metrics = program.decode(self.params, cache, tokens, targets, logits)
            return cache, finish(program, cache, metrics, count)

        first = finish(exact, exact_cache, exact_metrics, progress.tallies[0])
        # The methods do not depend on each other, and small programs do not fill two cores by themselves.
        with concurrent.futures.ThreadPoolExecutor(self._workers) as pool:
            rest = list(pool.map(run_method, programs, caches, progress.tallies[1:]))
        return Progress([exact_cache, *(cache for cache, _ in rest)], [first, *(count for _, count in rest)])

    def state_bytes(self, progress: Progress) -> list[dict[str, float]]:
        """Bytes per state element of each method: at rest, active, and held by the live arrays (which must agree)."""
        result = []
        for cache in progress.caches:
            layers = [layer for layer in cache.layers if isinstance(layer, RecurrentCache)]
            parts = [layer.method.state_bytes(layer.recurrent) for layer in layers]
            live = sum(leaf.nbytes for layer in layers for leaf in jax.tree.leaves(layer.recurrent))
            config = self.config
            elements = len(layers) * len(self.streams.tokens) * config.linear_num_value_heads
            elements *= config.linear_key_head_dim * config.linear_value_head_dim
            sums = {name: sum(part[name] for part in parts) / elements for name in parts[0]}
            result.append({**sums, "live": live / elements})
        return result

    def _fresh_cache(self, method: lq.Method | lq.Policy) -> qwen35.Cache:
        num_streams, num_tokens = self.streams.tokens.shape
        layers = [i for i, kind in enumerate(self.config.layer_types) if kind == LINEAR]
        methods = [TokenByToken(method.method(i) if isinstance(method, lq.Policy) else method) for i in layers]
        return qwen35.init_cache(self.config, batch=num_streams, max_length=num_tokens, method=methods)
