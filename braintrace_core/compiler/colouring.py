"""Colouring: where the results of operators belong, which entries a group's factors have, and which units share a pass.

All of it is read off the index patterns between the group's states and their sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._compat import Var
from .components import Components
from .diagonals import DiagonalPlan, OperatorPositions
from .patterns import Pattern

__all__ = ["locate_operator", "plan_diagonals"]

Patterns = Mapping[Var, Mapping[Any, Pattern]]


class _Touch(NamedTuple):
    """Which units a component of the group depends on, through one source.

    Attributes:
      units, owners: pairs of a unit and the owner of a source element that it depends on.
      mixed: whether every unit may depend on every element besides.
    """

    units: np.ndarray
    owners: np.ndarray
    mixed: bool


def locate_operator(
    components: Components, outvars: Sequence[Var], y: Var, patterns: Patterns
) -> OperatorPositions | None:
    """Where the elements of ``y`` belong in the group that ``outvars`` are the new states of; None if nowhere."""
    found = [(patterns[v][y], w) for v, w in zip(outvars, components.widths, strict=True) if y in patterns.get(v, {})]
    if not found:
        return None
    num_units, size = _count(components.varshape), _count(y.aval.shape)
    listed = [pattern.listed() for pattern, _ in found]
    units = np.concatenate([rows // width for (rows, _, _), (_, width) in zip(listed, found, strict=True)])
    elements = np.concatenate([indices for _, indices, _ in listed])
    spread = np.concatenate([flags for _, _, flags in listed])
    mixed = any(pattern.mixed for pattern, _ in found)
    if elements.size:
        unit = _home(units, elements, spread, size, num_units)
    elif tuple(y.aval.shape) == components.varshape:
        unit = np.arange(size)  # everything depends on everything: the place in the array is all there is to go by
    else:
        return None
    exact = not mixed and bool((unit[elements] == units).all())
    return OperatorPositions(unit.reshape(y.aval.shape).astype(np.int32), exact)


def _home(units: np.ndarray, elements: np.ndarray, spread: np.ndarray, size: int, num_units: int) -> np.ndarray:
    """For each of ``size`` elements the unit that it belongs to, -1 if there is none.

    Units that it reaches directly come before those over which it is spread, then the one at its own place, then the
    first.
    """
    has_direct = np.zeros(size, bool)
    has_direct[elements[~spread]] = True
    candidate = ~spread | ~has_direct[elements]
    units, elements = units[candidate], elements[candidate]
    unit = np.full(size, num_units, np.int64)
    np.minimum.at(unit, elements, units)
    if size == num_units:
        at_home = elements[units == elements]
        unit[at_home] = at_home
    unit[unit == num_units] = -1
    return unit


def plan_diagonals(
    components: Components,
    invars: Sequence[Var],
    outvars: Sequence[Var],
    operators: Sequence[tuple[Var, OperatorPositions]],
    patterns: Patterns,
) -> DiagonalPlan:
    """The plan for a group with these state variables, fed by ``operators`` (result variable and positions)."""
    hidden_entries: list[tuple[int, int]] = []
    operator_entries: list[list[int]] = [[] for _ in operators]
    colours, exact = [], True
    for a, (state, slot, _) in enumerate(components.items):
        touches: list[_Touch] = []
        found = patterns.get(outvars[state], {})
        rows = (slot or 0, components.widths[state])
        for i, var in enumerate(invars):
            if var not in found:
                continue
            width, mixed = components.widths[i], found[var].mixed
            units, elements, _ = found[var].listed(*rows)
            touch = _Touch(units, elements // width, mixed)
            exact &= not mixed and bool((touch.owners == units).all())
            slots = set((elements - units * width)[touch.owners == units].tolist())
            own = [b for b, c in enumerate(components.items) if c.state == i and (mixed or (c.slot or 0) in slots)]
            hidden_entries += [(a, b) for b in own]
            if own:
                touches.append(touch)
        for entries, (y, positions) in zip(operator_entries, operators, strict=True):
            if y in found:
                units, elements, _ = found[y].listed(*rows)
                if found[y].mixed or units.size:
                    entries.append(a)
                    touches.append(_Touch(units, positions.unit.ravel()[elements], found[y].mixed))
        colours.append(_colour(touches, components.varshape))
    return DiagonalPlan(
        components,
        tuple(hidden_entries),
        tuple(map(tuple, operator_entries)),
        tuple(positions for _, positions in operators),
        tuple(colours),
        exact,
    )


def _colour(touches: list[_Touch], varshape: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """Colour the units so that no unit shares its colour with one that touches its own source elements."""
    num_units = _count(varshape)
    if any(touch.mixed for touch in touches):
        return np.arange(num_units, dtype=np.int32).reshape(varshape), num_units
    conflicts: dict[int, set[int]] = {}
    for units, owners, _ in touches:
        stray = (owners != units) & (owners >= 0)
        for u, v in zip(units[stray].tolist(), owners[stray].tolist(), strict=True):
            conflicts.setdefault(u, set()).add(v)
            conflicts.setdefault(v, set()).add(u)
    colour = np.zeros(num_units, np.int32)
    done: set[int] = set()
    for u in sorted(conflicts):
        taken = {int(colour[v]) for v in conflicts[u] if v in done}
        colour[u] = next(c for c in range(num_units + 1) if c not in taken)
        done.add(u)
    return colour.reshape(varshape), int(colour.max(initial=0)) + 1


def _count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
