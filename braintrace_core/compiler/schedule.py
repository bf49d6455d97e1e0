"""Schedule: one step cut into parts by what they depend on, so that a window runs each part as it is best run.

- *parameters*: made of parameters alone; once a window.
- *stages*: what the next states need. Of each stage one part for all steps of a window at once (made of the step's
  inputs, and of states of stages before it), and one step by step.
- *outputs*: what is left of the step's results; for all steps at once.
- *local*: operators' inputs and what the factors ask for, from what a window recorded; for all steps at once.

Operators are the only places where a trainable operand acts, so the gradient of a window is taken with respect to
operators' results, and each operand's gradient is formed afterwards as one product over time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .._compat import JaxprEqn, Literal, Var
from ..ops import is_boundary, is_etp
from .analysis import StepAnalysis, operator_result
from .module_info import is_differentiable
from .stages import Place, place_in_stages

__all__ = ["Operator", "Part", "Schedule", "Stage", "schedule_step"]


@dataclass(frozen=True, eq=False)
class Part:
    """Some equations of a step.

    Attributes:
      eqns: the equations, in order.
      reads: the variables that they need from elsewhere.
      writes: the variables that others need from them.
    """

    eqns: tuple[JaxprEqn, ...]
    reads: tuple[Var, ...]
    writes: tuple[Var, ...]

    def run(self, values: Mapping[Var, Any], handle: Callable[[JaxprEqn, list[Any]], list[Any]]) -> list[Any]:
        """Values for ``writes`` from values for ``reads``; ``handle`` runs one equation on its inputs."""
        env = dict(values)
        for eqn in self.eqns:
            operands = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
            env.update(zip(eqn.outvars, handle(eqn, operands), strict=True))
        return [env[v] for v in self.writes]


@dataclass(frozen=True, eq=False)
class Operator:
    """An operator's equation with its trainable operands.

    Attributes:
      eqn: the equation.
      x: its input; None if it has none.
      y: its result.
      operands: key name -> variable of each trainable operand that is made of parameters alone.
    """

    eqn: JaxprEqn
    x: Any
    y: Var
    operands: dict[str, Var]

    @property
    def is_still(self) -> bool:
        """Whether its result is made of parameters alone, the same at all steps of a window."""
        return self.x is None and {v for v in self.eqn.invars if isinstance(v, Var)} <= set(self.operands.values())


@dataclass(frozen=True, eq=False)
class Stage:
    """A loop over time, and what it can have before it begins.

    Attributes:
      ahead: for all steps at once.
      loop: step by step.
      states: the states that it carries, as places among all that are not parameters.
    """

    ahead: Part
    loop: Part
    states: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Schedule:
    """The parts of a step.

    Attributes:
      parameters, stages, outputs, local: see the head of this file.
      frontier: the variables made of parameters (and constants) alone that other parts read.
      direct: those of them that something other than a trainable operand reads.
      operators: all operators with trainable operands.
      recorded: what a window keeps of each step, the states before it among it; the rest can be recomputed.
    """

    parameters: Part
    stages: tuple[Stage, ...]
    outputs: Part
    local: Part
    frontier: tuple[Var, ...]
    direct: tuple[Var, ...]
    operators: tuple[Operator, ...]
    recorded: tuple[Var, ...]

    @cached_property
    def next_states(self) -> Part:
        """All stages as one part: the next states from the present ones and the inputs."""
        parts = [part for stage in self.stages for part in (stage.ahead, stage.loop)]
        made = {v for part in parts for v in part.writes}
        return Part(
            tuple(eqn for part in parts for eqn in part.eqns),
            tuple(dict.fromkeys(v for part in parts for v in part.reads if v not in made)),
            tuple(dict.fromkeys(v for part in parts for v in part.writes)),
        )


def schedule_step(analysis: StepAnalysis, factor_variables: Iterable[Var]) -> Schedule:
    """Cut the step of ``analysis`` into parts; ``factor_variables`` are those whose values the factors ask for."""
    minfo, indexed, depends = analysis.minfo, analysis.indexed, analysis.depends
    eqns = minfo.jaxpr.eqns
    home, stage_of_state = _homes(analysis)
    operators = tuple(
        operator
        for i in sorted(home)
        if is_etp(eqns[i].primitive) and (operator := _operator(eqns[i], analysis)).operands
    )
    state_outvars = [v for v in minfo.jaxpr.outvars[minfo.num_var_out :] if isinstance(v, Var)]
    known = {*analysis.boundary_results, *state_outvars}

    wanted = [op.x for op in operators if op.x is not None] + list(factor_variables)
    wanted = [v for v in dict.fromkeys(wanted) if not depends.is_parameter(v)]
    slices = indexed.ancestors(wanted, lambda v: v in known or depends.is_parameter(v))
    local_eqns = [eqns[i] for i in slices]
    made_locally = {v for eqn in local_eqns for v in eqn.outvars} - known
    local_reads = {v for eqn in local_eqns for v in eqn.invars if isinstance(v, Var)} | set(wanted)
    local = Part(tuple(local_eqns), tuple(indexed.in_order(local_reads - made_locally)), tuple(wanted))

    given = {*minfo.input_invars, *minfo.jaxpr.constvars}
    states = set(minfo.jaxpr.invars) - given - set(minfo.weight_invars)
    recorded = indexed.in_order({v for v in local.reads if v not in given and not depends.is_parameter(v)} | states)
    members: dict[Place, list[JaxprEqn]] = {}
    for i in sorted(home):
        members.setdefault(home[i], []).append(eqns[i])
    results = {v for v in minfo.jaxpr.outvars if isinstance(v, Var)}
    read_at = {place: _reads(own) for place, own in members.items()}

    def part(place: Place) -> Part:
        own = members.get(place, [])
        made = {v for eqn in own for v in eqn.outvars}
        elsewhere = results.union(local.reads, *(reads for other, reads in read_at.items() if other != place))
        reads = read_at.get(place, set()) - made
        return Part(tuple(own), tuple(indexed.in_order(reads)), tuple(indexed.in_order(made & elsewhere)))

    parameters = part(_PARAMETERS)
    read_later = results.union(local.reads, *(reads for place, reads in read_at.items() if place != _PARAMETERS))
    frontier = indexed.in_order(v for v in read_later if depends.is_parameter(v) or v in parameters.writes)
    return Schedule(
        parameters=parameters,
        stages=tuple(
            Stage(
                part(Place(stage, False)),
                part(Place(stage, True)),
                tuple(k for k, of_state in enumerate(stage_of_state) if of_state == stage),
            )
            for stage in range(max(stage_of_state) + 1)
        ),
        outputs=part(_OUTPUTS),
        local=local,
        frontier=tuple(frontier),
        direct=tuple(v for v in frontier if v in _read_directly(analysis, home, operators)),
        operators=operators,
        recorded=tuple(recorded),
    )


_PARAMETERS, _INPUTS, _OUTPUTS = Place(-1, False), Place(0, False), Place(sys.maxsize, False)


def _homes(analysis: StepAnalysis) -> tuple[dict[int, Place], list[int]]:
    """The place of each equation that the step's results need, and the stage of each state but parameters."""
    minfo, indexed = analysis.minfo, analysis.indexed
    jaxpr = minfo.jaxpr
    weights = set(minfo.weight_invars)
    pairs = zip(jaxpr.invars[len(minfo.input_invars) :], jaxpr.outvars[minfo.num_var_out :], strict=True)
    states = [(before, after) for before, after in pairs if before not in weights]
    with_state = indexed.reached([before for before, _ in states], range(len(jaxpr.eqns)))
    feeds_state = set(indexed.ancestors(jaxpr.outvars[minfo.num_var_out :]))
    home: dict[int, Place] = {}
    recurrence: dict[int, JaxprEqn] = {}
    for i in indexed.ancestors(jaxpr.outvars):
        eqn = jaxpr.eqns[i]
        if not is_etp(eqn.primitive) and not any(map(analysis.depends.is_data, eqn.invars)):
            home[i] = _PARAMETERS
        elif not any(isinstance(v, Var) and v in with_state for v in eqn.invars):
            home[i] = _INPUTS
        elif i not in feeds_state:
            home[i] = _OUTPUTS
        else:
            recurrence[i] = eqn
    places, stages = place_in_stages(recurrence, states, lambda eqn: is_boundary(eqn.primitive))
    home = dict(sorted((home | places).items()))
    # An operator on parameters alone is run where its result is used, so that it need not be repeated over time.
    for i in reversed(home):
        eqn = jaxpr.eqns[i]
        if is_etp(eqn.primitive) and not any(map(analysis.depends.is_data, eqn.invars)):
            users = {home[j] for v in eqn.outvars for j in indexed.consumers.get(v, ()) if j in home}
            home[i] = min(users, default=_OUTPUTS)
    return home, stages


def _operator(eqn: JaxprEqn, analysis: StepAnalysis) -> Operator:
    primitive = eqn.primitive
    x = None if primitive.x_index is None else eqn.invars[primitive.x_index]
    operands = {
        key: eqn.invars[i]
        for key, i in primitive.trainable_operands(eqn.params).items()
        if analysis.depends.is_parameter(eqn.invars[i])
    }
    return Operator(eqn, x if isinstance(x, Var) else None, operator_result(eqn), operands)


def _reads(eqns: Sequence[JaxprEqn]) -> set[Var]:
    return {v for eqn in eqns for v in eqn.invars if isinstance(v, Var)}


def _read_directly(analysis: StepAnalysis, home: Mapping[int, Place], operators: Sequence[Operator]) -> set[Var]:
    """Differentiable variables made of parameters that act other than as an operator's trainable operand."""
    minfo = analysis.minfo
    trains = {id(op.eqn): set(op.operands.values()) for op in operators}
    found = {v for v in minfo.jaxpr.outvars[: minfo.num_var_out] if isinstance(v, Var)}
    for i, place in home.items():
        if place != _PARAMETERS:
            eqn = minfo.jaxpr.eqns[i]
            found |= _reads([eqn]) - trains.get(id(eqn), set())
    return {v for v in found if analysis.depends.is_parameter(v) and is_differentiable(v.aval)}
