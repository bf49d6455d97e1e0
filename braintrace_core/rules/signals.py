"""Each step's own signal: what the loss of a step says of the hidden states of that step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .._compat import JaxprEqn, Var, bind_equation, open_jaxpr
from ..compiler.jaxpr_tools import IndexedJaxpr, evaluate
from ..compiler.schedule import Operator
from ..ops import is_etp
from ..ops.in_place import on_one_device
from .factors import forget
from .parts import PartRunner
from .plan import RulePlan
from .products import loop_products
from .window import WindowProgram, WindowRecord, WindowResult

__all__ = ["StepAlone", "modulated", "own_signals", "step_alone", "through_operators", "with_start"]

Groups = tuple[tuple[Array, ...], ...]


def own_signals(
    plan: RulePlan, present: Mapping[Var, Array], frontier: Mapping[Var, Any], record: WindowRecord
) -> Groups:
    """Signals of the hidden states after each step, from what the outputs of the step say of what they see."""
    if plan.program.outputs_see_states_only:
        return _by_component(plan, present)
    return _through_whole_step(plan, present, frontier, record)


def _through_whole_step(
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
    products = loop_products(schedule.operators, schedule.next_states, resting, record.sizes).values()
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


def _by_component(plan: RulePlan, gradients: Mapping[Var, Array], after: bool = True) -> Groups:
    """Gradients of the states after a step, or before it, as each group's components take them."""
    groups = []
    for group in plan.graph.hidden_groups:
        values = [gradients[v] for v in (group.hidden_outvars if after else group.hidden_invars)]
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


class StepAlone(NamedTuple):
    """What the loss of each step says past the hidden states after it, and of these; arrays are ``(time, batch, ...)``.

    Attributes:
      operators: operator -> gradient of its result.
      direct: gradients of the schedule's direct variables, sums over steps and examples.
      after: for each group and component, of the states after each step.
      before: the same of the states before it.
    """

    operators: dict[int, Array]
    direct: tuple[Array, ...]
    after: Groups
    before: Groups


def step_alone(
    plan: RulePlan, loss: Any, frontier: Mapping[Var, Any], window: WindowResult, feedback: Mapping[int, Any]
) -> StepAlone:
    """What the loss of each step says, where the hidden states after the step hide from it all that made them.

    An operator's result may feed a hidden state and be an output too; outputs may be made of the states before a step;
    of hidden states, one may be made of another. What passes through a hidden state is for its trace to tell.

    Args:
      plan, loss, frontier: what the window ran with.
      window: as it ran.
      feedback: as in :meth:`WindowProgram.value_and_gradient`.
    """
    program, minfo, record = plan.program, plan.graph.module_info, window.record
    schedule, groups = program.schedule, plan.graph.hidden_groups
    recorded = dict(zip(schedule.recorded, record.values, strict=True))
    known = dict(zip(minfo.input_invars, record.inputs, strict=True))
    known.update({v: recorded[v] for v in program.state_invars})
    before = {v: known[v] for group in groups for v in group.hidden_invars}
    after = [v for group in groups for v in group.hidden_outvars]
    seen = program.seen_past_states
    results = [schedule.operators[i].y for i in seen]
    still = {y for i, y in zip(seen, results, strict=True) if schedule.operators[i].is_still and on_one_device()}
    zeros = {
        v: jnp.zeros((*(() if v in still else record.sizes), *v.aval.shape), v.aval.dtype) for v in (*results, *after)
    }
    outvars = minfo.jaxpr.outvars[: minfo.num_var_out]

    def value(added: list[Array], direct: list[Array], states: list[Array]) -> Array:
        terms = dict(zip(zeros, added, strict=True))
        run = PartRunner(
            schedule.operators,
            {**program.constants, **frontier},
            dict(zip(schedule.direct, direct, strict=True)),
            feedback,
            still={v: terms.pop(v) for v in still},
            held=frozenset(after),
        )
        windowed = {**known, **dict(zip(before, states, strict=True))}
        windowed.update(run.over_window(program.whole_step, windowed, terms, record.sizes))
        return loss(window._replace(outputs=[run.stacked(v, windowed, record.sizes) for v in outvars]))[0]

    direct = [frontier[v] for v in schedule.direct]
    of_terms, of_direct, of_states = jax.grad(value, (0, 1, 2))(list(zeros.values()), direct, list(before.values()))
    by_term = dict(zip(zeros, of_terms, strict=True))
    return StepAlone(
        {i: by_term[y][None, None] if y in still else by_term[y] for i, y in zip(seen, results, strict=True)},
        tuple(of_direct),
        _by_component(plan, by_term),
        _by_component(plan, dict(zip(before, of_states, strict=True)), after=False),
    )


def through_operators(
    plan: RulePlan, frontier: Mapping[Var, Any], record: WindowRecord, index: int, cotangents: Mapping[int, Array]
) -> Array:
    """What is said of an operator's result through operators that it feeds, ``(time, batch, ...)``.

    Args:
      plan, frontier, record: what the window ran with, and recorded.
      index: the operator.
      cotangents: what is said of the results of those that it feeds.
    """
    program, schedule = plan.program, plan.program.schedule
    y = schedule.operators[index].y
    recorded = dict(zip(plan.graph.module_info.input_invars, record.inputs, strict=True))
    recorded.update(zip(schedule.recorded, record.values, strict=True))
    run = PartRunner(schedule.operators, {**program.constants, **frontier}, {}, {})

    def results(term: Array) -> list[Array]:
        moved = {**recorded, y: recorded[y] + term} if y in recorded else recorded
        local = {**moved, **run.over_window(schedule.local, moved, {y: term}, record.sizes)}
        return [_results_of(schedule.operators[k], program, frontier, local) for k in cotangents]

    _, pull_back = jax.vjp(results, jnp.zeros((*record.sizes, *y.aval.shape), y.aval.dtype))
    return pull_back(list(cotangents.values()))[0]


def _results_of(
    operator: Operator, program: WindowProgram, frontier: Mapping[Var, Any], local: Mapping[Var, Array]
) -> Array:
    """An operator's results from its inputs, ``(time, batch, ...)``."""
    operands = program.operand_values(operator, frontier)

    def one(x: Any) -> Any:
        given = [x if v is operator.x else value for v, value in zip(operator.eqn.invars, operands, strict=True)]
        return bind_equation(operator.eqn, given)[operator.eqn.outvars.index(operator.y)]

    return jax.vmap(jax.vmap(one))(local[operator.x])


def with_start(after: Groups, before: Groups, reset: Array | None) -> Groups:
    """Signals of the states before a window and after each step, ``(1 + time, batch, ...)``.

    Args:
      after, before: what each step says of the states after it, and of those before it.
      reset: where a new sequence starts: nothing is said of the one that has ended.
    """

    def joined(after: Array, before: Array) -> Array:
        before = before if reset is None else forget(before, reset)
        return jnp.concatenate([before[:1], before[1:] + after[:-1], after[-1:]])

    return jax.tree.map(joined, after, before)


def modulated(plan: RulePlan, modulator: Array) -> Groups:
    """The same signal for all components of all groups."""
    groups = []
    for group in plan.groups:
        spread = jnp.expand_dims(modulator, tuple(range(modulator.ndim, 2 + len(group.varshape))))
        value = jnp.broadcast_to(spread, (*modulator.shape[:2], *group.varshape))
        groups.append(tuple(value.astype(dtype) for dtype in group.dtypes))
    return tuple(groups)
