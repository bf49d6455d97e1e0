"""Repeats: data that is moved or cast in the same way twice is moved once.

``concatenate([x, h]) @ w`` and ``concatenate([x, h]) @ v``, as gates are often written, then are two operators of one
input, and whatever is kept of that input is kept once.
"""

from __future__ import annotations

from typing import Any

from .._compat import ClosedJaxpr, JaxprEqn, Var, close_jaxpr, new_jaxpr, open_jaxpr
from .primitive_kinds import MOVES

__all__ = ["merge_repeats"]

_MERGED = MOVES | {"convert_element_type"}


def merge_repeats(closed: ClosedJaxpr) -> ClosedJaxpr:
    """``closed`` without the second of two equations that move or cast the same data in the same way."""
    jaxpr, consts = open_jaxpr(closed)
    same: dict[Var, Var] = {}
    seen: dict[Any, JaxprEqn] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        invars = [same.get(v, v) if isinstance(v, Var) else v for v in eqn.invars]
        if eqn.primitive.name in _MERGED and all(isinstance(v, Var) for v in invars):
            first = seen.setdefault((eqn.primitive, *invars, *sorted(eqn.params.items())), eqn)
            if first is not eqn:
                same.update(zip(eqn.outvars, first.outvars, strict=True))
                continue
        eqns.append(eqn.replace(invars=invars))
    if not same:
        return closed
    outvars = [same.get(v, v) if isinstance(v, Var) else v for v in jaxpr.outvars]
    return close_jaxpr(new_jaxpr(jaxpr.constvars, jaxpr.invars, outvars, eqns), consts)
