"""The online gradient of a window: ordinary differentiation inside it, traces for what lies before it.

online gradient = gradient of the window + contract(traces, gradient of the states at its start)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._compat import Var
from ..ops.dtypes import common_dtype
from ..ops.sums import sum_of_parts
from .baselines import BPTT, TBPTT, checkpointed_gradient
from .dni import DNI, with_future
from .factors import Signal, WindowFactors, signal_of_states, window_factors
from .operators import add_to
from .plan import RulePlan
from .rule import OperandGradients, Rule, Traces
from .shares import can_be_shared, in_shares
from .signals import StepAlone, modulated, own_signals, step_alone, through_operators, with_start
from .window import WindowGradient, WindowRecord, WindowResult

__all__ = [
    "OnlineGradient",
    "PresentGradient",
    "online_gradient",
    "past_gradient",
    "step_gradient",
    "step_online_gradient",
    "window_gradient",
]

Loss = Callable[[WindowResult], tuple[Array, Any]]


class OnlineGradient(NamedTuple):
    """What one window gives.

    Attributes:
      value, aux: of the loss.
      states: leaves of the states after the window.
      traces: after the window.
      gradients: one for each parameter leaf.
    """

    value: Array
    aux: Any
    states: list[Array]
    traces: Traces
    gradients: list[Array]


class Waiting(NamedTuple):
    """The gradient of a window, still in its parts.

    Attributes:
      operators: operator -> gradient of its result, ``(time, batch, ...)``.
      direct: gradients of the schedule's direct variables.
    """

    operators: dict[int, Array]
    direct: tuple[Array, ...]


class PresentGradient(NamedTuple):
    """What a window says without its past: the ordinary gradient, and what a rule needs to add the past.

    Attributes:
      value, aux: of the loss.
      gradients: one for each parameter leaf, within the window. With step credit, of that what no trace tells.
      before, after: leaves of the states at the window's ends.
      signal: with window credit, the gradients of ``before`` (None for those without); with step credit, each step's
        signal for each group and component, ``(time, batch, *varshape)``, of the states after it. Where outputs see
        the states before a step too, one more comes first, of the states before the window.
      record: what the window recorded; None if it has to be run again.
      inputs, reset: the window's own.
      waiting: with ``wait``, gradients that have not been sent back to the parameters yet, and are not summed over the
        batch; ``gradients`` are zero then.
    """

    value: Array
    aux: Any
    gradients: list[Array]
    before: list[Array]
    after: list[Array]
    signal: Any
    record: WindowRecord | None
    inputs: list[Any]
    reset: Any
    waiting: Waiting | None = None


def online_gradient(
    plan: RulePlan,
    rule: Rule,
    loss: Loss,
    parameters: Sequence[Any],
    states: Sequence[Any],
    traces: Traces,
    inputs: Sequence[Any],
    reset: Any = None,
    initial: Sequence[Any] | None = None,
) -> OnlineGradient:
    """The loss of a window and its online gradient, with window credit.

    Args:
      plan: the static side of the graph.
      rule: the learning rule.
      loss: ``loss(window) -> (scalar, aux)``, of the window's outputs.
      parameters, states, inputs: leaves in the program's order; inputs are ``(time, batch, ...)``.
      traces: before the window.
      reset, initial: where new sequences start, and what they start from.
    """
    present = window_gradient(plan, loss, parameters, states, inputs, reset, initial, rule=rule, wait=True)
    return _with_past(plan, rule, parameters, traces, present, initial, "window")


def step_online_gradient(
    plan: RulePlan,
    rule: Rule,
    loss: Loss,
    parameters: Sequence[Any],
    states: Sequence[Any],
    traces: Traces,
    inputs: Sequence[Any],
    reset: Any = None,
    initial: Sequence[Any] | None = None,
    modulator: Any = None,
) -> OnlineGradient:
    """The loss of a window and its online gradient, with step credit: each step's own signal times its own traces.

    Operators that no trace follows get their gradient within the window.

    Args:
      modulator: ``(time, batch)`` or ``(time, batch, *varshape)``: a signal that takes the place of the loss's for all
        operators that a trace follows; None for the loss's own.
      plan, rule, loss, parameters, states, traces, inputs, reset, initial: as in :func:`online_gradient`; the loss
        must be a sum over steps.
    """
    present = step_gradient(
        plan, loss, parameters, states, inputs, reset, initial, rule=rule, modulator=modulator, wait=True
    )
    return _with_past(plan, rule, parameters, traces, present, initial, "step")


def _with_past(
    plan: RulePlan,
    rule: Rule,
    parameters: Sequence[Any],
    traces: Traces,
    present: PresentGradient,
    initial: Sequence[Any] | None,
    credit: str,
) -> OnlineGradient:
    more, traces = past_gradient(plan, rule, parameters, traces, present, initial, credit)
    gradients = [a + b for a, b in zip(present.gradients, more, strict=True)]
    return OnlineGradient(present.value, present.aux, present.after, traces, gradients)


def window_gradient(
    plan: RulePlan,
    loss: Loss,
    parameters: Sequence[Any],
    states: Sequence[Any],
    inputs: Sequence[Any],
    reset: Any = None,
    initial: Sequence[Any] | None = None,
    rule: Rule | None = None,
    wait: bool = False,
) -> PresentGradient:
    """The ordinary gradient of a window, and that of the states at its start.

    Arguments as in :func:`online_gradient`; the rule matters only if it is ``BPTT(checkpoint="sqrt")``.

    Args:
      wait: whether gradients are to wait for those of the past, and go back to the parameters with them. Where a batch
        is divided among devices, each gradient is then summed over them once.
    """
    program = plan.program
    states, inputs = list(states), list(inputs)
    if isinstance(rule, BPTT) and rule.checkpoint == "sqrt":
        value, aux, after, gradients = checkpointed_gradient(program, loss, parameters, states, inputs, reset, initial)
        return PresentGradient(value, aux, gradients, states, after, [None] * len(states), None, inputs, reset)
    frontier = program.frontier(parameters)
    value, aux, window, gradient = program.value_and_gradient(loss, frontier, states, inputs, reset, initial)
    gradients, waiting = _sent_back(plan, parameters, frontier, window.record, gradient, wait)
    return PresentGradient(
        value, aux, gradients, states, window.states, gradient.states, window.record, inputs, reset, waiting
    )


def step_gradient(
    plan: RulePlan,
    loss: Loss,
    parameters: Sequence[Any],
    states: Sequence[Any],
    inputs: Sequence[Any],
    reset: Any = None,
    initial: Sequence[Any] | None = None,
    rule: Rule | None = None,
    modulator: Any = None,
    wait: bool = False,
) -> PresentGradient:
    """Each step's own signal, and the gradient within the window of what no trace follows.

    Arguments as in :func:`step_online_gradient`; the rule matters only if it has random feedback, or follows whole
    parameters (``rtrl``, ``snap``, ``uoro``). ``wait`` as in :func:`window_gradient`.
    """
    program = plan.program
    states, inputs = list(states), list(inputs)
    frontier = program.frontier(parameters)
    feedback = random_feedback(plan, rule, frontier)
    alone = None
    if rule is not None and rule.follows_parameters:
        window = program.run(frontier, states, inputs, reset, initial)
        value, aux = loss(window)
        alone = step_alone(plan, loss, frontier, window, feedback)
        gradient, signal = WindowGradient(alone.operators, alone.direct, [], {}), alone.after
    else:
        value, aux, window, gradient = program.value_and_gradient(
            loss,
            frontier,
            states,
            inputs,
            reset,
            initial,
            operators=sorted({*plan.not_followed, *(k for fed in plan.feeds_elsewhere.values() for k in fed)}),
            want_states=False,
            want_present=modulator is None,
            feedback=feedback,
        )
        if program.outputs_see_past or not set(program.seen_past_states) <= set(plan.not_followed):
            alone = step_alone(plan, loss, frontier, window, feedback)
        beside = _beside_traces(plan, frontier, window.record, gradient.operators, alone)
        within = {i: gradient.operators[i] for i in plan.not_followed}
        gradient = gradient._replace(operators={**beside, **within})
        if modulator is None:
            signal = own_signals(plan, gradient.present, frontier, window.record)
    if modulator is not None:
        signal = modulated(plan, modulator)
    elif program.outputs_see_past:
        assert alone is not None
        signal = with_start(signal, alone.before, reset)
    gradients, waiting = _sent_back(plan, parameters, frontier, window.record, gradient, wait)
    return PresentGradient(value, aux, gradients, states, window.states, signal, window.record, inputs, reset, waiting)


def _beside_traces(
    plan: RulePlan,
    frontier: Mapping[Var, Any],
    record: WindowRecord,
    within: Mapping[int, Array],
    alone: StepAlone | None,
) -> dict[int, Array]:
    """What is said of operators' results besides what their traces tell, which is what they do to their own states.

    Args:
      plan, frontier, record: what the window ran with, and recorded.
      within: the gradients within the window of the results of :attr:`RulePlan.feeds_elsewhere`.
      alone: what each step's loss says past its hidden states; None if that is nothing.
    """
    found = {} if alone is None else dict(alone.operators)
    for i, fed in plan.feeds_elsewhere.items():
        rest = {k: within[k] - alone.operators[k] if alone and k in alone.operators else within[k] for k in fed}
        more = through_operators(plan, frontier, record, i, rest)
        found[i] = found[i] + more if i in found else more
    return found


def _sent_back(
    plan: RulePlan,
    parameters: Sequence[Any],
    frontier: Mapping[Var, Any],
    record: WindowRecord,
    gradient: WindowGradient,
    wait: bool,
) -> tuple[list[Array], Waiting | None]:
    """Gradients of the parameters; or zeros, and those that wait."""
    if wait:
        return [jnp.zeros_like(p) for p in parameters], Waiting(gradient.operators, gradient.direct)
    program = plan.program
    found = program.operand_gradients(frontier, program.local_values(frontier, record), gradient.operators)
    for var, value in zip(program.schedule.direct, gradient.direct, strict=True):
        add_to(found, var, value)
    return program.parameter_gradients(parameters, found), None


def past_gradient(
    plan: RulePlan,
    rule: Rule,
    parameters: Sequence[Any],
    traces: Traces,
    present: PresentGradient,
    initial: Sequence[Any] | None = None,
    credit: str = "window",
    fine: Any = None,
    anew: Any = None,
    shares: int = 1,
    reduce: Callable[[list[Array]], list[Array]] | None = None,
    place: Callable[[str, Array], Array] | None = None,
) -> tuple[list[Array], Traces]:
    """What a rule adds to the gradient of a window, for each parameter leaf, and the traces after it.

    Gradients of the window that wait are added too.

    Args:
      plan, rule, parameters: as in :func:`online_gradient`.
      traces: before the window.
      present: from :func:`window_gradient` or :func:`step_gradient`.
      initial: what new sequences start from.
      credit: which of the two it was.
      fine, anew: as in :class:`WindowFactors`, for a rule that minds them.
      shares: in how many shares the batch lies on different devices: the terms of each gradient are then summed within
        a share, and the shares once.
      reduce: sums gradients whose first axis is the shares; None for a plain sum.
      place: ``place(name, x)`` puts an operator's input, ``(time, batch, ...)``, on those devices that have its trace,
        ``"path/of/parameter@relation.x"``; None to leave that to the compiler.
    """
    program = plan.program
    waiting = present.waiting or Waiting({}, ())
    found: dict[Var, Array] = dict(zip(program.schedule.direct, waiting.direct, strict=False))
    if isinstance(rule, TBPTT) and not waiting.operators:
        return program.parameter_gradients(parameters, found), traces
    frontier = program.frontier(parameters)
    record = present.record
    if record is None:
        record = program.run(frontier, present.before, present.inputs, present.reset, initial).record
    if isinstance(rule, DNI) and credit == "window":
        future, traces = with_future(plan, rule, traces, frontier, record, present, initial)
        for var, ahead in future.items():
            _add(found, var, ahead)

    def of_examples(
        traces: Traces, record: WindowRecord, signal: Any, cotangents: dict[int, Array]
    ) -> tuple[dict[Var, Array], Traces]:
        """Gradients of variables of the frontier from some examples, and the traces of these after the window."""
        local = program.local_values(frontier, record)
        if place is not None:
            first = {link.operator.x: link.name for link in reversed(plan.links) if link.operator.x is not None}
            local = {**local, **{x: place(f"{name}.x", local[x]) for x, name in first.items()}}
        own = program.operand_gradients(frontier, local, cotangents)
        if not isinstance(rule, TBPTT):
            factors = replace(window_factors(plan, frontier, record, local), fine=fine, anew=anew)
            if credit == "window":
                at_start = signal_of_states(plan, signal, factors.operands)
                more, traces = rule.gradient_and_advance(traces, at_start, factors)
            else:
                start, at_steps = _moments(plan, signal, factors)
                more, traces = rule.step_gradient_and_advance(traces, factors, at_steps, start)
            own = add_operand_gradients(plan, own, more)
        return own, traces

    over_batch = (traces, record, present.signal, waiting.operators)
    if shares == 1 or not can_be_shared(traces):
        gradients, traces = of_examples(*over_batch)
        for var, gradient in gradients.items():
            _add(found, var, gradient)
        return program.parameter_gradients(parameters, found), traces

    def of_share(*args: Any) -> tuple[list[Array], Traces]:
        gradients, traces = of_examples(*args)
        return program.parameter_gradients(parameters, gradients), traces

    parts, traces = in_shares(of_share, shares, over_batch, (0, 1, 0 if credit == "window" else 1, 1))
    total = [sum_of_parts(part, 0) for part in parts] if reduce is None else reduce(parts)
    if found:
        total = [a + b for a, b in zip(total, program.parameter_gradients(parameters, found), strict=True)]
    return total, traces


def _moments(plan: RulePlan, signal: Any, factors: WindowFactors) -> tuple[Signal | None, Signal]:
    """What each step says of the states before the window, if outputs see such states, and of those after each step."""
    if jax.tree.leaves(signal)[0].shape[0] == factors.sizes[0]:
        return None, Signal(signal, factors.operands, plan)
    start, at_steps = jax.tree.map(lambda of: of[0], signal), jax.tree.map(lambda of: of[1:], signal)
    return Signal(start, factors.operands, plan), Signal(at_steps, factors.operands, plan)


def random_feedback(plan: RulePlan, rule: Rule | None, frontier: Mapping[Var, Any]) -> dict[int, Any]:
    """For a rule with random feedback, operands to send errors back through, for every operator of the readout."""
    if rule is None or rule.feedback_seed is None:
        return {}
    program = plan.program
    readout = {id(eqn) for eqn in program.schedule.outputs.eqns}
    found = {}
    for i, operator in enumerate(program.schedule.operators):
        if id(operator.eqn) in readout and operator.x is not None:
            key = jax.random.fold_in(jax.random.key(rule.feedback_seed), i)
            operands = program.operand_values(operator, frontier)
            for j, (place, var) in enumerate(zip(operator.eqn.invars, operands, strict=True)):
                if place in operator.operands.values():
                    scale = jnp.sqrt(jnp.mean(jnp.square(var)))
                    draw = jax.random.normal(jax.random.fold_in(key, j), var.shape, var.dtype)
                    operands[j] = lax.stop_gradient(scale * draw)
            found[i] = operands
    if not found:
        raise ValueError(
            "Random feedback found no readout to send errors back through: no weight stands between the "
            "hidden states and the outputs of a step. A readout that is a hidden state itself (a leaky one in the "
            "carry) is not taken for one: let the outputs be `h @ weights`, and use `kappa` for the leak."
        )
    return found


def add_operand_gradients(plan: RulePlan, found: Mapping[Var, Array], more: OperandGradients) -> dict[Var, Array]:
    """``found`` with a rule's gradients added to the variables that they belong to."""
    result = dict(found)
    for link in plan.links:
        for key, var in link.operator.operands.items():
            name = f"{link.name}.{key}"
            if name in more:
                _add(result, var, more[name])
    for i, var in enumerate(plan.program.schedule.frontier):
        if f"parameter{i}" in more:
            _add(result, var, more[f"parameter{i}"])
    return result


def _add(gradients: dict[Var, Array], var: Var, value: Array) -> None:
    """Add to a gradient whose dtype may differ (that of a weight, and that of its trace)."""
    if var in gradients:
        dtype = common_dtype(gradients[var].dtype, value.dtype)
        value = gradients[var].astype(dtype) + value.astype(dtype)
    gradients[var] = value
