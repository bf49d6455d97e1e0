"""OSTL: online spatio-temporal learning, with the recurrence through operators or without any."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..compiler.graph import ETraceGraph
from .drtrl import DRTRL
from .factors import Signal, WindowFactors, forget
from .influence import parameter_variables, step_map
from .plan import RulePlan
from .pp_prop import PPProp
from .rule import OperandGradients, Rule, Traces, as_plan
from .sparsity import StepStructure, colour_rows

__all__ = ["OSTL"]


@dataclass(frozen=True)
class OSTL(Rule):
    """Online spatio-temporal learning (Bohnstingl et al., 2023).

    Attributes:
      recurrent: if true, D-RTRL's trace with a unit's whole effect on itself from step to step, that through operators
        (a recurrent weight's diagonal) included; with dense recurrent weights a step takes as many passes of
        differentiation as there are hidden values. If false, nothing is handed from step to step.
    """

    recurrent: bool = True

    def init(self, graph: ETraceGraph | RulePlan, batch_size: int, dtype: Any = None) -> Traces:
        plan = as_plan(graph)
        if not self.recurrent:
            return PPProp(0.0).init(plan, batch_size, dtype)
        return DRTRL().init(_coupling(plan).plan, batch_size, dtype)

    def advance(self, traces: Traces, factors: WindowFactors) -> Traces:
        if not self.recurrent:
            return PPProp(0.0).advance(traces, factors)
        return DRTRL().advance(traces, _coupled(factors))

    def gradient(self, traces: Traces, signal: Signal) -> OperandGradients:
        if not self.recurrent:
            return PPProp(0.0).gradient(traces, signal)
        return DRTRL().gradient(traces, replace(signal, plan=_coupling(signal.plan).plan))

    def step_gradient(self, traces: Traces, factors: WindowFactors, signals: Signal) -> OperandGradients:
        if not self.recurrent:
            return PPProp(0.0).step_gradient(traces, factors, signals)
        signals = replace(signals, plan=_coupling(signals.plan).plan)
        return DRTRL().step_gradient(traces, _coupled(factors), signals)


class _Coupling:
    """A unit's whole effect on itself: which entries there are, and which hidden values share a pass."""

    def __init__(self, plan: RulePlan):
        structure = StepStructure(plan)
        self.vector, pattern = structure.vector, structure.hidden
        unit = np.empty(self.vector.size, np.int64)
        self.rows: list[list[np.ndarray]] = []  # for each group and component, the rows of its units
        start, first = 0, 0
        for group in plan.groups:
            units = np.arange(int(np.prod(group.varshape, dtype=np.int64)))
            self.rows.append([start + a * units.size + units for a in range(group.count)])
            for rows in self.rows[-1]:
                unit[rows] = first + units
            start, first = start + group.count * units.size, first + units.size
        entries = [
            tuple(
                (a, b)
                for a in range(group.count)
                for b in range(group.count)
                if pattern[self.rows[g][a], self.rows[g][b]].any()
            )
            for g, group in enumerate(plan.groups)
        ]
        self.plan = plan.with_entries(entries)
        # A row shares a pass with another if neither depends on the other's own unit.
        own = unit[:, None] == np.unique(unit)[None]
        touches = pattern.astype(np.float32) @ own.astype(np.float32) > 0  # rows x units
        conflicts = touches[:, unit] | touches[:, unit].T
        np.fill_diagonal(conflicts, False)
        self.colour, self.count = colour_rows(conflicts)


def _coupling(plan: RulePlan) -> _Coupling:
    return plan.once("coupling", lambda: _Coupling(plan))


def _coupled(factors: WindowFactors) -> WindowFactors:
    """The factors with each unit's whole effect on itself for ``D``."""
    plan = factors.plan
    coupling = _coupling(plan)
    vector = coupling.vector
    run, now = step_map(vector, factors)
    frontier = factors.frontier_values()
    theta = [frontier[v] for v in parameter_variables(plan)]

    def example(at: Any) -> tuple[dict[tuple[int, int], Array], ...]:
        _, states, _ = at
        z = vector.of_states(dict(zip(plan.program.state_invars, states, strict=True)), after=False)
        _, pull_back = jax.vjp(lambda z: run(z, theta, at), z)

        def one_colour(found: Any, c: Array) -> tuple[Any, None]:
            (through,) = pull_back((jnp.asarray(coupling.colour) == c).astype(z.dtype))
            return tuple(
                {(a, b): jnp.where(coupling.colour[rows[a]] == c, through[rows[b]], d) for (a, b), d in entries.items()}
                for rows, entries in zip(coupling.rows, found, strict=True)
            ), None

        zeros = tuple(
            {(a, b): jnp.zeros(len(rows[a]), z.dtype) for a, b in group.entries}
            for rows, group in zip(coupling.rows, coupling.plan.groups, strict=True)
        )
        return lax.scan(one_colour, zeros, jnp.arange(coupling.count, dtype=jnp.int32))[0]

    flat = lax.map(jax.vmap(example), now)
    between = tuple(
        {(a, b): d.reshape(*d.shape[:2], *group.varshape).astype(group.dtypes[a]) for (a, b), d in entries.items()}
        for group, entries in zip(coupling.plan.groups, flat, strict=True)
    )
    if (reset := factors.record.reset) is not None:
        between = jax.tree.map(lambda d: forget(d, reset), between)
    return replace(factors, D=between, plan=coupling.plan)
