"""Configs: frozen dataclasses, read from a Python file and changed from the command line, one clear line an error."""

from __future__ import annotations

import ast
import dataclasses
import math
import runpy
import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from braintrace_core.rules import Rule, get_rule

from ..mesh import MeshKind, parse_mesh
from ..tasks import Task
from .networks import Network

__all__ = ["Config", "ConfigError", "from_texts", "load_config", "parse_rule", "with_overrides"]


_NOT_NEGATIVE = "window warmup seed evaluate_every checkpoint_every log_every clip learning_rate".split()
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


class ConfigError(ValueError):
    """Something in a config, or an override, is not what it must be."""


@dataclass(frozen=True)
class Config:
    """A run: what to learn, with what, and how long.

    Main attributes:
      name: of the run; its folder is ``runs/<name>`` unless another is given.
      task, network: what is learnt, and by what.
      rule: the learning rule, with arguments after a colon: ``"pp_prop"``, ``"e_prop:kappa=0.9,feedback=random"``.
      window: time steps between two updates; 0 for all of a batch.
      batch_size: examples side by side.
      steps: batches to train on.

    Other attributes:
      credit: ``"window"`` or ``"step"``.
      trace_dtype: dtype of the traces; empty for that of the parameters.
      learning_rate, clip: of Adam; the largest norm of a gradient (0 for any).
      warmup: first steps, in which the learning rate rises from zero.
      cooldown: last part of the steps, 0 to 1, in which it falls to zero.
      seed: of parameters and data.
      evaluate_every, checkpoint_every, log_every: in steps; 0 for only at the end.
      keep: how many checkpoints to keep.
      mesh: devices by axis, ``"data=4,model=2"`` (axes ``data``, ``fsdp``, ``model``); empty for one device.
      mesh_kind: ``"auto"`` or ``"explicit"``, as JAX has them.
      sharding: pairs of a regular expression over paths of parameters and the mesh axes that divide them,
        ``(("kernel", (None, "model")),)``; what none matches is whole on every device.
    """

    name: str
    task: Task
    network: Network
    rule: str = "d_rtrl"
    window: int = 16
    batch_size: int = 32
    steps: int = 1000
    credit: str = "window"
    trace_dtype: str = ""
    learning_rate: float = 1e-3
    clip: float = 1.0
    warmup: int = 0
    cooldown: float = 0.0
    seed: int = 0
    evaluate_every: int = 200
    checkpoint_every: int = 200
    log_every: int = 10
    keep: int = 3
    mesh: str = ""
    mesh_kind: str = "auto"
    sharding: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def __post_init__(self) -> None:
        for part in (self, self.task, self.network):
            _check_types(part)
        for field in ("batch_size", "steps", "keep"):
            if getattr(self, field) < 1:
                raise ConfigError(f"`{field}` must be at least 1, got {getattr(self, field)}.")
        for field in _NOT_NEGATIVE:
            if not 0 <= getattr(self, field) < math.inf:
                raise ConfigError(f"`{field}` must be finite and not negative, got {getattr(self, field)}.")
        if not 0 <= self.cooldown <= 1:
            raise ConfigError(f"`cooldown` is a part of the steps, 0 to 1, got {self.cooldown}.")
        if self.credit not in ("window", "step"):
            raise ConfigError(f'`credit` is "window" or "step", got {self.credit!r}.')
        try:
            np.dtype(self.trace_dtype or "float32")
        except TypeError:
            raise ConfigError(f"`trace_dtype` is a dtype such as bfloat16, got {self.trace_dtype!r}.") from None
        parse_rule(self.rule)
        if self.mesh_kind not in get_args(MeshKind):
            raise ConfigError(f'`mesh_kind` is "auto" or "explicit", got {self.mesh_kind!r}.')
        try:
            parse_mesh(self.mesh)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def as_dict(self) -> dict[str, Any]:
        """The config as what JSON knows."""
        found = dataclasses.asdict(self)
        for name in ("task", "network"):
            found[name] = {"kind": type(getattr(self, name)).__name__, **found[name]}
        return found


def load_config(path: str | Path) -> Config:
    """The ``config`` that a Python file defines."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"There is no config {path}.")
    try:
        found = runpy.run_path(str(path)).get("config")
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"The config {path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(found, Config):
        raise ConfigError(f"The config {path} must define `config = Config(...)`.")
    return found


def with_overrides(config: Any, overrides: Sequence[tuple[str, str]]) -> Any:
    """A config with some fields replaced by what texts say: ``[("steps", "2000"), ("network.units", "64")]``."""
    for name, text in overrides:
        config = _override(config, name.replace("-", "_").split("."), text, name)
    return config


def from_texts(kind: type, given: dict[str, str]) -> Any:
    """A dataclass of what texts say: ``from_texts(Processes, {"num-processes": "2", ...})``."""
    hints = get_type_hints(kind)
    names = {name.replace("-", "_"): text for name, text in given.items()}
    return kind(**{name: _converted(text, hints[name], name) for name, text in names.items()})


def parse_rule(text: str) -> Rule:
    """A rule from its name and arguments.

    >>> parse_rule("pp_prop:decay=0.8")
    PPProp(decay=0.8)
    """
    name, _, rest = text.partition(":")
    try:
        rule = get_rule(name)
        arguments = {}
        for part in filter(None, rest.split(",")):
            key, is_given, value = part.partition("=")
            if not is_given:
                raise ConfigError(f"The rule {text!r}: write arguments as `name=value`, got {part!r}.")
            arguments[key.strip()] = _literal(value.strip())
        return replace(rule, **arguments)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error


def _check_types(part: Any) -> None:
    """Refuse values that are not of their field's type."""
    hints = get_type_hints(type(part))
    for field in dataclasses.fields(part):
        value, wanted = getattr(part, field.name), hints[field.name]
        if isinstance(wanted, type) and not _is_a(value, wanted):
            kind = _WORDS.get(wanted, f"a {wanted.__name__}")
            raise ConfigError(f"`{field.name}` of {type(part).__name__} is {kind}, got {value!r}.")


def _is_a(value: Any, wanted: type) -> bool:
    if isinstance(value, bool):
        return wanted is bool
    return isinstance(value, (int, float) if wanted is float else wanted)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _override(config: Any, path: list[str], text: str, name: str) -> Any:
    hints = get_type_hints(type(config))
    first, *rest = path
    fields = {field.name for field in dataclasses.fields(config)}
    if first not in fields:
        raise ConfigError(f"There is no setting `{name}`: {type(config).__name__} has {', '.join(sorted(fields))}.")
    value = getattr(config, first)
    if rest:
        if not dataclasses.is_dataclass(value):
            raise ConfigError(f"`{first}` has no settings of its own, so `{name}` means nothing.")
        return replace(config, **{first: _override(value, rest, text, name)})
    if dataclasses.is_dataclass(value):
        raise ConfigError(f"`{first}` is a {type(value).__name__}: change its parts, as in `--{first}.<setting>`.")
    try:
        return replace(config, **{first: _converted(text, hints[first], name)})
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"`{name}`: {error}") from error


def _converted(text: str, wanted: Any, name: str) -> Any:
    """A text as a value of a field's type."""
    if get_origin(wanted) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(wanted) if kind is not type(None)]
        if text in ("none", "None") and len(kinds) < len(get_args(wanted)):
            return None
        wanted = kinds[0]
    if get_origin(wanted) is not None and not isinstance(wanted, type):
        return text  # a choice among words, which the config checks itself
    if wanted is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"`{name}` is true or false, got {text!r}.")
        return text.lower() == "true"
    if wanted in (int, float):
        try:
            return wanted(text)
        except ValueError:
            raise ConfigError(f"`{name}` is {_WORDS[wanted]}, got {text!r}.") from None
    return text
