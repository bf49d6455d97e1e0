"""Which variables of a flat jaxpr come from parameters alone, and from which ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .._compat import Jaxpr, Literal, Var
from ..ops import is_etp

__all__ = ["ParameterDependence"]


class ParameterDependence:
    """Splits the variables of a jaxpr into constants, values made of parameters alone, and data.

    The result of an operator counts as data even if all its operands come from parameters: the operator is where a
    parameter starts to act.
    """

    def __init__(self, jaxpr: Jaxpr, parameters: Iterable[Var]):
        self._behind: dict[Var, frozenset[Var]] = {v: frozenset((v,)) for v in parameters}
        self._data: set[Var] = {v for v in jaxpr.invars if v not in self._behind}
        for eqn in jaxpr.eqns:
            operands = [v for v in eqn.invars if isinstance(v, Var)]
            if is_etp(eqn.primitive) or not self._data.isdisjoint(operands):
                self._data.update(eqn.outvars)
                continue
            behind = frozenset().union(*(self._behind.get(v, frozenset()) for v in operands))
            if behind:
                self._behind.update((v, behind) for v in eqn.outvars)

    def is_data(self, atom: Any) -> bool:
        """Whether an input, a state or an operator's result is behind ``atom``."""
        return not isinstance(atom, Literal) and atom in self._data

    def is_parameter(self, atom: Any) -> bool:
        """Whether ``atom`` is made of parameters (and constants) alone, of at least one."""
        return not isinstance(atom, Literal) and atom in self._behind

    def parameters(self, atom: Any) -> frozenset[Var]:
        """The parameters that ``atom`` is made of; empty for constants and data."""
        return frozenset() if isinstance(atom, Literal) else self._behind.get(atom, frozenset())
