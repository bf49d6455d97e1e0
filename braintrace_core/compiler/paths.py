"""Paths: from which variables each hidden state can be reached, directly or only through another operator."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from .._compat import JaxprEqn, Var
from ..ops import is_boundary
from .analysis import StepAnalysis
from .diagnostics import Path
from .hidden_group import HiddenGroup

__all__ = ["PathClassification", "Reach", "blocking_operators"]


class PathClassification(enum.StrEnum):
    """All paths from an operator's result to a hidden state, taken together."""

    ALL_DIRECT = "all_direct"
    ALL_THROUGH_OTHER_ETP = "all_through_other_etp"
    MIXED = "mixed"


class Reach:
    """For every variable, which hidden states lie ahead of it.

    Looking ahead from a variable stops at the states of a group: what lies behind them belongs to that group's own
    operators ("only the closest group counts").
    """

    def __init__(self, analysis: StepAnalysis, groups: Sequence[HiddenGroup]):
        minfo = analysis.minfo
        self._paths: list[Path] = list(minfo.hidden_path_to_outvar)
        bit = {path: 1 << i for i, path in enumerate(self._paths)}
        self._direct: dict[Var, int] = {minfo.hidden_path_to_outvar[p]: bit[p] for p in self._paths}
        self._crossing: dict[Var, int] = {}
        # Past a hidden state only the states of its own group count as being ahead.
        visible = {v: sum(bit[p] for p in g.hidden_paths) for g in groups for v in g.hidden_outvars}
        for eqn in reversed(minfo.jaxpr.eqns):
            direct = crossing = 0
            for v in eqn.outvars:
                if v in visible:
                    self._direct[v] &= visible[v]
                direct |= self._direct.get(v, 0)
                crossing |= self._crossing.get(v, 0)
            if is_boundary(eqn.primitive):
                direct, crossing = 0, direct | crossing
            if direct or crossing:
                for v in eqn.invars:
                    if isinstance(v, Var):
                        self._direct[v] = self._direct.get(v, 0) | direct
                        self._crossing[v] = self._crossing.get(v, 0) | crossing

    def directly(self, var: Var) -> list[Path]:
        """Hidden states that ``var`` reaches without crossing another operator."""
        return self._spell(self._direct.get(var, 0))

    def anyhow(self, var: Var) -> list[Path]:
        """Hidden states that ``var`` reaches at all."""
        return self._spell(self._direct.get(var, 0) | self._crossing.get(var, 0))

    def classify(self, var: Var, path: Path) -> PathClassification:
        """The class of all paths from ``var`` to the hidden state at ``path``."""
        bit = 1 << self._paths.index(path)
        direct, crossing = bool(self._direct.get(var, 0) & bit), bool(self._crossing.get(var, 0) & bit)
        if direct and crossing:
            return PathClassification.MIXED
        return PathClassification.ALL_DIRECT if direct else PathClassification.ALL_THROUGH_OTHER_ETP

    def _spell(self, bits: int) -> list[Path]:
        found = []
        while bits:
            lowest = bits & -bits
            found.append(self._paths[lowest.bit_length() - 1])
            bits ^= lowest
        return found


def blocking_operators(analysis: StepAnalysis, y: Var) -> list[JaxprEqn]:
    """The operators that the paths ahead of ``y`` run into first."""
    indexed = analysis.indexed
    seen: set[int] = set()
    blocked: list[int] = []
    todo = [y]
    while todo:
        for i in indexed.consumers.get(todo.pop(), ()):
            if i in seen:
                continue
            seen.add(i)
            eqn = indexed.jaxpr.eqns[i]
            if is_boundary(eqn.primitive):
                blocked.append(i)
            else:
                todo.extend(eqn.outvars)
    return [indexed.jaxpr.eqns[i] for i in sorted(blocked)]
