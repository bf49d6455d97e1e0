"""Each step's own signal: what the loss of a step says of the hidden states of that step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._compat import JaxprEqn, Var, bind_equation, open_jaxpr
from ..compiler.jaxpr_tools import IndexedJaxpr, evaluate
from ..ops import is_etp
from .plan import RulePlan
from .products import loop_products
from .window import WindowRecord, WindowResult

__all__ = ["modulated", "past_states", "present_signals", "whole_step_signals"]

Groups = tuple[tuple[Array, ...], ...]


def present_signals(plan: RulePlan, present: Mapping[Var, Array]) -> Groups:
    """Signals where outputs see hidden states alone, from the gradients of states after each step."""
    return _by_component(plan, present)


def whole_step_signals(
    plan: RulePlan, present: Mapping[Var, Array], frontier: Mapping[Var, Any], record: WindowRecord
) -> Groups:
    """Signals through the whole step, all steps at once: a layer above may act on the loss within the same step.

    What the outputs say of everything that they see is sent back through the perturbed step. The window has run
    already: operators' results are those that it recorded.
    """
    program, minfo, perturbed = plan.program, plan.graph.module_info, plan.graph.hidden_perturb
    if perturbed is None:
        raise ValueError("Step credit needs the graph's perturbed step: compile with `include_hidden_perturb=True`.")
    jaxpr, _ = open_jaxpr(perturbed.perturb_jaxpr)
    terms = jaxpr.invars[-len(perturbed.perturb_hidden_paths) :]
    with_term = {v: moved for v, moved in zip(minfo.jaxpr.outvars, jaxpr.outvars, strict=True) if isinstance(v, Var)}
    static = {**program.constants, **frontier}
    windowed = dict(zip(minfo.input_invars, record.inputs, strict=True))
    windowed.update(zip(program.schedule.recorded, record.values, strict=True))

    indexed = IndexedJaxpr(jaxpr)
    moving = indexed.reached(terms, range(len(jaxpr.eqns)))
    seen = [with_term.get(v, v) for v in present]
    fixed = lambda v: v not in moving and (v in static or v in windowed)  # noqa: E731
    way, _ = open_jaxpr(indexed.part(terms, seen, fixed))
    ran = [v for eqn in way.eqns if is_etp(eqn.primitive) for v in eqn.outvars if {*eqn.outvars} <= {*windowed}]
    given = [v for v in way.constvars if v in windowed]
    resting = windowed.keys() - moving - with_term.keys()
    schedule = program.schedule
    products = loop_products(schedule.operators, schedule.next_states, resting, record.sizes[0]).values()
    split = {product.operator.y: product for product in products if product.known}

    def one(terms: list[Array], given_values: list[Any], results: list[Any]) -> list[Any]:
        known = {**static, **dict(zip(given, given_values, strict=True))}
        by_result = dict(zip(ran, results, strict=True))

        def run(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
            if eqn.outvars[0] not in by_result:
                return bind_equation(eqn, operands)
            if product := split.get(eqn.outvars[0]):  # what is beside the moving states need not be asked
                share = product.in_the_loop(product.left_operands(operands))
                left = product.left_input(operands[0])
                return _known_results([by_result[eqn.outvars[0]]], lambda x: [share(x)], [left])
            places = [i for i, v in enumerate(eqn.invars) if isinstance(v, Var) and v in moving]

            def again(*moved: Any) -> list[Any]:
                values = dict(zip(places, moved, strict=True))
                return bind_equation(eqn, [values.get(i, operand) for i, operand in enumerate(operands)])

            return _known_results([by_result[v] for v in eqn.outvars], again, [operands[i] for i in places])

        return evaluate(way, [known[v] for v in way.constvars], terms, run)

    def outcome(terms: list[Array]) -> list[Array]:
        return jax.vmap(jax.vmap(one))(terms, [windowed[v] for v in given], [windowed[v] for v in ran])

    zeros = [jnp.zeros((*record.sizes, *v.aval.shape), v.aval.dtype) for v in terms]
    (found,) = jax.vjp(outcome, zeros)[1](list(present.values()))
    by_path = dict(zip(perturbed.perturb_hidden_paths, found, strict=True))
    named = [pair for g in plan.graph.hidden_groups for pair in zip(g.hidden_outvars, g.hidden_paths, strict=True)]
    return _by_component(plan, {v: by_path[path] for v, path in named})


def _by_component(plan: RulePlan, gradients: Mapping[Var, Array]) -> Groups:
    """Gradients of the states after a step, as each group's components take them."""
    groups = []
    for group in plan.graph.hidden_groups:
        values = [gradients[v] for v in group.hidden_outvars]
        groups.append(tuple(group.components.of_cotangents(values, a) for a in range(len(group.components))))
    return tuple(groups)


def _known_results(results: list[Any], function: Callable[..., list[Any]], arguments: Sequence[Any]) -> Any:
    """``results``, which are known, but differentiated as those of a function of some arguments."""

    @jax.custom_jvp
    def known(results: Any, *arguments: Any) -> Any:
        return results

    @known.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return primals[0], jax.jvp(function, primals[1:], tangents[1:])[1]

    return known(results, *arguments)


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
