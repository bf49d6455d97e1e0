"""Frames: two states that feed each other have traces along axes that turn with them.

A window makes each of the two new traces of both old ones, so that one of these would have to be copied before it is
overwritten. Along other axes, one pair for each unit and example, that is not so:

    eps = F e,    F = [[cos, -sin], [sin, cos]],    e_k = (F_k^T P F_0) e_0 + sum_u x_u (x) (F_k^T Q_u df_u)

If the first axis of ``F_k`` is where ``P`` takes that of ``F_0``, the matrix has nothing below its diagonal: first the
one trace is made of both, then the other of itself alone. The axes stay at right angles, so that no digits are lost.

The first axis is the same wherever a window is cut: where a step takes it to nothing, as at the start of a sequence, it
begins anew along the first of the two components. Only where a product of steps is too small to be told from zero may
it differ; nothing that a trace could hold is left there.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ..ops.dtypes import accumulation_dtype
from ..ops.in_place import on_one_device
from .factors import Pair, groups_with_one_D
from .plan import GroupPlan, Link, RulePlan
from .rule import Traces, times, total

__all__ = ["Axis", "along", "are_interlocked", "axis_of", "follow", "frames_of", "init_axis", "triangular"]

Axis = dict[int, Array]
"""For both components of each frame of a group, what the frame's first axis has of it, ``(batch, *varshape)``."""


def frames_of(plan: RulePlan) -> list[tuple[Pair, ...]]:
    """For each group, the pairs of components that feed each other, and no third one that feeds them back.

    None where ``D`` is the same for all examples: its products are then made once for all of them, which axes that each
    example has for itself would undo.
    """
    return plan.once("frames", lambda: _find_frames(plan))


def _find_frames(plan: RulePlan) -> list[tuple[Pair, ...]]:
    alike = groups_with_one_D(plan) if plan.as_compiled else [False] * len(plan.groups)
    return [() if one else _pairs(group) for group, one in zip(plan.groups, alike, strict=True)]


def are_interlocked(plan: RulePlan, link: Link) -> bool:
    """Whether each new trace of a link is made of all old ones, so that there is no order to make them in."""
    reached, pairs = {*link.plan.closure}, frames_of(plan)[link.group]
    return any((a, b) in reached and (b, a) in reached for a, b in combinations(link.stored, 2) if (a, b) not in pairs)


def _pairs(group: GroupPlan) -> tuple[Pair, ...]:
    reached = {*group.closure}
    circles = {tuple(b for b in range(group.count) if {(a, b), (b, a)} <= reached) for a in range(group.count)}
    return tuple(sorted((circle[0], circle[1]) for circle in circles if len(circle) == 2))


def init_axis(g: int, group: GroupPlan, pairs: tuple[Pair, ...], batch_size: int) -> Traces:
    """Before the first step: no direction yet."""
    shape = batch_size, *group.varshape
    return {
        f"group{g}.axis.{a}": jnp.zeros(shape, accumulation_dtype(*(group.dtypes[b] for b in pair)))
        for pair in pairs
        for a in pair
    }


def axis_of(traces: Traces, g: int, pairs: tuple[Pair, ...]) -> Axis:
    """The axes of a group's frames."""
    return {a: traces[f"group{g}.axis.{a}"] for pair in pairs for a in pair}


def follow(pairs: tuple[Pair, ...], axis: Axis, between: Mapping[Pair, Array], across: Mapping[Pair, Array]) -> Axis:
    """The axes after some steps, from those before.

    As long as no step takes one to nothing, they are where all steps together take them. Which step did is found out
    one by one, on several devices always: they would have to agree on it.

    Args:
      pairs: of components.
      axis: before the first step.
      between: ``D`` of each step, ``(time, batch, *varshape)``.
      across: their product.
    """
    if not pairs:
        return {}
    own = {(a, b): d for (a, b), d in between.items() if any(a in pair and b in pair for pair in pairs)}

    def one_by_one(axis: Axis, own: Mapping[Pair, Array]) -> Axis:
        return lax.scan(lambda axis, now: (_moved(pairs, axis, now)[0], None), axis, own)[0]

    if next(iter(own.values())).shape[0] == 1:
        axis, _ = _moved(pairs, axis, across)
    elif on_one_device():
        ahead, lost = _moved(pairs, axis, across)
        axis = lax.cond(lost, one_by_one, lambda *_: ahead, axis, own)
    else:
        axis = one_by_one(axis, own)
    lengths = {a: jnp.sqrt(axis[pair[0]] ** 2 + axis[pair[1]] ** 2) for pair in pairs for a in pair}
    return {a: value / lengths[a] for a, value in axis.items()}


def _moved(pairs: tuple[Pair, ...], axis: Axis, by: Mapping[Pair, Array]) -> tuple[Axis, Array]:
    """Where ``D``, or a product of them, takes the axes; and whether any was taken to nothing, and began anew."""
    new: Axis = {}
    lost_one = jnp.array(False)
    for pair in pairs:
        first, second = (total([times(by[a, b], axis[b]) for b in pair if (a, b) in by], like=axis[a]) for a in pair)
        size = jnp.abs(first) + jnp.abs(second)
        lost = size == 0
        size = jnp.where(lost, 1.0, size)  # the direction matters; its length must neither grow nor vanish
        new |= dict(zip(pair, (jnp.where(lost, 1.0, first / size), second / size), strict=True))
        lost_one |= jnp.any(lost)
    return {a: value.astype(axis[a].dtype) for a, value in new.items()}, lost_one


def along(pairs: tuple[Pair, ...], axis: Mapping[int, Array], values: Mapping[int, Any]) -> dict[int, Any]:
    """What belongs to components (a signal, or what is added to traces) along the axes of their frames.

    A component that is not mentioned has nothing.
    """
    found = dict(values)
    for a, b in pairs:
        cos, sin = axis[a], axis[b]
        first = [times(of, values[c]) for c, of in ((a, cos), (b, sin)) if c in values]
        second = [times(of, values[c]) for c, of in ((a, -sin), (b, cos)) if c in values]
        if first:
            found |= {a: total(first), b: total(second)}
    return found


def triangular(pairs: tuple[Pair, ...], before: Axis, after: Axis, across: Mapping[Pair, Array]) -> dict[Pair, Array]:
    """``F_k^T P F_0``, as entries between components, from those of ``P`` and the axes before and after a window."""
    rows, columns = ({pair[place] for pair in across} for place in (0, 1))
    framed = {c for pair in pairs for c in pair}
    found = {}
    for a in sorted(rows):
        of_row = along(pairs, before, {c: across[a, c] for c in sorted(columns) if (a, c) in across})
        found.update({(a, c): value for c, value in of_row.items()})
    for c in sorted(columns | framed):
        of_column = along(pairs, after, {a: found[a, c] for a in sorted(rows) if (a, c) in found})
        found.update({(a, c): value for a, value in of_column.items()})
    return {entry: value for entry, value in found.items() if entry[::-1] not in pairs}
