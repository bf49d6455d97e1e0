"""Moves: patterns of primitives that rearrange elements, which are the same rearrangement of the lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from .patterns import Pattern

__all__ = ["move", "place", "stack"]

Shape = tuple[int, ...]


def move(
    name: str, params: Mapping[str, Any], ps: list[Pattern | None], in_shapes: list[Shape], out_shapes: list[Shape]
) -> list[Pattern | None]:
    """The patterns of the results of the primitive ``name``, given those of its operands."""
    if name in ("concatenate", "stack"):
        parts = [_wide(p, shape, _width(ps)) for p, shape in zip(ps, in_shapes, strict=True)]
        joined = np.stack(parts, params["axis"]) if name == "stack" else np.concatenate(parts, params["dimension"])
        return [Pattern(joined, _mixed(ps))]
    pattern = ps[0]
    if pattern is None:
        return [None] * len(out_shapes)
    entries, width, shape = pattern.entries, pattern.width, out_shapes[0]
    if name == "split":
        parts = np.split(entries, np.cumsum([int(n) for n in params["sizes"]])[:-1], axis=params["axis"])
        return [pattern.moved(part) for part in parts]
    if name == "unstack":
        return [pattern.moved(row) for row in np.moveaxis(entries, params["axis"], 0)]
    if name == "broadcast_in_dim":
        expanded = [1] * len(shape)
        for axis, n in zip(params["broadcast_dimensions"], pattern.shape, strict=True):
            expanded[axis] = n
        return [pattern.repeated(np.broadcast_to(entries.reshape(*expanded, width), (*shape, width)))]
    if name == "tile":
        return [pattern.repeated(np.tile(entries, (*params["reps"], 1)))]
    if name in ("reshape", "squeeze"):
        entries = entries.reshape(*shape, width)
    elif name == "transpose":
        entries = entries.transpose(*params["permutation"], entries.ndim - 1)
    elif name == "rev":
        entries = np.flip(entries, params["dimensions"])
    elif name == "slice":
        strides = params["strides"] or (1,) * len(shape)
        bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
        entries = entries[tuple(slice(*bound) for bound in bounds)]
    elif name == "pad":
        entries = _pad(entries, params["padding_config"], shape)
    else:
        raise NotImplementedError(name)
    return [pattern.moved(entries)]


def stack(rows: list[Pattern | None], shape: Shape) -> Pattern:
    """The pattern of ``rows`` one above the other; ``shape`` is that of the result."""
    return Pattern(np.stack([_wide(p, shape[1:], _width(rows)) for p in rows]), _mixed(rows))


def place(updates: Pattern, shape: Shape, indices: Any, params: Mapping[str, Any]) -> Pattern:
    """The pattern of ``updates`` put at ``indices`` of a value of ``shape``, as a scatter with ``params`` does."""
    if not updates.width:
        return Pattern.mixing(shape)
    dims, mode = params["dimension_numbers"], params["mode"]
    with jax.ensure_compile_time_eval():
        ones = np.ones(updates.shape, np.int32)
        hits = lax.scatter_add(np.zeros(shape, np.int32), indices, ones, dims, mode=mode)
        if (np.asarray(hits) > 1).any():
            return Pattern.mixing(shape)
        nothing = np.full(shape, -1, np.int32)
        columns = [
            np.asarray(lax.scatter(nothing, indices, np.ascontiguousarray(updates.entries[..., k]), dims, mode=mode))
            for k in range(updates.width)
        ]
    return Pattern(np.stack(columns, axis=-1), updates.mixed)


def _width(ps: Sequence[Pattern | None]) -> int:
    return max(p.width for p in ps if p is not None)


def _mixed(ps: Sequence[Pattern | None]) -> bool:
    return any(p.mixed for p in ps if p is not None)


def _wide(pattern: Pattern | None, shape: Shape, width: int) -> np.ndarray:
    """The entries of ``pattern``, of a value of ``shape``, with room for ``width`` in each list."""
    result = np.full((*shape, width), -1, np.int32)
    if pattern is not None:
        result[..., : pattern.width] = pattern.entries
    return result


def _pad(entries: np.ndarray, config: Sequence[tuple[int, int, int]], shape: Shape) -> np.ndarray:
    result = np.full((*shape, entries.shape[-1]), -1, np.int32)
    source, target = [], []
    for (low, _, interior), n, m in zip(config, entries.shape[:-1], shape, strict=True):
        places = low + np.arange(n) * (interior + 1)
        inside = (places >= 0) & (places < m)
        source.append(np.flatnonzero(inside))
        target.append(places[inside])
    result[np.ix_(*target)] = entries[np.ix_(*source)]
    return result
