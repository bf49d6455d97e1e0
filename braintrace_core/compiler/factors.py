"""Factors: from one step of a compiled graph, the small arrays that every learning rule is made of.

For each relation ``y = op(x, theta)`` there is the input ``x`` and ``df = d h / d y``, and for each group there is
``D = d h / d h_before`` with every operator cut; both unit by unit and between components. They are the diagonal of
the true Jacobian, whatever stands between; entries that are zero by structure are not there at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .._compat import Jaxpr, JaxprEqn, Var, bind_equation
from ..errors import NotSupportedError
from .analysis import StepAnalysis
from .colouring import locate_operator, plan_diagonals
from .diagnostics import DiagnosticKind, Recorder, spell
from .diagonals import DiagonalPlan, OperatorPositions
from .hidden_group import HiddenGroup
from .jaxpr_tools import evaluate, walk
from .relations import HiddenParamOpRelation

__all__ = ["FactorPlan", "Factors", "GroupFactorPlan", "plan_factors"]


class Factors(NamedTuple):
    """The factors of one step.

    Attributes:
      x: for each relation, the operator's input; None where it has none.
      df: for each relation and each of its groups, component -> array of the shape of ``y``.
      D: for each group, pair of components ``(a, b)`` -> ``d a / d b``, of the group's shape.
    """

    x: tuple[Array | None, ...]
    df: tuple[tuple[dict[int, Array], ...], ...]
    D: tuple[dict[tuple[int, int], Array], ...]


@dataclass(frozen=True, eq=False)
class GroupFactorPlan:
    """How the factors of one group are computed.

    Attributes:
      group: the group.
      relations: indices of the relations that feed it.
      results: the results of these relations.
      tail: ``(old states, results) -> new states``, cut at every other operator. Results on the way from an old
        state to a new one (those of gradient-enabled operators) are not among its inputs.
      diagonals: which entries there are, and how they are read.
    """

    group: HiddenGroup
    relations: tuple[int, ...]
    results: tuple[Var, ...]
    tail: Jaxpr
    diagonals: DiagonalPlan

    @property
    def cut_results(self) -> tuple[Var, ...]:
        """The results that are inputs of the tail."""
        return tuple(self.tail.invars[len(self.group.hidden_invars) :])

    def evaluate(self, value: Callable[[Var], Any]) -> tuple[dict[tuple[int, int], Array], list[dict[int, Array]]]:
        """``D`` and, for each relation, ``df``, where the step's variables have the values that ``value`` gives."""
        cut = self.cut_results
        consts = [value(v) for v in self.tail.constvars]
        # A result that stays inside the tail is differentiated by way of a term, zero, that is added to it.
        operators = [value(y) if y in cut else jnp.zeros(y.aval.shape, y.aval.dtype) for y in self.results]

        def tail(states: list[Any], results: list[Any]) -> Sequence[Any]:
            given = dict(zip(self.results, results, strict=True))

            def run(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
                outputs = zip(eqn.outvars, bind_equation(eqn, inputs), strict=True)
                return [output + given[v] if v in given else output for v, output in outputs]

            return evaluate(self.tail, consts, [*states, *(given[v] for v in cut)], run)

        return self.diagonals.evaluate(tail, [value(v) for v in self.group.hidden_invars], operators)

    def positions(self, relation: int) -> OperatorPositions:
        """Where the elements of a relation's result belong in the group."""
        return self.diagonals.positions[self.relations.index(relation)]


@dataclass(frozen=True, eq=False)
class FactorPlan:
    """How the factors of a whole graph are computed.

    Attributes:
      relations: the graph's relations.
      groups: a plan for each group.
    """

    relations: tuple[HiddenParamOpRelation, ...]
    groups: tuple[GroupFactorPlan, ...]

    @property
    def variables(self) -> list[Var]:
        """The variables of the step whose values :meth:`evaluate` asks for."""
        needed = [r.x_var for r in self.relations if r.x_var is not None]
        for plan in self.groups:
            needed += [*plan.tail.invars, *plan.tail.constvars]
        return list(dict.fromkeys(needed))

    @property
    def num_passes(self) -> int:
        """How many passes of reverse differentiation one step takes, over all groups."""
        return sum(plan.diagonals.num_passes for plan in self.groups)

    def evaluate(self, value: Callable[[Var], Any]) -> Factors:
        """The factors where the step's variables have the values that ``value`` gives."""
        df: dict[tuple[int, int], dict[int, Array]] = {}
        between = []
        for plan in self.groups:
            entries, from_operators = plan.evaluate(value)
            between.append(entries)
            df.update(((r, plan.group.index), found) for r, found in zip(plan.relations, from_operators, strict=True))
        return Factors(
            x=tuple(None if r.x_var is None else value(r.x_var) for r in self.relations),
            df=tuple(tuple(df[i, g.index] for g in r.hidden_groups) for i, r in enumerate(self.relations)),
            D=tuple(between),
        )

    def dense_df(self, factors: Factors, relation: int, group: int = 0) -> Array:
        """``df`` of a relation and its ``group``-th group as one array, ``(*y shape, components)``."""
        entries = factors.df[relation][group]
        count = len(self.relations[relation].hidden_groups[group].components)
        y = self.relations[relation].y_var.aval
        zero = jnp.zeros(y.shape, y.dtype)
        return jnp.stack([entries.get(a, zero) for a in range(count)], axis=-1)

    def dense_D(self, factors: Factors, group: int) -> Array:
        """``D`` of a group as one array, ``(*group shape, components, components)``."""
        components = self.groups[group].group.components
        zero = jnp.zeros(components.varshape, components.dtype)
        entries: Mapping[tuple[int, int], Array] = factors.D[group]
        rows = [
            jnp.stack([entries.get((a, b), zero).astype(zero.dtype) for b in range(len(components))], axis=-1)
            for a in range(len(components))
        ]
        return jnp.stack(rows, axis=-2)


def plan_factors(
    analysis: StepAnalysis,
    groups: Sequence[HiddenGroup],
    relations: Sequence[HiddenParamOpRelation],
    recorder: Recorder | None = None,
) -> FactorPlan:
    """Plan the factors of a graph; ``recorder`` is told of every group in which units are coupled."""
    recorder = recorder or Recorder()
    feeding: dict[int, list[int]] = {group.index: [] for group in groups}
    for i, relation in enumerate(relations):
        for group in relation.hidden_groups:
            feeding[group.index].append(i)
    plans = [_plan_group(analysis, group, feeding[group.index], relations, recorder) for group in groups]
    return FactorPlan(tuple(relations), tuple(plans))


def _plan_group(
    analysis: StepAnalysis,
    group: HiddenGroup,
    feeding: Sequence[int],
    relations: Sequence[HiddenParamOpRelation],
    recorder: Recorder,
) -> GroupFactorPlan:
    operators = []
    for i in feeding:
        y = relations[i].y_var
        located = locate_operator(group.components, group.hidden_outvars, y, analysis.patterns)
        assert located is not None
        operators.append((y, located))
    diagonals = plan_diagonals(
        group.components, group.hidden_invars, group.hidden_outvars, operators, analysis.patterns
    )
    results = [y for y, _ in operators]
    sources = [*group.hidden_invars, *results]  # what lies behind a cut would not be seen
    cut = [y for y in results if not any(v is not y and v in analysis.patterns[y] for v in sources)]
    stop = analysis.boundary_results.__contains__
    tail = analysis.indexed.part(
        [*group.hidden_invars, *cut], group.hidden_outvars, lambda v: stop(v) or analysis.depends.is_parameter(v)
    )
    _record(group, diagonals, [relations[i] for i in feeding], recorder)
    plan = GroupFactorPlan(group, tuple(feeding), tuple(results), tail, diagonals)
    if any(eqn.primitive.name in _OFTEN_NOT_DIFFERENTIABLE for eqn in walk(tail)):
        _check_differentiable(plan)
    return plan


_OFTEN_NOT_DIFFERENTIABLE = frozenset({"while", "pure_callback", "io_callback"})


def _check_differentiable(plan: GroupFactorPlan) -> None:
    variables = [*plan.tail.invars, *plan.tail.constvars]
    try:
        jax.eval_shape(
            lambda *values: plan.evaluate(dict(zip(variables, values, strict=True)).__getitem__),
            *(v.aval for v in variables),
        )
    except ValueError as error:
        names = ", ".join(map(spell, plan.group.hidden_paths))
        raise NotSupportedError(
            f"JAX cannot differentiate the step with respect to {names}, on the way from old to new states or from an "
            f"operator to them: {str(error).splitlines()[0]} A loop needs a fixed number of iterations (`scan`, or "
            "`fori_loop` with static bounds); or put `stop_gradient` around it."
        ) from error


def _record(
    group: HiddenGroup, plan: DiagonalPlan, relations: Sequence[HiddenParamOpRelation], recorder: Recorder
) -> None:
    about: dict[str, Any] = {"hidden_paths": group.hidden_paths}
    names = ", ".join(map(spell, group.hidden_paths))
    if not plan.exact:
        recorder.warn(
            DiagnosticKind.FACTOR_APPROXIMATED,
            f"Units of {names} act on one another without an operator in between; traces keep each unit's effect on "
            "itself, the window keeps all. `rtrl` follows the rest too.",
            **about,
        )
    for relation, positions in zip(relations, plan.positions, strict=True):
        if not positions.exact:
            recorder.warn(
                DiagnosticKind.FACTOR_APPROXIMATED,
                f"Elements of the result of '{spell(relation.path)}' act on several units of {names}; the trace keeps "
                "the effect on one unit each, the window keeps all. `rtrl` follows the rest too.",
                primitive=relation.primitive,
                weight_path=relation.path,
                **about,
            )
    if plan.num_passes > len(plan.components):
        recorder.info(
            DiagnosticKind.FACTOR_COLOURED,
            f"Factors of {names} take {plan.num_passes} passes a step, since its units are coupled.",
            num_passes=plan.num_passes,
            **about,
        )
