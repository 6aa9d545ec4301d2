"""The records of the policy experiment: pure functions of traces."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

import leapquant_jax as lq
from experiments import policy_report

GRANULARITIES: tuple[Literal["layer", "head"], ...] = ("layer", "head")
_FRONTIER_POINTS = 40


def study(
    by_prompt: Mapping[str, Sequence[lq.Trace]], budgets: Sequence[str], measure: Any
) -> tuple[list[dict], dict[str, lq.Policy]]:
    """Measures the default candidates and the budgets' own configs, and plans for every budget.

    Args:
      by_prompt: Traces of the same layers for every prompt.
      budgets: Names of windowed methods.
      measure: see `lq.plan_policy`.

    Returns:
      (records, policies by file name).
    """
    dense = next(iter(by_prompt.values()))[0].dense
    named: dict[str, lq.LeapConfig] = {name: getattr(lq.get_method(name), "config") for name in budgets}  # noqa: B009
    defaults = lq.default_candidates(dense.shape[2], dense.shape[3])
    candidates = tuple(dict.fromkeys([*named.values(), *defaults]))
    measured = {
        prompt: lq.measure_candidates(some, candidates, measure=measure)
        for prompt, some in tqdm(by_prompt.items(), desc="replaying", unit="prompt")
    }
    overall = _together(measured.values())
    records = [*_candidates(overall), *_frontier(overall.only(defaults))]
    policies = {}
    for budget, config in named.items():
        limit = overall.bytes_of(budget)["at_rest"]
        found = lq.plan(overall.only([config]), limit)
        records.append({"measure": "plan", "budget": budget, "by": "none", **_sizes(found), **_errors(found, overall)})
        for by in GRANULARITIES:
            title = f"{budget}-by-{by}"
            policy = policies[title] = dataclasses.replace(lq.plan(overall, limit, by=by), title=title)
            record = {"measure": "plan", "budget": budget, "by": by, "choices": _choices(policy)}
            records.append({**record, **_sizes(policy), **_errors(policy, overall)})
        records += _held_out(measured, budget, config, limit)
    return records, policies


def _candidates(measured: lq.Measurements) -> list[dict]:
    """Bytes of a head, and errors by layer and head, of every candidate."""
    records = []
    for config in measured.candidates:
        policy = lq.plan(measured.only([config]), 1 << 60)
        heads = sum(len(choice.head_errors) for choice in policy.layers)
        common = {
            "measure": "candidate", "config": policy_report.label(config),
            "at_rest_per_head": _sizes(policy)["at_rest"] // heads,
        }  # fmt: skip
        records += [
            {**common, "layer": choice.layer, "error": choice.error, "head_errors": choice.head_errors}
            for choice in policy.layers
        ]
    return records


def _frontier(measured: lq.Measurements) -> list[dict]:
    """The least error at rising budgets, by granularity."""
    heads = sum(error.shape[1] for error in measured.errors.values())
    configs = [lq.plan(measured.only([config]), 1 << 60) for config in measured.candidates]
    sizes = [_sizes(policy)["at_rest"] for policy in configs]
    records = []
    for limit in sorted({*sizes, *np.linspace(min(sizes), max(sizes), _FRONTIER_POINTS).astype(int).tolist()}):
        for by in GRANULARITIES:
            policy = lq.plan(measured, limit, by=by)
            error = _errors(policy, measured)["error"]
            at_rest = _sizes(policy)["at_rest"] / heads
            records.append({"measure": "frontier", "by": by, "at_rest_per_head": at_rest, "error": error})
    return records


def _held_out(
    measured: Mapping[str, lq.Measurements], budget: str, config: lq.LeapConfig, limit: int
) -> list[dict]:  # fmt: skip
    """Each prompt judged by plans made from the others."""
    records = []
    for prompt in measured if len(measured) > 1 else ():
        others = _together([one for name, one in measured.items() if name != prompt])
        before = _errors(lq.plan(others.only([config]), limit), measured[prompt])["error"]
        for by in GRANULARITIES:
            found = _errors(lq.plan(others, limit, by=by), measured[prompt])
            record = {"measure": "held_out", "budget": budget, "by": by, "prompt": prompt, "method_error": before}
            records.append({**record, **found})
    return records


def _together(measured: Any) -> lq.Measurements:
    """The measurements of several prompts as one."""
    first, *_ = measured = list(measured)
    errors = {layer: np.mean([one.errors[layer] for one in measured], axis=0) for layer in first.errors}
    return dataclasses.replace(first, errors=errors)


def _errors(policy: lq.Policy, measured: lq.Measurements) -> dict[str, float]:
    """Root mean square over all heads, the worst layer's, and the worst head's."""
    layers = [measured.squared_errors(choice) for choice in policy.layers]
    every = np.concatenate(layers)
    squared = {"error": every.mean(), "worst_layer": max(x.mean() for x in layers), "worst_head": every.max()}
    return {name: float(np.sqrt(value)) for name, value in squared.items()}


def _sizes(policy: lq.Policy) -> dict[str, int]:
    return {name: sum(getattr(choice, name) or 0 for choice in policy.layers) for name in ("at_rest", "total")}


def _choices(policy: lq.Policy) -> list[dict]:
    return [
        {
            "layer": choice.layer, "error": choice.error, "worst_head": max(choice.head_errors),
            "groups": [{"config": policy_report.label(group.config), "heads": group.heads} for group in choice.groups],
        }
        for choice in policy.layers
    ]  # fmt: skip
