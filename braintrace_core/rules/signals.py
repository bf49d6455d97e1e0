"""Each step's own signal: what the loss of a step says of the hidden states of that step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._compat import bind_equation
from ..compiler.jaxpr_tools import evaluate
from .plan import RulePlan
from .window import WindowResult

__all__ = ["modulated", "past_states", "present_signals", "whole_step_signals"]

Groups = tuple[tuple[Array, ...], ...]


def present_signals(plan: RulePlan, present: Mapping[int, Array]) -> Groups:
    """Signals where outputs see hidden states alone, from the gradients of states after each step."""
    places = {v: i for i, v in enumerate(plan.program.state_outvars)}
    groups = []
    for group in plan.graph.hidden_groups:
        values = [present[places[v]] for v in group.hidden_outvars]
        groups.append(tuple(group.components.of_cotangents(values, a) for a in range(len(group.components))))
    return tuple(groups)


def whole_step_signals(plan: RulePlan, loss: Any, parameters: Sequence[Any], window: WindowResult) -> Groups:
    """Signals through the whole step, all steps at once: a layer above may act on the loss within the same step."""
    program, minfo, perturbed = plan.program, plan.graph.module_info, plan.graph.hidden_perturb
    if perturbed is None:
        raise ValueError("Step credit needs the graph's perturbed step: compile with `include_hidden_perturb=True`.")
    states = [window.record.values[program.schedule.recorded.index(v)] for v in program.state_invars]
    weights = dict(zip(minfo.weight_invars, parameters, strict=True))

    def outputs(terms: list[Array]) -> list[Array]:
        def one(inputs: Any, states: Any, terms: Any) -> Any:
            known = {
                **weights,
                **dict(zip(minfo.input_invars, inputs, strict=True)),
                **dict(zip(program.state_invars, states, strict=True)),
            }
            flat = [known[v] for v in minfo.jaxpr.invars]
            return perturbed.eval_jaxpr(flat, terms)[: minfo.num_var_out]

        return jax.vmap(jax.vmap(one))(window.record.inputs, states, terms)

    of_path = minfo.hidden_path_to_invar
    terms = [
        jnp.zeros((*window.record.sizes, *of_path[p].aval.shape), of_path[p].aval.dtype)
        for p in perturbed.perturb_hidden_paths
    ]
    found = jax.grad(lambda terms: loss(window._replace(outputs=outputs(terms)))[0])(terms)
    by_path = dict(zip(perturbed.perturb_hidden_paths, found, strict=True))
    groups = []
    for group in plan.graph.hidden_groups:
        values = [by_path[p] for p in group.hidden_paths]
        groups.append(tuple(group.components.of_cotangents(values, a) for a in range(len(group.components))))
    return tuple(groups)


def past_states(
    plan: RulePlan, followed: Sequence[int], loss: Any, parameters: Sequence[Any], window: WindowResult
) -> dict[int, Array]:
    """For some operators that a trace follows, what the outputs of a step say of their results past all hidden states.

    A result may feed a hidden state and be an output too; the trace knows nothing of the latter.
    """
    program, minfo = plan.program, plan.graph.module_info
    operators = program.schedule.operators
    hidden = {v for group in plan.graph.hidden_groups for v in group.hidden_outvars}
    states = [window.record.values[program.schedule.recorded.index(v)] for v in program.state_invars]
    weights = dict(zip(minfo.weight_invars, parameters, strict=True))

    def one(inputs: Any, states: Any, terms: Any) -> Any:
        known = {
            **weights,
            **dict(zip(minfo.input_invars, inputs, strict=True)),
            **dict(zip(program.state_invars, states, strict=True)),
        }
        added = {operators[i].y: term for i, term in zip(followed, terms, strict=True)}

        def run(eqn: Any, values: list[Any]) -> list[Any]:
            results = zip(eqn.outvars, bind_equation(eqn, values), strict=True)
            moved = [(v, value + added[v] if v in added else value) for v, value in results]
            return [lax.stop_gradient(value) if v in hidden else value for v, value in moved]

        return evaluate(minfo.jaxpr, minfo.consts, [known[v] for v in minfo.jaxpr.invars], run)[: minfo.num_var_out]

    def value(terms: list[Array]) -> Array:
        outputs = jax.vmap(jax.vmap(one))(window.record.inputs, states, terms)
        return loss(window._replace(outputs=outputs))[0]

    results = [operators[i].y.aval for i in followed]
    zeros = [jnp.zeros((*window.record.sizes, *y.shape), y.dtype) for y in results]
    return dict(zip(followed, jax.grad(value)(zeros), strict=True))


def modulated(plan: RulePlan, modulator: Array) -> Groups:
    """The same signal for all components of all groups."""
    groups = []
    for group in plan.groups:
        spread = jnp.expand_dims(modulator, tuple(range(modulator.ndim, 2 + len(group.varshape))))
        value = jnp.broadcast_to(spread, (*modulator.shape[:2], *group.varshape))
        groups.append(tuple(value.astype(dtype) for dtype in group.dtypes))
    return tuple(groups)
