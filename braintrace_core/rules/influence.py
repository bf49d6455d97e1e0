"""Rules that follow the influence of whole parameters on all hidden states together, not unit by unit.

They see the step as one function ``z' = F(z, theta)`` from the hidden states, as a vector of real numbers, and the
values made of parameters (``theta``) to the next states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._compat import Var
from ..compiler.module_info import is_differentiable
from .factors import Signal, WindowFactors
from .plan import RulePlan

__all__ = ["HiddenVector", "parameter_variables", "step_map"]


class HiddenVector:
    """All hidden states of one example as one vector of real numbers, group by group, component by component."""

    def __init__(self, plan: RulePlan):
        self.plan = plan
        self.groups = plan.graph.hidden_groups
        self.size = sum(len(g.components) * int(np.prod(g.varshape)) for g in self.groups)
        self.dtype = jnp.result_type(*(g.components.real_dtype(0) for g in self.groups))

    def of_states(self, states: Mapping[Var, Any], *, after: bool) -> Array:
        """The vector of the states' values by variable, before or after a step."""
        parts = []
        for group in self.groups:
            values = [states[v] for v in (group.hidden_outvars if after else group.hidden_invars)]
            for state, slot, imaginary in group.components.items:
                value = values[state] if slot is None else values[state][..., slot]
                parts.append((jnp.imag(value) if imaginary else jnp.real(value)).ravel().astype(self.dtype))
        return jnp.concatenate(parts)

    def to_states(self, vector: Array, like: Mapping[Var, Any]) -> dict[Var, Any]:
        """The states before a step with the hidden ones replaced by those of ``vector``."""
        result, start = dict(like), 0
        for group in self.groups:
            components = group.components
            units = int(np.prod(components.varshape))
            pieces: dict[int, list[Array]] = {}
            for state, _, imaginary in components.items:
                piece = vector[start : start + units].reshape(components.varshape)
                start += units
                found = pieces.setdefault(state, [])
                if imaginary:
                    found[-1] = lax_complex(found[-1], piece)
                else:
                    found.append(piece)
            for i, v in enumerate(group.hidden_invars):
                value = jnp.stack(pieces[i], axis=-1) if components.stacked[i] else pieces[i][0]
                result[v] = value.astype(v.aval.dtype)
        return result

    def of_signal(self, signal: Signal) -> Array:
        """A signal as a vector for each example, ``(batch, size)``."""
        parts = [value.reshape(value.shape[0], -1).astype(self.dtype) for group in signal.groups for value in group]
        return jnp.concatenate(parts, axis=-1)


def lax_complex(real: Array, imaginary: Array) -> Array:
    """``real + i imaginary``."""
    return jax.lax.complex(real, imaginary)


def parameter_variables(plan: RulePlan) -> list[Var]:
    """The differentiable variables made of parameters that the next states depend on."""
    part = plan.program.schedule.next_states
    return [v for v in plan.program.schedule.frontier if v in part.reads and is_differentiable(v.aval)]


def step_map(vector: HiddenVector, factors: WindowFactors) -> tuple[Callable[[Array, Sequence[Any], Any], Array], Any]:
    """The step of one example as ``F(z, theta, now) -> z'``, and its ``now`` for every step and example."""
    program = vector.plan.program
    variables = parameter_variables(vector.plan)
    frontier = factors.frontier_values()
    recorded = program.schedule.recorded
    places = [recorded.index(v) for v in program.state_invars]

    def run(z: Array, theta: Sequence[Any], now: Any) -> Array:
        inputs, states, reset = now
        before = vector.to_states(z, dict(zip(program.state_invars, states, strict=True)))
        known = {**frontier, **dict(zip(variables, theta, strict=True))}
        new = vector.of_states(program.next_states(known, before, inputs), after=True)
        del reset
        return new

    record = factors.record
    return run, (record.inputs, tuple(record.values[i] for i in places), record.reset)
