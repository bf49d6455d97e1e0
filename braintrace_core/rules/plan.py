"""What the rules know about a graph before anything runs: links between operators and groups, and their names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._compat import Var
from ..compiler.diagnostics import spell
from ..compiler.diagonals import OperatorPositions
from ..compiler.graph import ETraceGraph
from ..compiler.schedule import Operator
from ..ops import is_boundary
from ..ops.trace_rules import OperatorTraces, traces_of
from .window import WindowProgram

__all__ = ["GroupPlan", "Link", "RulePlan"]


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """A hidden group as the rules see it: components of every unit that feed one another from step to step.

    Attributes:
      varshape: the group's shape.
      dtypes: the dtype of each component.
      entries: pairs of components ``(a, b)`` with ``d a / d b`` not zero by structure.
    """

    varshape: tuple[int, ...]
    dtypes: tuple[Any, ...]
    entries: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """The number of components."""
        return len(self.dtypes)

    @cached_property
    def recurrent(self) -> tuple[int, ...]:
        """The components that feed the next step."""
        return tuple(sorted({b for _, b in self.entries}))

    @cached_property
    def closure(self) -> tuple[tuple[int, int], ...]:
        """Pairs ``(a, b)`` such that ``b`` reaches ``a`` in zero or more steps."""
        reaches, step = np.eye(self.count, dtype=bool), np.zeros((self.count, self.count), dtype=bool)
        for a, b in self.entries:
            step[a, b] = True
        for _ in range(self.count):
            reaches = reaches | (step @ reaches)
        return tuple((a, b) for a in range(self.count) for b in range(self.count) if reaches[a, b])

    def reached_from(self, moved: Sequence[int]) -> tuple[int, ...]:
        """The components that ``moved`` ones reach."""
        return tuple(sorted({a for a, b in self.closure if b in moved}))


@dataclass(frozen=True, eq=False)
class Link:
    """An operator that feeds a hidden group.

    Attributes:
      name: unique and the same in every process, ``path/of/parameter@relation``.
      relation, group: indices in the graph.
      operator: its equation.
      positions: where the elements of its result belong in the group.
      moved: components that it moves directly.
      plan: the group's plan.
    """

    name: str
    relation: int
    group: int
    operator: Operator
    positions: OperatorPositions
    moved: tuple[int, ...]
    plan: GroupPlan

    @cached_property
    def reached(self) -> tuple[int, ...]:
        """The components that it moves at some step."""
        return self.plan.reached_from(self.moved)

    @cached_property
    def stored(self) -> tuple[int, ...]:
        """Those of them that feed the next step, so that a trace must be kept."""
        return tuple(a for a in self.reached if a in self.plan.recurrent)

    @cached_property
    def axes_before_units(self) -> int | None:
        """How many axes the operator's result has in front of the group's own; None if its units lie otherwise."""
        y_shape, varshape = self.operator.y.aval.shape, self.plan.varshape
        count = len(y_shape) - len(varshape)
        if count < 0 or y_shape[count:] != varshape:
            return None
        units = np.arange(int(np.prod(varshape))).reshape(varshape)
        return count if (self.positions.unit.reshape(y_shape) == units).all() else None

    def at_operator(self, value: Array) -> Array:
        """A value of the group's units, ``(..., *varshape)``, at the elements of the operator's result."""
        y_shape, varshape = self.operator.y.aval.shape, self.plan.varshape
        lead = value.shape[: value.ndim - len(varshape)]
        if self.axes_before_units is not None:  # units may be divided among devices, and stay so
            value = value.reshape(*lead, *(1 for _ in range(self.axes_before_units)), *varshape)
            return jnp.broadcast_to(value, (*lead, *y_shape))
        flat = value.reshape(*lead, -1)
        unit, period = self.positions.unit.ravel(), flat.shape[-1]
        start = max(0, int(unit[0])) if unit.size else 0
        if (unit == np.arange(start, start + unit.size)).all():  # units one after the other: all, or one layer of them
            return flat[..., start : start + unit.size].reshape(*lead, *y_shape)
        if unit.size % period == 0 and (unit == np.tile(np.arange(period), unit.size // period)).all():
            return jnp.tile(flat, unit.size // period).reshape(*lead, *y_shape)
        return jnp.take(flat, np.maximum(unit, 0), axis=-1).reshape(*lead, *y_shape)

    def traces(self, operands: Sequence[Any]) -> OperatorTraces:
        """The operator's trace rules, given its operands (values, or shapes and dtypes)."""
        eqn = self.operator.eqn
        known = [v.aval if value is None else value for v, value in zip(eqn.invars, operands, strict=True)]
        return traces_of(eqn.primitive, eqn.params, known, self.operator.y.aval)


@dataclass(frozen=True, eq=False)
class RulePlan:
    """The static side of a rule: its groups and links, and the program that runs windows.

    Attributes:
      program: runs windows of the graph.
      groups, links: as the rule follows them.
      as_compiled: whether that is as the graph has them.
    """

    program: WindowProgram
    groups: tuple[GroupPlan, ...]
    links: tuple[Link, ...]
    as_compiled: bool = True
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, made when ``key`` is first asked for: facts that some rules need and others do not."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    @staticmethod
    def of(graph: ETraceGraph, frozen: Collection[int] = ()) -> RulePlan:
        """The plan that follows the graph as it is; no trace is kept for parameters with ``frozen`` indices alone."""
        program = WindowProgram(graph)
        groups = tuple(
            GroupPlan(
                plan.group.varshape,
                tuple(plan.group.components.real_dtype(a) for a in range(len(plan.group.components))),
                tuple(sorted(plan.diagonals.hidden_entries)),
            )
            for plan in graph.factor_plan.groups
        )
        operators = {op.y: op for op in program.schedule.operators}
        links = []
        trained = program.trained_variables(frozen)
        for r, relation in enumerate(graph.hidden_param_op_relations):
            if not any(v in trained for v in operators[relation.y_var].operands.values()):
                continue
            for k, group in enumerate(relation.hidden_groups):
                plan = graph.factor_plan.groups[group.index]
                suffix = f".{k}" if len(relation.hidden_groups) > 1 else ""
                links.append(
                    Link(
                        name=f"{spell(relation.path)}@{r}{suffix}",
                        relation=r,
                        group=group.index,
                        operator=operators[relation.y_var],
                        positions=plan.positions(r),
                        moved=plan.diagonals.operator_entries[plan.relations.index(r)],
                        plan=groups[group.index],
                    )
                )
        return RulePlan(program, groups, tuple(links))

    @property
    def graph(self) -> ETraceGraph:
        """The compiled graph."""
        return self.program.graph

    @cached_property
    def not_followed(self) -> list[int]:
        """Indices of the operators that no trace follows."""
        followed = {id(link.operator.eqn) for link in self.links}
        return [i for i, op in enumerate(self.program.schedule.operators) if id(op.eqn) not in followed]

    @cached_property
    def feeds(self) -> dict[int, list[int]]:
        """For operators that a trace follows, those that their results feed in the same step, past all hidden states.

        Each that is fed directly, not through another one.
        """
        operators, hidden = self.program.schedule.operators, self.program.hidden_after
        ends = {op.y for op in operators if is_boundary(op.eqn.primitive)}
        found = {}
        for i, operator in enumerate(operators):
            reached = self.program.reached_in_step({operator.y}, ends) - hidden.keys()
            fed = [k for k, op in enumerate(operators) if op.y in ends and op.x in reached]
            if i not in self.not_followed and fed:
                found[i] = fed
        return found

    @cached_property
    def feeds_elsewhere(self) -> dict[int, list[int]]:
        """Those of :attr:`feeds` that lead to hidden groups of which the operator's traces tell nothing."""
        operators, hidden = self.program.schedule.operators, self.program.hidden_after
        found = {}
        for i, fed in self.feeds.items():
            told = {link.group for link in self.links if link.operator is operators[i]}
            reached = {k: self.program.reached_in_step({operators[k].y}) & hidden.keys() for k in fed}
            groups = {k: {hidden[v] for v in states} for k, states in reached.items()}
            if elsewhere := [k for k in fed if groups[k] and not groups[k] & told]:
                found[i] = elsewhere
        return found

    def input_name(self, link: Link) -> str:
        """The name of what a rule keeps of an operator's input; operators with one input share it."""
        first = next(other for other in self.links if other.operator.x is link.operator.x)
        return f"{first.name}.x"

    @cached_property
    def without_recurrence(self) -> RulePlan:
        """The same with nothing handed from step to step."""
        return self._variant(lambda group: replace(group, entries=()), lambda link, _: link.moved)

    def with_entries(self, entries: Sequence[tuple[tuple[int, int], ...]]) -> RulePlan:
        """The same with other pairs of components that feed one another, for each group."""
        given = dict(zip(map(id, self.groups), entries, strict=True))
        return self._variant(lambda group: replace(group, entries=given[id(group)]), lambda link, _: link.moved)

    @cached_property
    def with_filter(self) -> RulePlan:
        """The same with a second set of components that sums the first over time, with a decay.

        Component ``a + count`` is the running sum of component ``a``.
        """

        def widen(group: GroupPlan) -> GroupPlan:
            n = group.count
            sums = [(a + n, b) for a, b in group.entries] + [(a + n, a + n) for a in range(n)]
            return replace(group, dtypes=group.dtypes * 2, entries=tuple(sorted((*group.entries, *sums))))

        return self._variant(widen, lambda link, n: (*link.moved, *(a + n for a in link.moved)))

    def _variant(
        self, change: Callable[[GroupPlan], GroupPlan], moved: Callable[[Link, int], tuple[int, ...]]
    ) -> RulePlan:
        groups = tuple(map(change, self.groups))
        links = tuple(
            replace(link, moved=moved(link, self.groups[link.group].count), plan=groups[link.group])
            for link in self.links
        )
        return RulePlan(self.program, groups, links, as_compiled=False)

    def operands(self, frontier: Mapping[Var, Any]) -> tuple[list[Any], ...]:
        """For each link, its operator's operands; None for those that change in time."""
        return tuple(self.program.operand_values(link.operator, frontier) for link in self.links)

    def abstract_operands(self) -> tuple[list[Any], ...]:
        """For each link, shapes and dtypes of its operator's operands, constants as they are."""
        constants = self.program.constants
        return tuple(
            [
                constants.get(v, jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)) if isinstance(v, Var) else v.val
                for v in link.operator.eqn.invars
            ]
            for link in self.links
        )
