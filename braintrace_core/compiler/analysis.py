"""What the passes after lifting share: the flat jaxpr, its operators, the patterns of states and operators."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from .._compat import Jaxpr, JaxprEqn, Var
from ..ops import is_boundary, is_etp
from .dependence import ParameterDependence
from .diagnostics import Path
from .jaxpr_tools import IndexedJaxpr
from .module_info import ModuleInfo, is_differentiable
from .patterns import Pattern
from .positions import Positions

__all__ = ["StepAnalysis"]


class StepAnalysis:
    """Facts about one step, each computed once, when it is first asked for."""

    def __init__(self, minfo: ModuleInfo):
        self.minfo = minfo

    @cached_property
    def indexed(self) -> IndexedJaxpr:
        """The jaxpr, indexed by definition."""
        return IndexedJaxpr(self.minfo.jaxpr)

    @cached_property
    def operators(self) -> list[JaxprEqn]:
        """The equations of ETP primitives, in order."""
        return [eqn for eqn in self.minfo.jaxpr.eqns if is_etp(eqn.primitive)]

    @cached_property
    def depends(self) -> ParameterDependence:
        """Which variables are made of parameters alone."""
        return ParameterDependence(self.minfo.jaxpr, self.minfo.weight_invars)

    @cached_property
    def hidden(self) -> dict[Path, tuple[Var, Var]]:
        """Path -> variables before and after the step, of the hidden states that have derivatives."""
        return {
            path: (var, self.minfo.hidden_path_to_outvar[path])
            for path, var in self.minfo.hidden_path_to_invar.items()
            if is_differentiable(var.aval)
        }

    @cached_property
    def hidden_path_of(self) -> dict[Var, Path]:
        """The hidden state that a variable stands for, before or after the step."""
        return {v: path for path, variables in self.hidden.items() for v in variables}

    @cached_property
    def patterns(self) -> dict[Var, dict[Any, Pattern]]:
        """Variable -> source variable -> pattern; sources are hidden states, old and new, and operators' results."""
        jaxpr = self.minfo.jaxpr
        results = [y for y in map(operator_result, self.operators) if is_differentiable(y.aval)]
        sources = [*(v for pair in self.hidden.values() for v in pair), *results]
        patterns = {v: {v: Pattern.identity(v.aval.shape)} for v in sources}
        needed = self.indexed.ancestors(out for _, out in self.hidden.values())
        positions = Positions(dict(zip(jaxpr.constvars, self.minfo.consts, strict=True)))
        positions.propagate((jaxpr.eqns[i] for i in needed), patterns)
        return patterns

    @cached_property
    def boundary_results(self) -> frozenset[Var]:
        """The results of operators at which the recurrence is cut."""
        return frozenset(v for eqn in self.operators if is_boundary(eqn.primitive) for v in eqn.outvars)

    def part_from(self, sources: list[Var], outvars: list[Var]) -> Jaxpr:
        """What leads from ``sources`` to ``outvars`` without crossing an operator; all other values are constvars."""
        cut = self.boundary_results.__contains__
        given = set(sources)
        reached = self.indexed.reached(sources, self.indexed.ancestors(outvars, lambda v: v in given or cut(v)))
        return self.indexed.part(sources, outvars, lambda v: cut(v) or v not in reached)

    def pattern(self, value: Var, source: Var) -> Pattern | None:
        """How ``value`` depends on ``source`` without crossing an operator; None if not at all."""
        return self.patterns.get(value, {}).get(source)


def operator_result(eqn: JaxprEqn) -> Var:
    """The result ``y`` of an operator's equation."""
    return eqn.outvars[eqn.primitive.y_index]
