"""A policy: how each layer of a model (and each head, where that was asked for) stores its state. Saved as JSON.

policy = lq.plan_policy(traces, "leapquant-int8")
policy.save("policy.json")
cache = qwen35.init_cache(config, batch=1, max_length=4096, method=lq.Policy.load("policy.json"))
"""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from leapquant_jax.config import LeapConfig
from leapquant_jax.methods import LeapMethod, Method
from leapquant_jax.mixed import HeadGroup, MixedMethod

_FORMAT = "leapquant-policy"
_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """How one layer is stored, and what the planner saw of that choice.

    Attributes:
      layer: index of the layer in its model.
      groups: one group of all heads (`heads=None`), or groups that name each head once.
      at_rest, total: bytes of one request in this layer, as `state_bytes` counts them; None if never planned.
      head_errors: relative error of every head on the traces, root mean square over prompts; () if never planned.
    """

    layer: int
    groups: tuple[HeadGroup, ...]
    at_rest: int | None = None
    total: int | None = None
    head_errors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if type(self.layer) is not int or self.layer < 0:
            raise ValueError(f"layer must be an index >= 0, got {self.layer!r}")
        if not self.groups:
            raise ValueError(f"layer {self.layer} has no group of heads: give at least one HeadGroup")
        self.method("")  # checks that the groups fit together

    @property
    def error(self) -> float:
        """Root mean square over heads of the planned error; NaN if never planned."""
        if not self.head_errors:
            return math.nan
        return math.sqrt(sum(error**2 for error in self.head_errors) / len(self.head_errors))

    @property
    def worst_head(self) -> int | None:
        """The head of the largest error."""
        return max(range(len(self.head_errors)), key=self.head_errors.__getitem__) if self.head_errors else None

    def method(self, name: str) -> Method:
        """The state method of this layer."""
        if len(self.groups) == 1 and self.groups[0].heads is None:
            return LeapMethod(self.groups[0].config, name)
        return MixedMethod(self.groups, name)


@dataclasses.dataclass(frozen=True)
class Policy:
    """State methods by layer; hashable, so it can be static under jit.

    Attributes:
      layers: choices, ascending by layer, each layer once.
      default: for layers that have no choice; None refuses them.
      measure: which error the choices' `head_errors` are, "detail", "output" or "state".
      title: for people.
    """

    layers: tuple[LayerChoice, ...]
    default: LeapConfig | None = None
    measure: str = "detail"
    title: str = "policy"

    def __post_init__(self) -> None:
        indices = [choice.layer for choice in self.layers]
        if indices != sorted(set(indices)):
            raise ValueError(f"layers must be ascending, each once, got {indices}")
        if not self.layers and self.default is None:
            raise ValueError("the policy is empty: give choices for layers, or a default")

    @classmethod
    def of(cls, configs: Mapping[int, LeapConfig], default: LeapConfig | None = None) -> Self:
        """A policy by hand: one config per layer index."""
        choices = (LayerChoice(layer=layer, groups=(HeadGroup(configs[layer]),)) for layer in sorted(configs))
        return cls(tuple(choices), default)

    @property
    def name(self) -> str:
        """The title and eight digits that tell policies apart by what they store (not by errors or bytes)."""
        stored = [{"layer": c.layer, "groups": _groups_to_json(c.groups)} for c in self.layers]
        digest = hashlib.sha256(json.dumps([stored, _config_to_json(self.default)]).encode())
        return f"{self.title}-{digest.hexdigest()[:8]}"

    def choice(self, layer: int) -> LayerChoice:
        """The choice for a layer.

        Raises:
          ValueError: the policy has none, and no default.
        """
        for choice in self.layers:
            if choice.layer == layer:
                return choice
        if self.default is None:
            raise ValueError(
                f"the policy has no choice for layer {layer}, only for {[c.layer for c in self.layers]}: plan it from "
                "traces of every recurrent layer, or give the policy a default"
            )
        return LayerChoice(layer=layer, groups=(HeadGroup(self.default),))

    def method(self, layer: int) -> Method:
        """The state method of a layer, by the layer's index in its model.

        Raises:
          ValueError: the policy has no choice for it, and no default.
        """
        return self.choice(layer).method(self.name)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the policy as JSON; a file of that name is replaced as a whole."""
        fields = {
            "format": _FORMAT,
            "version": _VERSION,
            "title": self.title,
            "measure": self.measure,
            "default": _config_to_json(self.default),
            "layers": [
                {**_own_fields(choice), "groups": _groups_to_json(choice.groups)} for choice in self.layers
            ],
        }  # fmt: skip
        temporary = Path(f"{os.fspath(path)}.tmp")
        temporary.write_text(json.dumps(fields, indent=1, allow_nan=False) + "\n")
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Reads what `save` wrote.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it is not a policy, of another version, or has missing, unknown or invalid fields; the message
            says where.
        """
        try:
            fields = json.loads(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not JSON (a damaged file?): {error}") from error
        try:
            return cls(**_policy_fields(fields))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _policy_fields(fields: Any) -> dict[str, Any]:
    """The arguments of `Policy` from parsed JSON."""
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        raise ValueError(f'no policy: expected an object with "format": "{_FORMAT}"')
    if fields.get("version") != _VERSION:
        raise ValueError(
            f"policy of version {fields.get('version')!r}, this library reads version {_VERSION}: plan it again"
        )
    _check_fields(fields, ("format", "version", "title", "measure", "default", "layers"), "the policy")
    if fields["measure"] not in ("detail", "output", "state"):
        raise ValueError(f'measure must be "detail", "output" or "state", got {fields["measure"]!r}')
    if not isinstance(fields["title"], str):
        raise ValueError(f"title must be a string, got {fields['title']!r}")
    default = None if fields["default"] is None else _config_from_json(fields["default"], "default")
    layers = tuple(map(_choice_from_json, _list(fields, "layers")))
    return {"layers": layers, "default": default, "measure": fields["measure"], "title": fields["title"]}


def _choice_from_json(fields: Any) -> LayerChoice:
    where = f"layer {fields.get('layer')!r}" if isinstance(fields, dict) else "a layer"
    _check_fields(fields, [field.name for field in dataclasses.fields(LayerChoice)], where)
    for name in ("at_rest", "total"):
        if fields[name] is not None and (type(fields[name]) is not int or fields[name] < 0):
            raise ValueError(f"{where}: {name} must be a number of bytes or null, got {fields[name]!r}")
    errors = _list(fields, "head_errors")
    if not all(isinstance(error, float | int) and not isinstance(error, bool) for error in errors):
        raise ValueError(f"{where}: head_errors must be numbers, got {errors!r}")
    groups = []
    for group in _list(fields, "groups"):
        _check_fields(group, ("heads", "config"), f"{where}, a group")
        heads = None if group["heads"] is None else tuple(_list(group, "heads"))
        groups.append(HeadGroup(_config_from_json(group["config"], where), heads))
    return LayerChoice(**{**fields, "groups": tuple(groups), "head_errors": tuple(map(float, errors))})


def _config_from_json(fields: Any, where: str) -> LeapConfig:
    _check_fields(fields, [field.name for field in dataclasses.fields(LeapConfig)], f"{where}, config")
    try:
        return LeapConfig(**fields)
    except ValueError as error:
        raise ValueError(f"{where}, config: {error}") from error


def _config_to_json(config: LeapConfig | None) -> dict[str, Any] | None:
    return None if config is None else dataclasses.asdict(config)


def _groups_to_json(groups: tuple[HeadGroup, ...]) -> list[dict[str, Any]]:
    return [{"heads": group.heads, "config": _config_to_json(group.config)} for group in groups]


def _own_fields(choice: LayerChoice) -> dict[str, Any]:
    return {field.name: getattr(choice, field.name) for field in dataclasses.fields(choice)}


def _list(fields: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(fields[name], list):
        raise ValueError(f"{name} must be a list, got {fields[name]!r}")
    return fields[name]


def _check_fields(fields: Any, expected: Any, where: str) -> None:
    """Raises ValueError unless `fields` is an object with exactly the expected keys."""
    if not isinstance(fields, dict):
        raise ValueError(f"{where} must be an object, got {fields!r}")
    missing, unknown = sorted(set(expected) - set(fields)), sorted(set(fields) - set(expected))
    if missing or unknown:
        raise ValueError(f"{where} lacks {missing} and has unknown {unknown}: plan it again or correct the file")
