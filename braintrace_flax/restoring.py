"""Restoring: one checkpoint is read, compared with what is wanted, and checked to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from .fingerprint import describe, fingerprints, is_key
from .manifest import Manifest, differences, named_leaves
from .state import TrainState
from .storage import read_arrays, read_record
from .train_step import TrainStep

__all__ = [
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointMismatch",
    "as_state",
    "read_checkpoint",
    "read_manifest",
    "shortened",
]


class CheckpointError(Exception):
    """A checkpoint that cannot be written or found."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint whose files are not as they were written."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint of another model, optimizer, rule or batch size."""


def read_manifest(path: Any) -> Manifest:
    """What is in the checkpoint at ``path``."""
    try:
        return Manifest.decode(read_record(path))
    except Exception as error:
        raise CheckpointDamaged(f"Checkpoint `{path}` cannot be read: {shortened(error)}") from error


def read_checkpoint(path: Any, like: TrainState, only: Sequence[str] | None) -> tuple[Manifest, TrainState]:
    """The checkpoint at ``path`` as a state like this one; an error says how it differs or what is damaged."""
    manifest, wanted = read_manifest(path), named_leaves(like)
    chosen = None if only is None else _chosen(only, [*manifest.leaves, *wanted])
    lines = differences(manifest, wanted, chosen, describe(like.opt_state))
    if lines:
        raise CheckpointMismatch(
            "\n  ".join([f"Checkpoint `{path}` is of another model or optimizer:", *lines])
            + '\nTo keep a part of it: `restore(state, only=("params",))`.'
        )
    names = list(wanted) if chosen is None else chosen
    stored = [name for name, leaf in manifest.leaves.items() if 0 not in leaf.shape]
    try:
        loaded = read_arrays(path, {name: _target(wanted[name]) if name in names else None for name in stored})
        values = {name: _placed(loaded.get(name), wanted[name], manifest.leaves[name].keys) for name in names}
    except Exception as error:
        raise CheckpointDamaged(f"Checkpoint `{path}` cannot be read: {shortened(error)}") from error
    found = dict(zip(names, fingerprints([values[name] for name in names]), strict=True))
    broken = [name for name in names if found[name] != manifest.leaves[name].fingerprint]
    if broken:
        raise CheckpointDamaged(
            "\n  ".join([f"Checkpoint `{path}` is damaged: these are not the bits that were written:", *broken])
        )
    leaves = [values.get(name, leaf) for name, leaf in wanted.items()]
    return manifest, jax.tree.unflatten(jax.tree.structure(like), leaves)


def as_state(like: Any, only: Sequence[str] | None) -> TrainState:
    """The state that is wanted: shapes, with shardings where they matter; arrays, if only a part is restored."""
    if not isinstance(like, (TrainState, TrainStep)):
        raise TypeError(f"`restore` takes a train step or a train state, got a {type(like).__name__}.")
    if isinstance(like, TrainStep):
        shapes = jax.eval_shape(like.init, jax.eval_shape(lambda: jax.random.key(0)))
        like = shapes if like.shardings is None else jax.tree.map(_at, shapes, like.shardings)
    if only is not None and any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(like)):
        raise ValueError("`only` needs a state of arrays to put the rest in: `restore(step.init(key), only=...)`.")
    return like


def _at(leaf: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _chosen(only: Sequence[str], names: Sequence[str]) -> list[str]:
    """Names that start with one of these paths."""
    found = []
    for part in [only] if isinstance(only, str) else only:
        below = [name for name in names if name == part or name.startswith(f"{part.rstrip('/')}/")]
        if not below:
            raise ValueError(
                f"`only` names {part!r}, of which there is nothing in the checkpoint or the state. There are "
                f"{', '.join(dict.fromkeys(names))}."
            )
        found += below
    return list(dict.fromkeys(found))


def _is_placed(leaf: Any) -> bool:
    """Whether it matters on which devices the leaf is."""
    return leaf.committed if isinstance(leaf, jax.Array) else getattr(leaf, "sharding", None) is not None


def _target(leaf: Any) -> jax.ShapeDtypeStruct:
    shape = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    sharding = leaf.sharding if _is_placed(leaf) else SingleDeviceSharding(jax.local_devices()[0])
    return _at(shape, sharding)


def _placed(value: Any, like: Any, keys: str | None) -> Any:
    """What was read, as an array like the wanted one; what is not stored has no elements."""
    if value is None:
        value = jnp.zeros(_target(like).shape, _target(like).dtype)
    if not _is_placed(like):
        value = jnp.asarray(np.asarray(value))  # on no particular device, like a new state
    if keys is not None:
        value = jax.random.wrap_key_data(value, impl=keys)
    return jax.device_put(value, like.sharding) if _is_placed(like) else value


def shortened(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{'...' if len(text) > 300 else ''}"
