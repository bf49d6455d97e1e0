"""Twins: links whose traces are those of another link, with its components exchanged and of changed sign.

An LRU has a complex state. Its input reaches the real part through one weight and the imaginary part through another,
and turns with the state from then on: what the second weight did is what the first one did, a quarter turn ahead. In
general, let ``J`` exchange components and change signs. If ``D J = J D`` at every step, and two operators have the same
input and ``df_2 = J df_1``, then ``eps_2 = J eps_1`` for ever, and one of the two is all that must be kept.

Whether that is so is read off the equations that make ``D`` and ``df``, not off numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

import jax

from ..compiler.forms import ZERO, Form, comparable_params, forms_of, scaled
from ..ops.trace_rules import EinsumTrace
from .factors import Pair, traced_factors
from .plan import Link, RulePlan

__all__ = ["Twin", "twins_of"]

Turn = tuple[tuple[int, int], ...]
"""For each component, the one that takes its place, and the sign."""


@dataclass(frozen=True)
class Twin:
    """How the traces of a link lie in those of another.

    Attributes:
      holder: the index of the other link.
      turn: for each component of the holder, that of the link which it stands for, and the sign.
    """

    holder: int
    turn: Turn

    def at_holder(self, signal: Mapping[int, Any], stored: Sequence[int]) -> dict[int, Any]:
        """A signal at components of the link, as it acts on the holder's."""
        return {b: signal[place] if sign > 0 else -signal[place] for b in stored for place, sign in [self.turn[b]]}


def twins_of(plan: RulePlan) -> dict[int, Twin]:
    """The links of a plan that need no traces of their own, by index; none if it is not as compiled."""
    return plan.once("twins", lambda: _find_twins(plan)) if plan.as_compiled else {}


def _find_twins(plan: RulePlan) -> dict[int, Twin]:
    alike: dict[Any, list[int]] = {}
    for i, (link, operands) in enumerate(zip(plan.links, plan.abstract_operands(), strict=True)):
        # What traces of other kinds are made of may differ between the two.
        only_input = all(isinstance(rule, EinsumTrace) for rule in link.traces(operands).rules.values())
        if only_input and link.operator.x is not None and link.stored and link.plan.count <= _MOST_COMPONENTS:
            alike.setdefault(_kind(link), []).append(i)
    if all(len(members) == 1 for members in alike.values()):
        return {}
    df, between = _factor_forms(plan)
    found: dict[int, Twin] = {}
    for members in alike.values():
        group = plan.links[members[0]].group
        turns = list(_turns(plan.groups[group].count, between[group]))
        for i in members:
            holders = [holder for holder in members if holder < i and holder not in found]
            pairs = (Twin(*pair) for pair in product(holders, turns))
            if twin := next((twin for twin in pairs if _is_turned(df[i], df[twin.holder], twin.turn)), None):
                found[i] = twin
    return found


def _is_turned(df: Mapping[int, Form], of_holder: Mapping[int, Form], turn: Turn) -> bool:
    """Whether ``df = J df_holder``."""
    return all(df.get(place, ZERO) == scaled(of_holder.get(b, ZERO), sign) for b, (place, sign) in enumerate(turn))


def _kind(link: Link) -> Any:
    """What links must have in common: group, input, operator, and where its results belong."""
    operator, eqn = link.operator, link.operator.eqn
    shapes = tuple((v.aval.shape, v.aval.dtype) for v in eqn.invars)
    kind = eqn.primitive, comparable_params(eqn), shapes, tuple(operator.operands)
    return link.group, operator.x, *kind, link.positions.unit.tobytes()


def _factor_forms(plan: RulePlan) -> tuple[list[dict[int, Form]], list[dict[Pair, Form]]]:
    """The forms of ``df`` of each link and of ``D`` of each group."""
    relations = plan.graph.hidden_param_op_relations
    traced, shapes = traced_factors(plan)
    by_relation, between = jax.tree.unflatten(jax.tree.structure(shapes), forms_of(traced))
    groups = [[group.index for group in relation.hidden_groups] for relation in relations]
    return [by_relation[link.relation][groups[link.relation].index(link.group)] for link in plan.links], list(between)


def _turns(count: int, between: Mapping[Pair, Form]) -> Iterator[Turn]:
    """The exchanges of components that commute with a group's ``D``."""
    for places, signs in product(permutations(range(count)), product((1, -1), repeat=count)):
        if all(
            between.get((places[a], places[b]), ZERO) == scaled(between.get((a, b), ZERO), signs[a] * signs[b])
            for a in range(count)
            for b in range(count)
        ):
            yield tuple(zip(places, signs, strict=True))


_MOST_COMPONENTS = 3  # of a group; there are 48 exchanges of three
