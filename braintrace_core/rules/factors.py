"""Factors and signals of a window: all that a rule sees besides its own traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._compat import Var, open_jaxpr
from ..compiler.jaxpr_tools import IndexedJaxpr
from .plan import RulePlan
from .window import WindowRecord

__all__ = [
    "Signal",
    "WindowFactors",
    "forget",
    "groups_with_one_D",
    "signal_of_states",
    "traced_factors",
    "window_factors",
]

Pair = tuple[int, int]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WindowFactors:
    """The factors of a window; arrays are ``(time, batch, ...)``.

    Attributes:
      x: for each link, the operator's input; None where it has none.
      df: for each link, component -> ``d component / d y``, of the shape of ``y``.
      D: for each group, ``(a, b)`` -> ``d a / d b``, zero where a new sequence starts.
      operands: for each link, its operator's operands; None for those that change in time.
      frontier, record: what the window ran with, for rules that need more than the above.
      plan: the static side.
      fine: a bool, whether the window counts: if not, the traces stay as they were. None if it does. Only for rules
        with ``minds_windows``.
      anew: a bool, whether the traces before the window are to be forgotten first. None if not. Likewise.
      alike: ``D``, and for each group its one step if all are alike; see :meth:`one_D`.
    """

    x: tuple[Any, ...]
    df: tuple[dict[int, Array], ...]
    D: tuple[dict[Pair, Array], ...]
    operands: tuple[list[Any], ...]
    frontier: list[Any]
    record: WindowRecord
    plan: RulePlan = field(metadata={"static": True})
    fine: Any = None
    anew: Any = None
    alike: tuple[Any, tuple[Any, ...]] | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of steps and of examples."""
        return self.record.sizes

    @property
    def moving(self) -> Any:
        """All that changes in time, to be taken step by step."""
        return self.x, self.df, self.D, self.record

    def one_D(self, group: int) -> dict[Pair, Array] | None:
        """``D`` of a group once, ``(1, *varshape)``, if it is the same for all steps and examples; None if not."""
        if self.alike is None or self.alike[0] is not self.D:  # a rule may have put another in its place
            return None
        return self.alike[1][group]

    def with_moving(self, moving: Any) -> WindowFactors:
        """The factors of one step, from one slice of :attr:`moving`."""
        x, df, between, record = jax.tree.map(lambda value: value[None], moving)
        return replace(self, x=x, df=df, D=between, record=record)

    def frontier_values(self) -> dict[Var, Any]:
        """Values of the variables made of parameters alone."""
        return dict(zip(self.plan.program.schedule.frontier, self.frontier, strict=True))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Signal:
    """``dL / d h`` of the hidden states at one moment; arrays are ``(batch, *varshape)``.

    Attributes:
      groups: for each group, one array a component.
      operands: as in :class:`WindowFactors`.
      plan: the static side.
    """

    groups: tuple[tuple[Array, ...], ...]
    operands: tuple[list[Any], ...]
    plan: RulePlan = field(metadata={"static": True})


def window_factors(
    plan: RulePlan, frontier: Mapping[Var, Any], record: WindowRecord, local: Mapping[Var, Any] | None = None
) -> WindowFactors:
    """The factors of a window, all steps at once, from what it recorded (and its local values, if they are known)."""
    local = plan.program.local_values(frontier, record) if local is None else local
    static = {**plan.program.constants, **frontier}
    step_plan = plan.graph.factor_plan
    moving = [v for v in step_plan.variables if v in local]

    def one(values: list[Any]) -> Any:
        known = {**static, **dict(zip(moving, values, strict=True))}
        found = step_plan.evaluate(known.__getitem__)
        return found.df, found.D

    by_relation, between = jax.vmap(jax.vmap(one))([local[v] for v in moving])
    relations = plan.graph.hidden_param_op_relations
    df = []
    for link in plan.links:
        groups = [group.index for group in relations[link.relation].hidden_groups]
        df.append(by_relation[link.relation][groups.index(link.group)])
    alike = None
    if (reset := record.reset) is not None:
        between = jax.tree.map(lambda d: forget(d, reset), between)
    elif any(constant := groups_with_one_D(plan)):
        still = plan.program.still_values(frontier)
        _, found = one([still[v] if v in still else local[v][0, 0] for v in moving])
        chosen = zip(found, constant, strict=True)
        alike = between, tuple({pair: d[None] for pair, d in of.items()} if is_one else None for of, is_one in chosen)
    return WindowFactors(
        x=tuple(None if link.operator.x is None else local[link.operator.x] for link in plan.links),
        df=tuple(df),
        D=between,
        operands=plan.operands(frontier),
        frontier=[frontier[v] for v in plan.program.schedule.frontier],
        record=record,
        plan=plan,
        alike=alike,
    )


def traced_factors(plan: RulePlan) -> tuple[Any, Any]:
    """The factors of one step of one example, traced from their variables; and a tree ``(df, D)`` of their shapes.

    ``df`` is for each relation, as the graph has them.
    """
    step_plan = plan.graph.factor_plan

    def factors(values: list[Any]) -> Any:
        found = step_plan.evaluate(dict(zip(step_plan.variables, values, strict=True)).__getitem__)
        return found.df, found.D

    return jax.make_jaxpr(factors, return_shape=True)([v.aval for v in step_plan.variables])


def groups_with_one_D(plan: RulePlan) -> list[bool]:
    """For each group, whether its ``D`` is made of parameters alone, the same at all steps of a window."""
    return plan.once("groups with one D", lambda: _find_groups_with_one_D(plan))


def _find_groups_with_one_D(plan: RulePlan) -> list[bool]:
    program, variables = plan.program, plan.graph.factor_plan.variables
    still = {v for eqn in program.still_equations for v in eqn.outvars}.union(
        program.constants, program.schedule.frontier
    )
    traced, shapes = traced_factors(plan)
    jaxpr, _ = open_jaxpr(traced)
    sources = [inner for inner, v in zip(jaxpr.invars, variables, strict=True) if v not in still]
    reached = IndexedJaxpr(jaxpr).reached(sources, range(len(jaxpr.eqns)))
    changes = [isinstance(v, Var) and v in reached for v in jaxpr.outvars]
    _, by_group = jax.tree.unflatten(jax.tree.structure(shapes), changes)
    return [bool(entries) and not any(entries.values()) for entries in by_group]


def signal_of_states(plan: RulePlan, gradients: Sequence[Any], operands: tuple[list[Any], ...]) -> Signal:
    """The signal that gradients of the states (leaves ``(batch, ...)``, in the program's order) stand for."""
    by_variable = dict(zip(plan.program.state_invars, gradients, strict=True))
    groups = []
    for group in plan.graph.hidden_groups:
        values = [by_variable[v] for v in group.hidden_invars]
        groups.append(tuple(group.components.of_cotangents(values, a) for a in range(len(group.components))))
    return Signal(tuple(groups), operands, plan)


def forget(value: Array, reset: Array) -> Array:
    """Zero where a new sequence starts: nothing before it acts on what follows."""
    where = jnp.expand_dims(reset, tuple(range(2, value.ndim)))
    return jnp.where(where, jnp.zeros_like(value), value)
