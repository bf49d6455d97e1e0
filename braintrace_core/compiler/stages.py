"""Stages: loops over time that follow one another, each with what can be made for all its steps at once before it.

A stack of layers need not run through time together: the first layer can run through a whole window, then the second.
What a product between them makes of the first layer's states is then one product over all steps. States that feed each
other, in whatever number of steps, stay in one loop, and so do those that no product stands between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

from .._compat import JaxprEqn, Var

__all__ = ["Place", "place_in_stages"]


class Place(NamedTuple):
    """Where an equation runs; places are ordered as they run.

    Attributes:
      stage: the stage.
      inside: whether inside its loop, or before that, for all steps at once.
    """

    stage: int
    inside: bool


def place_in_stages(
    eqns: Mapping[int, JaxprEqn],
    states: Sequence[tuple[Var, Any]],
    is_product: Callable[[JaxprEqn], bool],
) -> tuple[dict[int, Place], list[int]]:
    """The place of each equation, and the stage of each state.

    Args:
      eqns: the equations that make the next states of present ones, by index, in order.
      states: variables of each state before and after a step.
      is_product: whether an equation is better run for all steps at once.
    """
    above, below = _behind(eqns, states), _ahead(eqns, states)
    after = [above.get(v, 0) if isinstance(v, Var) else 0 for _, v in states]
    loops = _loops(after)
    own = {k: loop for loop in loops for k in _members(loop)}
    made_of = {i: reduce(or_, (above[v] for v in eqn.outvars)) for i, eqn in eqns.items()}
    makes = {i: reduce(or_, (below.get(v, 0) for v in eqn.outvars)) for i, eqn in eqns.items()}
    products = [i for i, eqn in eqns.items() if is_product(eqn)]

    def apart(first: int, second: int) -> bool:
        """Whether a product stands between two loops that follow each other."""
        return any(made_of[i] & first and makes[i] & second and not makes[i] & first for i in products)

    stage: dict[int, int] = {}
    for loop in loops:
        before = [other for other in stage if any(after[k] & other for k in _members(loop))]
        stage[loop] = max((stage[other] + apart(other, loop) for other in before), default=0)

    def stages_of(mask: int) -> list[int]:
        return [stage[loop] for loop in {own[k] for k in _members(mask)}]

    places = {}
    for i in eqns:
        last, first = max(stages_of(made_of[i]), default=-1), min(stages_of(makes[i]))
        places[i] = Place(first, True) if first == last else Place(last + 1, False)
    return places, [stage[own[k]] for k in range(len(states))]


def _behind(eqns: Mapping[int, JaxprEqn], states: Sequence[tuple[Var, Any]]) -> dict[Var, int]:
    """For each variable, the states before the step that it is made of, as bits."""
    found = {before: 1 << k for k, (before, _) in enumerate(states)}
    for eqn in eqns.values():
        mask = reduce(or_, (found.get(v, 0) for v in eqn.invars if isinstance(v, Var)), 0)
        found.update(dict.fromkeys(eqn.outvars, mask))
    return found


def _ahead(eqns: Mapping[int, JaxprEqn], states: Sequence[tuple[Var, Any]]) -> dict[Var, int]:
    """For each variable, the states after the step that are made of it, as bits."""
    found: dict[Var, int] = {}
    for k, (_, after) in enumerate(states):
        if isinstance(after, Var):
            found[after] = found.get(after, 0) | 1 << k
    for eqn in reversed(list(eqns.values())):
        mask = reduce(or_, (found.get(v, 0) for v in eqn.outvars), 0)
        for v in eqn.invars:
            if isinstance(v, Var):
                found[v] = found.get(v, 0) | mask
    return found


def _loops(after: Sequence[int]) -> list[int]:
    """The sets of states that feed one another over time, in an order in which each comes after those that feed it.

    Args:
      after: for each state, those of a step before that it is made of.
    """
    reached = [mask | 1 << k for k, mask in enumerate(after)]
    for middle in range(len(reached)):  # Warshall's closure, a row at a time
        for k, mask in enumerate(reached):
            if mask >> middle & 1:
                reached[k] = mask | reached[middle]
    loops: dict[int, int] = {}
    for k, mask in enumerate(reached):
        together = sum(1 << j for j in _members(mask) if reached[j] >> k & 1)
        loops[together] = mask.bit_count()
    return sorted(loops, key=lambda loop: (loops[loop], loop))


def _members(mask: int) -> Iterable[int]:
    return (k for k in range(mask.bit_length()) if mask >> k & 1)
