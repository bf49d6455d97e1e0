"""A unit's whole effect on itself from step to step, that through operators (a recurrent weight's diagonal) included.

With dense recurrent weights a step takes as many passes of differentiation as there are hidden values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .factors import WindowFactors, forget
from .influence import parameter_variables, step_map
from .plan import RulePlan
from .sparsity import StepStructure, colour_rows

__all__ = ["coupled_factors", "coupled_plan"]


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


def coupled_plan(plan: RulePlan) -> RulePlan:
    """The plan with all that a unit's components do to one another from step to step."""
    return _coupling(plan).plan


def coupled_factors(factors: WindowFactors) -> WindowFactors:
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
