"""Windows: a stretch of time run forward and differentiated, and what a learning rule needs to know about it.

A window is defined by the loop

    for t in range(steps):
        states, out[t] = step(parameters, where(reset[t], initial, states), inputs[t])

run for a batch of independent examples. The program below computes the same, but runs what does not depend on the
states for all steps at once, and takes the gradient with respect to operators' results only: each operand's gradient
is then one product over time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .._compat import JaxprEqn, Var, bind_equation
from ..compiler.analysis import StepAnalysis
from ..compiler.graph import ETraceGraph
from ..compiler.module_info import is_differentiable
from ..compiler.schedule import Operator, Part, Schedule, Stage, schedule_step
from ..ops.in_place import on_one_device
from .operators import add_to, operator_gradient
from .parts import PartRunner, TimeLoop
from .products import known_shares, loop_products, results_in_loop

__all__ = ["WindowGradient", "WindowProgram", "WindowRecord", "WindowResult"]


class WindowRecord(NamedTuple):
    """What a window leaves behind for a learning rule; every array is ``(time, batch, ...)``.

    Attributes:
      inputs: the step's inputs.
      values: the schedule's recorded variables.
      reset: where a new sequence starts; None if nowhere.
    """

    inputs: tuple[Array, ...]
    values: tuple[Array, ...]
    reset: Array | None

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of steps and of examples."""
        first = (*self.inputs, *self.values)[0]
        return first.shape[0], first.shape[1]


class WindowResult(NamedTuple):
    """A window run forward.

    Attributes:
      outputs: leaves of the step's outputs, ``(time, batch, ...)``.
      states: leaves of the states after the window, ``(batch, ...)``.
      record: what a learning rule needs.
    """

    outputs: list[Array]
    states: list[Array]
    record: WindowRecord


class WindowGradient(NamedTuple):
    """The gradient of a scalar function of a window's outputs.

    Attributes:
      operators: operator -> gradient of its result, ``(time, batch, ...)``, for those that were asked for. Summed over
        time and batch, ``(1, 1, ...)``, where the result is the same at all steps and the batch is on one device.
      direct: gradients of the schedule's direct variables.
      states: gradients of the states before the window, None for those without.
      present: for each of :attr:`WindowProgram.seen_by_outputs`, what the outputs of the same step say of it,
        ``(time, batch, ...)``.
    """

    operators: dict[int, Array]
    direct: tuple[Array, ...]
    states: list[Any]
    present: dict[Var, Array]


class WindowProgram:
    """Runs windows of a compiled graph. All methods are pure functions of arrays.

    Leaves are flat lists: parameters in the order of ``module_info.weight_invars``, states in the order of
    ``state_invars``, inputs in the order of ``module_info.input_invars``.
    """

    def __init__(self, graph: ETraceGraph):
        self.graph = graph

    @cached_property
    def schedule(self) -> Schedule:
        """The parts of the step."""
        return schedule_step(StepAnalysis(self.graph.module_info), self.graph.factor_plan.variables)

    @cached_property
    def state_invars(self) -> list[Var]:
        """The variables of the states that are not parameters, before a step."""
        minfo = self.graph.module_info
        weights = set(minfo.weight_invars)
        return [v for v in minfo.jaxpr.invars[len(minfo.input_invars) :] if v not in weights]

    @cached_property
    def state_outvars(self) -> list[Var]:
        """The same states' variables after a step."""
        minfo = self.graph.module_info
        after = dict(
            zip(minfo.jaxpr.invars[len(minfo.input_invars) :], minfo.jaxpr.outvars[minfo.num_var_out :], strict=True)
        )
        return [after[v] for v in self.state_invars]

    @cached_property
    def constants(self) -> dict[Var, Any]:
        """The values of the step's constants."""
        minfo = self.graph.module_info
        return dict(zip(minfo.jaxpr.constvars, minfo.consts, strict=True))

    def frontier(self, parameters: Sequence[Any]) -> dict[Var, Any]:
        """Values of the variables made of parameters alone."""
        values = {**self.constants, **dict(zip(self.graph.module_info.weight_invars, parameters, strict=True))}
        part = self.schedule.parameters
        made = dict(zip(part.writes, part.run(values, bind_equation), strict=True))
        return {v: made[v] if v in made else values[v] for v in self.schedule.frontier}

    def trained_variables(self, frozen: Collection[int] = ()) -> set[Var]:
        """The frontier variables that depend on a parameter other than those with ``frozen`` indices."""
        weights = self.graph.module_info.weight_invars
        trained = {v for i, v in enumerate(weights) if i not in frozen}
        for eqn in self.schedule.parameters.eqns:
            if any(isinstance(v, Var) and v in trained for v in eqn.invars):
                trained.update(eqn.outvars)
        return trained.intersection(self.schedule.frontier)

    def run(
        self,
        frontier: Mapping[Var, Any],
        states: Sequence[Any],
        inputs: Sequence[Any],
        reset: Any = None,
        initial: Sequence[Any] | None = None,
    ) -> WindowResult:
        """Run a window forward.

        Args:
          frontier: from :meth:`frontier`.
          states: leaves ``(batch, ...)``.
          inputs: leaves ``(time, batch, ...)``.
          reset: ``(time, batch)`` of bools: where a new sequence starts, or None.
          initial: for each state, what a reset sets it to (``(...)`` or ``(batch, ...)``), or None to keep it.
        """
        return self._run(frontier, {}, list(states), inputs, {}, reset, initial, {}, {})

    def value_and_gradient(
        self,
        function: Callable[[WindowResult], tuple[Array, Any]],
        frontier: Mapping[Var, Any],
        states: Sequence[Any],
        inputs: Sequence[Any],
        reset: Any = None,
        initial: Sequence[Any] | None = None,
        operators: Sequence[int] | None = None,
        want_states: bool = True,
        want_present: bool = False,
        feedback: Mapping[int, Any] | None = None,
    ) -> tuple[Array, Any, WindowResult, WindowGradient]:
        """The value, auxiliary output, window and gradient of ``function(window) -> (scalar, aux)``.

        Args:
          function: of the window's outputs.
          frontier, states, inputs, reset, initial: as in :meth:`run`.
          operators: indices of the operators whose gradient is wanted; all if None.
          want_states: whether the gradient of the states before the window is wanted.
          want_present: whether each step's own gradient of what its outputs see is wanted.
          feedback: operator index -> operands to use in its place when errors go back to its input.
        """
        steps, batch = _time_and_batch(inputs, states)
        wanted = list(range(len(self.schedule.operators))) if operators is None else list(operators)
        results = [self.schedule.operators[i].y for i in wanted]
        still = {i for i in wanted if self.schedule.operators[i].is_still and on_one_device()}
        lead = [() if i in still else (steps, batch) for i in wanted]
        deltas = [jnp.zeros((*axes, *y.aval.shape), y.aval.dtype) for axes, y in zip(lead, results, strict=True)]
        direct = tuple(frontier[v] for v in self.schedule.direct)
        moving = [i for i, v in enumerate(self.state_invars) if want_states and is_differentiable(v.aval)]
        seen = self.seen_by_outputs if want_present else []
        present = [jnp.zeros((steps, batch, *v.aval.shape), v.aval.dtype) for v in seen]

        def of(deltas: Any, direct: Any, moving_states: Any, present: Any) -> Any:
            all_states = list(states)
            for i, value in zip(moving, moving_states, strict=True):
                all_states[i] = value
            window = self._run(
                frontier,
                dict(zip(self.schedule.direct, direct, strict=True)),
                all_states,
                inputs,
                dict(zip(results, deltas, strict=True)),
                reset,
                initial,
                dict(zip(seen, present, strict=True)),
                feedback or {},
            )
            value, aux = function(window)
            return value, (aux, window)

        (value, (aux, window)), (for_operators, for_direct, for_states, for_present) = jax.value_and_grad(
            of, argnums=(0, 1, 2, 3), has_aux=True
        )(deltas, direct, tuple(states[i] for i in moving), present)
        gradients: list[Any] = [None] * len(states)
        for i, gradient in zip(moving, for_states, strict=True):
            gradients[i] = gradient
        gradient = WindowGradient(
            {i: of[None, None] if i in still else of for i, of in zip(wanted, for_operators, strict=True)},
            for_direct,
            gradients,
            dict(zip(seen, for_present, strict=True)),
        )
        return value, aux, window, gradient

    def next_states(
        self, frontier: Mapping[Var, Any], states: Mapping[Var, Any], inputs: Sequence[Any]
    ) -> dict[Var, Any]:
        """One step of one example: the states after it, by variable, from those before it."""
        part = self.schedule.next_states
        known = {
            **self.constants,
            **frontier,
            **states,
            **dict(zip(self.graph.module_info.input_invars, inputs, strict=True)),
        }
        made = dict(zip(part.writes, part.run(known, bind_equation), strict=True))
        return {v: made.get(v, known.get(v)) for v in self.state_outvars}

    def local_values(self, frontier: Mapping[Var, Any], record: WindowRecord) -> dict[Var, Any]:
        """Operators' inputs and what the factors ask for, for every step: ``(time, batch, ...)``."""
        windowed = {
            **dict(zip(self.graph.module_info.input_invars, record.inputs, strict=True)),
            **dict(zip(self.schedule.recorded, record.values, strict=True)),
        }
        runner = PartRunner(self.schedule.operators, {**self.constants, **frontier}, {}, {})
        return {**windowed, **runner.over_window(self.schedule.local, windowed, {}, record.sizes)}

    @cached_property
    def still_equations(self) -> list[JaxprEqn]:
        """The equations of the local part that are made of parameters alone."""
        known = {*self.schedule.frontier, *self.constants}
        found = []
        for eqn in self.schedule.local.eqns:
            if all(v in known for v in eqn.invars if isinstance(v, Var)):
                found.append(eqn)
                known.update(eqn.outvars)
        return found

    def still_values(self, frontier: Mapping[Var, Any]) -> dict[Var, Any]:
        """Local values that are the same for all steps and examples, once."""
        values = {**self.constants, **frontier}
        for eqn in self.still_equations:
            operands = [values[v] if isinstance(v, Var) else v.val for v in eqn.invars]
            values.update(zip(eqn.outvars, bind_equation(eqn, operands), strict=True))
        return values

    def operand_gradients(
        self, frontier: Mapping[Var, Any], local: Mapping[Var, Any], cotangents: Mapping[int, Array]
    ) -> dict[Var, Array]:
        """The gradients of operators' operands, from those of their results, ``operator -> (time, batch, ...)``."""
        found: dict[Var, Array] = {}
        for i, cotangent in cotangents.items():
            operator = self.schedule.operators[i]
            x = None if operator.x is None else local[operator.x]
            for key, value in operator_gradient(
                operator, self.operand_values(operator, frontier), x, cotangent
            ).items():
                add_to(found, operator.operands[key], value)
        return found

    @cached_property
    def seen_past_states(self) -> list[int]:
        """The operators whose result reaches the outputs of the same step without passing through a hidden state."""
        return [i for i, op in enumerate(self.schedule.operators) if self._are_seen_past_states({op.y})]

    @cached_property
    def outputs_see_past(self) -> bool:
        """Whether the hidden states before a step reach its outputs without passing through those after it."""
        return self._are_seen_past_states({v for group in self.graph.hidden_groups for v in group.hidden_invars})

    def _are_seen_past_states(self, variables: set[Var]) -> bool:
        """Whether some variables reach the outputs of the same step past the hidden states after it."""
        minfo, reached = self.graph.module_info, self.reached_in_step(variables) - self.hidden_after.keys()
        return any(isinstance(v, Var) and v in reached for v in minfo.jaxpr.outvars[: minfo.num_var_out])

    @cached_property
    def hidden_after(self) -> dict[Var, int]:
        """The hidden states after a step, and their groups."""
        return {v: group.index for group in self.graph.hidden_groups for v in group.hidden_outvars}

    def reached_in_step(self, variables: set[Var], ends: Collection[Var] = ()) -> set[Var]:
        """What some variables reach within a step, with them, as far as hidden states after it and before ``ends``."""
        found = set(variables)
        for eqn in self.graph.module_info.jaxpr.eqns:
            if any(isinstance(v, Var) and v in found and v not in self.hidden_after for v in eqn.invars):
                found.update(v for v in eqn.outvars if v not in ends)
        return found

    @cached_property
    def whole_step(self) -> Part:
        """All of a step but what is made of parameters alone, as one part."""
        minfo, parts = self.graph.module_info, (self.schedule.next_states, self.schedule.outputs)
        eqns = tuple(eqn for part in parts for eqn in part.eqns)
        made = {v for eqn in eqns for v in eqn.outvars}
        results = [v for v in minfo.jaxpr.outvars[: minfo.num_var_out] if isinstance(v, Var) and v in made]
        reads = dict.fromkeys(v for part in parts for v in part.reads if v not in made)
        return Part(eqns, tuple(reads), tuple(dict.fromkeys(results)))

    @cached_property
    def seen_by_outputs(self) -> list[Var]:
        """The hidden states after a step, and whatever else that is made of them the step's outputs see."""
        minfo, schedule = self.graph.module_info, self.schedule
        results = [v for v in minfo.jaxpr.outvars[: minfo.num_var_out] if isinstance(v, Var)]
        hidden = [v for group in self.graph.hidden_groups for v in group.hidden_outvars]
        made = [v for v in (*schedule.outputs.reads, *results) if self._groups_behind.get(v)]
        return [v for v in dict.fromkeys((*hidden, *made)) if is_differentiable(v.aval)]

    @cached_property
    def outputs_see_states_only(self) -> bool:
        """Whether the outputs of a step see its operators through the states after it alone.

        Each step's own signal can then be read off the outputs part. Otherwise (a layer above acts in the same step)
        the whole step is needed.
        """
        behind = self._groups_behind
        hidden = {v: group.index for group in self.graph.hidden_groups for v in group.hidden_outvars}
        return all(behind[v] == {g} for v, g in hidden.items()) and not any(
            behind.get(v) for v in self.seen_by_outputs if v not in hidden
        )

    @cached_property
    def _groups_behind(self) -> dict[Var, set[int]]:
        """For what is made before the outputs, the hidden groups whose states after the step it is made of."""
        schedule = self.schedule
        found = {v: {group.index} for group in self.graph.hidden_groups for v in group.hidden_outvars}
        for eqn in schedule.next_states.eqns:
            groups = set().union(*(found.get(v, set()) for v in eqn.invars if isinstance(v, Var)))
            for v in eqn.outvars:
                found[v] = found.get(v, set()) | groups
        return found

    def operand_values(self, operator: Operator, frontier: Mapping[Var, Any]) -> list[Any]:
        """The operator's operands where they are known outside of time; None for the others (``x``)."""
        known = {**self.constants, **frontier}
        return [known.get(v) if isinstance(v, Var) else v.val for v in operator.eqn.invars]

    def parameter_gradients(self, parameters: Sequence[Any], gradients: Mapping[Var, Array]) -> list[Array]:
        """Gradients of frontier variables sent back through everything between them and the parameters."""
        moving = [i for i, v in enumerate(self.graph.module_info.weight_invars) if is_differentiable(v.aval)]

        def of(values: Any) -> Any:
            leaves = list(parameters)
            for i, value in zip(moving, values, strict=True):
                leaves[i] = value
            frontier = self.frontier(leaves)
            return [frontier[v] for v in targets]

        targets = [v for v in self.schedule.frontier if v in gradients]
        values, pull_back = jax.vjp(of, [parameters[i] for i in moving])
        (found,) = pull_back([gradients[v].astype(value.dtype) for v, value in zip(targets, values, strict=True)])
        result = [jnp.zeros_like(p) for p in parameters]
        for i, value in zip(moving, found, strict=True):
            result[i] = value
        return result

    def _run(
        self,
        frontier: Mapping[Var, Any],
        direct: Mapping[Var, Any],
        states: list[Any],
        inputs: Sequence[Any],
        deltas: Mapping[Var, Array],
        reset: Any,
        initial: Sequence[Any] | None,
        present: Mapping[Var, Array],
        feedback: Mapping[int, Any],
    ) -> WindowResult:
        schedule, minfo = self.schedule, self.graph.module_info
        sizes = _time_and_batch(inputs, states)
        still = {y: delta for y, delta in deltas.items() if delta.ndim == y.aval.ndim}
        deltas = {y: delta for y, delta in deltas.items() if y not in still}
        run = PartRunner(schedule.operators, {**self.constants, **frontier}, direct, {}, still=still)
        windowed: dict[Var, Any] = dict(zip(minfo.input_invars, inputs, strict=True))
        states = list(states)
        last = {v for eqn in schedule.outputs.eqns for v in eqn.outvars}
        goes_back = any(y not in last for y in (*still, *deltas))
        for stage in schedule.stages:
            windowed.update(run.over_window(stage.ahead, windowed, deltas, sizes))
            loop = self._loop(stage, run, frontier, windowed, deltas, sizes, goes_back, reset, initial)
            after, made = loop.run([states[k] for k in stage.states], windowed, sizes)
            windowed.update(made)
            for k, state in zip(stage.states, after, strict=True):
                states[k] = state
        seen = {**windowed, **{v: windowed[v] + term for v, term in present.items() if v in windowed}}
        run = replace(run, feedback=feedback)
        seen.update(run.over_window(schedule.outputs, seen, deltas, sizes))
        outputs = [run.stacked(v, seen, sizes) for v in minfo.jaxpr.outvars[: minfo.num_var_out]]
        values = tuple(windowed[v] if v in windowed else seen[v] for v in schedule.recorded)
        return WindowResult(outputs, states, WindowRecord(tuple(inputs), values, reset))

    def _loop(
        self,
        stage: Stage,
        run: PartRunner,
        frontier: Mapping[Var, Any],
        windowed: Mapping[Var, Any],
        deltas: Mapping[Var, Array],
        sizes: tuple[int, int],
        goes_back: bool,
        reset: Any,
        initial: Sequence[Any] | None,
    ) -> TimeLoop:
        """The loop of a stage; what its products make of known values is made here, for all steps at once."""
        deltas = dict(deltas)
        products = loop_products(self.schedule.operators, stage.loop, windowed.keys(), sizes, goes_back)
        operands = {i: self.operand_values(product.operator, frontier) for i, product in products.items()}
        run = replace(run, products=results_in_loop(products, operands, sizes))
        for i, share in known_shares(products, operands, windowed).items():
            y = products[i].operator.y
            deltas[y] = deltas[y] + share if y in deltas else share
        before, after = ([of[k] for k in stage.states] for of in (self.state_invars, self.state_outvars))
        start = None if initial is None else [initial[k] for k in stage.states]
        return TimeLoop(stage.loop, run, before, after, self._read_after_loops, deltas, reset, start)

    @cached_property
    def _read_after_loops(self) -> set[Var]:
        """What may be needed of every step of a loop once it has run."""
        schedule, minfo = self.schedule, self.graph.module_info
        results = [v for v in minfo.jaxpr.outvars[: minfo.num_var_out] if isinstance(v, Var)]
        later = [v for stage in schedule.stages[1:] for part in (stage.ahead, stage.loop) for v in part.reads]
        return {*schedule.outputs.reads, *schedule.recorded, *results, *later}


def _time_and_batch(inputs: Sequence[Any], states: Sequence[Any]) -> tuple[int, int]:
    return inputs[0].shape[0], states[0].shape[0]
