"""Planning a policy: replay candidates on traces, then spend a budget of bytes where it lowers the error most.

    minimise  sum over items of error(item, choice)^2    subject to    sum over items of bytes(item, choice) <= budget

An item is a layer, or one head of it; its error is relative to its own outputs or states (see `measure.py`). Errors of
different heads are nearly independent, so their squares add. This is a multiple-choice knapsack, solved exactly by
dynamic programming over bytes (a Lagrangian over the convex hull would miss the choices that lie above it).
"""

import collections
import concurrent.futures
import dataclasses
import math
import numbers
import os
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from leapquant_jax.config import LeapConfig, check_config
from leapquant_jax.measure import head_errors
from leapquant_jax.methods import get_method
from leapquant_jax.mixed import HeadGroup
from leapquant_jax.policy import LayerChoice, Policy
from leapquant_jax.state import state_bytes
from leapquant_jax.trace import Trace, check_trace
from leapquant_jax.transitions import init_state

Measure = Literal["detail", "output", "state"]
Count = Literal["at_rest", "total"]
Granularity = Literal["layer", "head"]

_MOST_UNITS = 1 << 16  # of bytes in the knapsack; sizes without a large common divisor are rounded up to so many


def default_candidates(key_dim: int, value_dim: int) -> tuple[LeapConfig, ...]:
    """What the planner chooses from unless told otherwise; for 128 x 128 from 11,264 to 32,768 bytes a head at rest.

    A plain fp16 state, and the named methods with 0 to 8 compensators, as far as they fit the head: 8 bits, 6 with clipped
    scales, 4 with a Hadamard rotation too (where `key_dim` allows it). Not offered is what can lower the errors that a plan
    goes by and yet loses what was written under rarely used keys: smoothing below 1, and a rotation at 8 and 6 bits. An
    fp16 state that overflows on a trace has an infinite error there and is never chosen.
    """
    rotation = "hadamard" if key_dim & (key_dim - 1) == 0 else None
    options = {8: {}, 6: dict(clip="mse"), 4: dict(clip="mse", rotation=rotation)}
    plain = LeapConfig(bits=None, boundary_dtype="float16", rank=0, smoothing=0)
    widths = ((8, 8), (8, 4), (8, 2), (8, 0), (6, 6), (6, 2), (6, 0), (4, 6), (4, 4))
    named = [LeapConfig(bits=bits, rank=rank, smoothing=1, **options[bits]) for bits, rank in widths]
    candidates = [plain, *named]
    return tuple(config for config in candidates if config.rank < min(key_dim, value_dim))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """What a plan may cost, for one request in all planned layers together.

    With `bytes` the error is made as small as they allow; without, the bytes as few as `error` and `worst_head` allow.

    Attributes:
      bytes: most bytes.
      error: largest root mean square over all heads (and prompts) of the relative error.
      worst_head: largest error of any one head (root mean square over prompts).
      no_worse_than: a candidate whose error no head may exceed. The error as a whole can fall while a head that matters
        gets worse; this forbids it.
      count: which bytes: "at_rest" (a checkpoint with an empty ring) or "total" (with the ring, what decoding holds).
    """

    bytes: int | None = None
    error: float | None = None
    worst_head: float | None = None
    no_worse_than: LeapConfig | None = None
    count: Count = "at_rest"

    def __post_init__(self) -> None:
        if self.bytes is None and self.error is None and self.worst_head is None:
            raise ValueError("the budget is empty: give bytes, error or worst_head")
        if self.bytes is not None and self.error is not None:
            raise ValueError("give bytes or error: with both, nothing would be left to minimise")
        for name in ("bytes", "error", "worst_head"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value!r}")
        if self.count not in ("at_rest", "total"):
            raise ValueError(f'count must be "at_rest" or "total", got {self.count!r}')


@dataclasses.dataclass(frozen=True)
class Measurements:
    """What candidates cost on traces; the slow part of planning, reusable for many budgets.

    Attributes:
      candidates: configs, C of them.
      errors: by layer, squared relative errors, fp64 [C, H], mean over prompts; inf where a candidate diverged.
      sizes: by layer, the keyword arguments of `init_state` for one request.
      measure: "detail", "output" or "state"; see `HeadErrors`.
    """

    candidates: tuple[LeapConfig, ...]
    errors: Mapping[int, np.ndarray]
    sizes: Mapping[int, Mapping]
    measure: Measure

    def only(self, candidates: Sequence[LeapConfig]) -> "Measurements":
        """The same with fewer candidates."""
        rows = [self.candidates.index(config) for config in candidates]
        errors = {layer: error[rows] for layer, error in self.errors.items()}
        return dataclasses.replace(self, candidates=tuple(candidates), errors=errors)

    def squared_errors(self, choice: LayerChoice) -> np.ndarray:
        """Of every head of a layer stored as in `choice`, made of these candidates: fp64 [H]."""
        squared = self.errors[choice.layer]
        found = np.empty(squared.shape[1])
        for group in choice.groups:
            heads = slice(None) if group.heads is None else np.array(group.heads)
            found[heads] = squared[self.candidates.index(group.config), heads]
        return found

    def bytes_of(self, method: str) -> dict[str, int]:
        """`state_bytes` of one request in all layers under one method, by name."""
        chosen = get_method(method)
        parts = [
            chosen.state_bytes(jax.eval_shape(lambda sizes=sizes: chosen.init(**sizes)))
            for sizes in self.sizes.values()
        ]
        return {name: sum(part[name] for part in parts) for name in parts[0]}


def plan_policy(
    traces: Sequence[Trace],
    budget: int | float | str | Budget,
    *,
    candidates: Sequence[LeapConfig] | None = None,
    by: Granularity = "layer",
    measure: Measure = "detail",
    default: LeapConfig | None = None,
) -> Policy:
    """Chooses how each layer (or head) stores its state.

    Args:
      traces: of every layer to plan, one or more prompts each; `trace.layer` says which. Plan on other text than you
        judge on.
      budget: an int is bytes at rest of one request, all layers together; a float a relative error (see
        `Budget.error`); a str a method name, whose bytes at rest may be used; or a `Budget`.
      candidates: configs to choose from; `default_candidates` of the heads' size if None. `Budget.no_worse_than` is added.
        On a CPU each takes some ten seconds to compile.
      by: "layer": one config per layer. "head": one per head; layers then become `MixedMethod`s, smaller at the same
        error but slower, because each group of heads is a call of its own.
      measure: which error is planned and reported, "detail", "output" or "state"; see `HeadErrors`.
      default: config of the layers without a trace; None refuses them when the policy is used.

    Raises:
      ValueError: nothing fits the budget (the message gives the smallest one that would do), or the traces or
        candidates are unusable.
    """
    compared = budget.no_worse_than if isinstance(budget, Budget) else None
    also = () if compared is None else (compared,)
    measured = measure_candidates(traces, candidates, measure=measure, also=also)
    return plan(measured, budget, by=by, default=default)


def measure_candidates(
    traces: Sequence[Trace],
    candidates: Sequence[LeapConfig] | None = None,
    *,
    measure: Measure = "detail",
    also: Sequence[LeapConfig] = (),
) -> Measurements:
    """Replays every candidate on every trace, token by token. See `plan_policy`.

    Prompts of one layer that have the same length run as one batch; layers of the same shape share compiled programs.

    Args:
      traces, candidates, measure: see `plan_policy`.
      also: more candidates, beside those or the default ones.
    """
    if measure not in ("detail", "output", "state"):
        raise ValueError(f'measure must be "detail", "output" or "state", got {measure!r}')
    if not traces:
        raise ValueError("no traces: record at least one of every layer to plan")
    by_layer: dict[int, list[Trace]] = collections.defaultdict(list)
    for trace in traces:
        check_trace(trace)
        by_layer[trace.layer].append(trace)
    sizes = {}
    for layer, group in sorted(by_layer.items()):
        shapes = [{**trace.sizes, "batch": 1} for trace in group]
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError(f"the traces of layer {layer} differ in heads or gate: {shapes}")
        sizes[layer] = shapes[0]
    if candidates is None:
        candidates = default_candidates(*(min(s[dim] for s in sizes.values()) for dim in ("key_dim", "value_dim")))
    candidates = tuple(dict.fromkeys([*candidates, *also]))
    if not candidates:
        raise ValueError("no candidates: give at least one LeapConfig")
    for config in candidates:
        for shape in sizes.values():
            check_config(config).check_dims(shape["key_dim"], shape["value_dim"])

    batches = {layer: _batches(by_layer[layer]) for layer in sizes}

    def squared(config: LeapConfig) -> dict[int, np.ndarray]:
        found = {}
        for layer, group in batches.items():
            rows = np.concatenate([getattr(head_errors(config, trace), measure) for trace in group])
            mean = (rows**2).mean(axis=0)
            found[layer] = np.where(np.isfinite(mean), mean, np.inf)
        return found

    # Nearly all of the time on a CPU is compilation, which threads share.
    with concurrent.futures.ThreadPoolExecutor(min(len(candidates), os.cpu_count() or 1)) as pool:
        found = list(pool.map(squared, candidates))
    errors = {layer: np.stack([one[layer] for one in found]) for layer in sizes}
    return Measurements(candidates, errors, sizes, measure)


def plan(
    measured: Measurements,
    budget: int | float | str | Budget,
    *,
    by: Granularity = "layer",
    default: LeapConfig | None = None,
) -> Policy:
    """`plan_policy` from measurements."""
    if by not in ("layer", "head"):
        raise ValueError(f'by must be "layer" or "head", got {by!r}')
    budget = _as_budget(budget, measured)
    layers, errors, sizes = _items(measured, by, budget)
    chosen = _knapsack(errors, sizes, budget, num_heads=sum(e.shape[1] for e in measured.errors.values()))
    choices = []
    for layer in measured.errors:
        mine = [candidate for candidate, of in zip(chosen, layers, strict=True) if of == layer]
        choices.append(_choice(measured, layer, mine))
    return Policy(tuple(choices), default, measured.measure)


def _as_budget(budget: int | float | str | Budget, measured: Measurements) -> Budget:
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, str):
        return Budget(bytes=measured.bytes_of(budget)["at_rest"])
    if isinstance(budget, numbers.Integral) and not isinstance(budget, bool):
        return Budget(bytes=int(budget))
    if isinstance(budget, float) and 0 < budget < 1:
        return Budget(error=budget)
    raise ValueError(
        f"budget must be an int (bytes), a float in (0, 1) (a relative error), a method name or a Budget, got {budget!r}"
    )


def _items(measured: Measurements, by: Granularity, budget: Budget) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Layer of each item [N], and of each item and candidate the squared error and the bytes [N, C].

    A head by itself is charged its own copy of the keys in the ring; where heads of one key head are stored alike they
    share it, so a plan never takes more than it was charged.
    """
    layers, errors, sizes = [], [], []
    for layer, squared in measured.errors.items():
        most = np.full(squared.shape[1], np.inf if budget.worst_head is None else budget.worst_head**2)
        if budget.no_worse_than is not None:
            if budget.no_worse_than not in measured.candidates:
                raise ValueError(f"the budget compares with {budget.no_worse_than}, which was not measured: add it")
            most = np.minimum(most, squared[measured.candidates.index(budget.no_worse_than)])
        allowed = np.where(squared <= most, squared, np.inf)
        shape = dict(measured.sizes[layer])
        if by == "head":
            shape |= {"num_heads": 1, "num_key_heads": 1}
        size = np.array([_config_bytes(config, shape)[budget.count] for config in measured.candidates])
        for error in allowed.T if by == "head" else [allowed.sum(axis=1)]:
            layers.append(layer)
            errors.append(error)
            sizes.append(size)
    return layers, np.stack(errors), np.stack(sizes)


def _knapsack(errors: np.ndarray, sizes: np.ndarray, budget: Budget, *, num_heads: int) -> list[int]:
    """The candidate of each item, [N] of indices into [N, C] errors and sizes."""
    possible = np.isfinite(errors)
    if not possible.any(axis=1).all():
        limit = "a finite error" if budget.worst_head is None else f"an error below worst_head={budget.worst_head:g}"
        raise ValueError(f"no candidate has {limit} on some head: add wider candidates, or allow more")
    fewest = int(np.where(possible, sizes, np.iinfo(np.int64).max).min(axis=1).sum())
    if budget.bytes is not None and fewest > budget.bytes:
        raise ValueError(
            f"the candidates need at least {fewest:,} bytes {budget.count}, the budget is {budget.bytes:,}"
        )
    least = errors.min(axis=1).sum()
    if budget.error is not None and least > num_heads * budget.error**2:
        raise ValueError(
            f"the candidates' smallest error is {math.sqrt(least / num_heads):.3g}, the budget is {budget.error:g}: add "
            "wider candidates, or allow more"
        )
    most = int(sizes.max(axis=1).sum())
    limit = most if budget.bytes is None else min(budget.bytes, most)
    unit = max(int(np.gcd.reduce(sizes, axis=None)), -(-limit // _MOST_UNITS))
    costs, capacity = -(-sizes // unit), limit // unit

    best = np.zeros(capacity + 1)  # least error of the items so far within so many units
    picks = np.zeros((len(errors), capacity + 1), np.int16)
    for item, (error, cost) in enumerate(zip(errors, costs, strict=True)):
        new = np.full(capacity + 1, np.inf)
        for candidate in range(len(error)):
            if cost[candidate] <= capacity:
                with_it = np.full(capacity + 1, np.inf)
                with_it[cost[candidate] :] = best[: capacity + 1 - cost[candidate]] + error[candidate]
                better = with_it < new
                new[better], picks[item, better] = with_it[better], candidate
        best = new
    allowed = best[-1] if budget.bytes is not None else num_heads * (budget.error or math.inf) ** 2
    enough = np.flatnonzero(np.isfinite(best) & (best <= allowed))  # the fewest units that do as well
    if not len(enough):
        raise ValueError(f"{budget} is too tight by less than {len(errors)} x {unit} bytes: allow a little more")
    at, chosen = int(enough[0]), []
    for item in reversed(range(len(errors))):
        chosen.append(int(picks[item, at]))
        at -= costs[item, chosen[-1]]
    return chosen[::-1]


def _choice(measured: Measurements, layer: int, chosen: list[int]) -> LayerChoice:
    """One layer's choice from one candidate for all heads, or one for each."""
    errors = measured.errors[layer]
    num_heads = errors.shape[1]
    of_heads = chosen if len(chosen) == num_heads else chosen * num_heads
    distinct = sorted(set(of_heads))
    groups = [
        HeadGroup(
            measured.candidates[candidate],
            None if len(distinct) == 1 else tuple(h for h in range(num_heads) if of_heads[h] == candidate),
        )
        for candidate in distinct
    ]
    choice = LayerChoice(
        layer=layer, groups=tuple(groups),
        head_errors=tuple(math.sqrt(errors[candidate, head]) for head, candidate in enumerate(of_heads)),
    )  # fmt: skip
    method = choice.method("")
    size = method.state_bytes(jax.eval_shape(lambda: method.init(**measured.sizes[layer])))
    return dataclasses.replace(choice, at_rest=size["at_rest"], total=size["total"])


def _config_bytes(config: LeapConfig, shape: Mapping) -> dict[str, int]:
    return state_bytes(config, jax.eval_shape(lambda: init_state(config, **shape)))


def _batches(traces: Sequence[Trace]) -> list[Trace]:
    """Traces of one layer, those of the same length as the rows of one."""
    by_length: dict[int, list[Trace]] = collections.defaultdict(list)
    for trace in traces:
        by_length[trace.q.shape[1]].append(trace)
    return [
        jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *(dataclasses.replace(t, layer=0) for t in group))
        for group in by_length.values()
    ]
