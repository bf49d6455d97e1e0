"""Manifests: what is in a checkpoint, as JSON with its own checksum, and how it differs from what is wanted."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from typing import Any

import jax
import numpy as np

from .checks import leaf_paths
from .fingerprint import begin_fingerprints, describe, is_key

__all__ = ["Leaf", "Manifest", "begin_manifest", "differences", "named_leaves", "versions"]

_PACKAGES = ("flax", "jax", "jaxlib", "optax", "orbax-checkpoint")


@dataclass(frozen=True)
class Leaf:
    """An array of a checkpoint.

    Attributes:
      shape, dtype: of the array.
      fingerprint: of its bits.
      keys: the kind of random keys that it holds; None if it holds numbers.
    """

    shape: tuple[int, ...]
    dtype: str
    fingerprint: int
    keys: str | None = None


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint.

    Attributes:
      step: how many updates there were.
      leaves: by name.
      model: rule, credit and graph; from :func:`describe`.
      graph: a checksum of ``model``.
      data, config: the user's.
      metrics: numbers by name.
      versions: of the packages that wrote it.
    """

    step: int
    leaves: dict[str, Leaf]
    model: dict[str, Any]
    graph: str
    data: Any
    config: Any
    metrics: dict[str, float]
    versions: dict[str, str]

    def encode(self) -> dict[str, str]:
        """As text, with its checksum."""
        text = json.dumps(asdict(self))
        return {"manifest": text, "sha256": _sha256(text)}

    @classmethod
    def decode(cls, found: Any) -> Manifest:
        """From what :meth:`encode` gave; a ValueError if it is damaged."""
        if not isinstance(found, dict) or not all(isinstance(found.get(name), str) for name in ("manifest", "sha256")):
            raise ValueError("it has no manifest, or a damaged one")
        if _sha256(found["manifest"]) != found["sha256"]:
            raise ValueError("its manifest is damaged: the checksum does not fit")
        fields = json.loads(found["manifest"])
        leaves = {name: Leaf(**{**leaf, "shape": tuple(leaf["shape"])}) for name, leaf in fields["leaves"].items()}
        return cls(**{**fields, "leaves": leaves})


def begin_manifest(
    state: Any, data: Any, config: Any, metrics: Mapping[str, Any] | None, *, copy: bool
) -> Callable[[], tuple[dict[str, Any], Manifest]]:
    """A function that gives the arrays of a state by name, or copies of them, and waits for the manifest.

    What the user gave is checked at once, and copying begins; all else is left to the function, which may be called in
    another thread.
    """
    data, config, metrics = _checked("data", data), _checked("config", config), dict(metrics or {})
    for name, value in metrics.items():
        if np.ndim(value) or isinstance(value, str) or value is None:
            raise TypeError(f"The metric `{name}` must be one number, got {value!r}.")
    arrays, numbers = begin_fingerprints(_arrays(state), copy=copy)

    def finish() -> tuple[dict[str, Any], Manifest]:
        named, model = named_leaves(state), describe(state.opt_state)
        by_name = dict(zip(named, arrays, strict=True))
        leaves = {
            name: Leaf(
                tuple(leaf.shape), str(leaf.dtype), number, str(jax.random.key_impl(leaf)) if is_key(leaf) else None
            )
            for (name, leaf), number in zip(named.items(), numbers(), strict=True)
        }
        return by_name, Manifest(
            step=int(by_name["step"]),
            leaves=leaves,
            model=model,
            graph=_sha256(json.dumps(model)),
            data=data,
            config=config,
            metrics={name: float(value) for name, value in metrics.items()},
            versions=versions(),
        )

    return finish


def named_leaves(state: Any) -> dict[str, Any]:
    """The leaves of a state by name, ``params/cell/kernel``."""
    names = leaf_paths(state)
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ValueError(f"Two leaves of the state have the same path: {', '.join(twice)}. Rename one of each.")
    return dict(zip(names, _arrays(state), strict=True))


def _arrays(state: Any) -> list[Any]:
    return [leaf if hasattr(leaf, "dtype") else np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def differences(manifest: Manifest, wanted: Mapping[str, Any], chosen: Sequence[str] | None, model: Any) -> list[str]:
    """A line for each thing that is not as wanted: its name, what is in the checkpoint, what was expected.

    Args:
      manifest: of the checkpoint.
      wanted: leaves by name, arrays or shapes.
      chosen: names of the leaves to restore; None for all, and then the model counts too.
      model: what :func:`describe` says of the wanted one.
    """
    lines = [] if chosen is not None else _of_models(manifest.model, model)
    names = dict.fromkeys([*manifest.leaves, *wanted] if chosen is None else chosen)
    for name in names:
        stored, leaf = manifest.leaves.get(name), wanted.get(name)
        found = "nothing" if stored is None else _kind(stored.shape, stored.dtype)
        expected = "nothing" if leaf is None else _kind(leaf.shape, leaf.dtype)
        if found != expected:
            lines.append(f"{name}: {found} in the checkpoint, expected {expected}")
    return lines


def _of_models(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    lines = []
    for name in dict.fromkeys([*found, *expected]):
        if name == "parameters":
            continue  # these are leaves too
        mine, theirs = found.get(name), expected.get(name)
        if isinstance(mine, list) and isinstance(theirs, list):
            parts = [f"{line} in the checkpoint, expected nothing" for line in mine if line not in theirs]
            parts += [f"nothing in the checkpoint, expected {line}" for line in theirs if line not in mine]
            lines += [f"{name}: {part}" for part in parts]
            if parts:
                continue
        if mine != theirs:
            lines.append(f"{name}: {mine} in the checkpoint, expected {theirs}")
    return lines


def _kind(shape: Sequence[int], dtype: Any) -> str:
    return f"{dtype}{list(shape)}"


def _checked(what: str, value: Any) -> Any:
    """A copy of ``value``, which JSON must give back as it is."""
    try:
        copied = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`{what}` must be made of what JSON knows (dicts, lists, text, numbers, None): {error}."
        ) from error
    if copied != value:
        raise TypeError(
            f"`{what}` would come back changed from JSON, which has lists but no tuples, and only text as keys: "
            f"{value!r}."
        )
    return copied


@cache
def versions() -> dict[str, str]:
    """Of the packages that a run depends on."""
    from . import __version__  # here: the package imports this module before it knows its version

    return {"braintrace-flax": __version__, **{name: metadata.version(name) for name in _PACKAGES}}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
