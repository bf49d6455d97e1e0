"""Which parameters a loss can ever say something about."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from braintrace_core import ETraceGraph
from braintrace_core.compiler.primitive_kinds import FLAT

__all__ = ["parameters_without_gradient"]


def parameters_without_gradient(graph: ETraceGraph) -> list[int]:
    """Indices of the parameters that no output has a derivative to, now or through the states at any later step."""
    minfo = graph.module_info
    jaxpr, count = minfo.jaxpr, minfo.num_var_out
    before = jaxpr.invars[len(minfo.input_invars) :]
    states = dict(zip(before, jaxpr.outvars[count:], strict=True))
    needed: set[Any] = {v for v in jaxpr.outvars[:count] if _has_derivative(v)}
    while True:
        for eqn in reversed(jaxpr.eqns):
            if eqn.primitive.name not in FLAT and any(_is_variable(v) and v in needed for v in eqn.outvars):
                needed.update(v for v in eqn.invars if _is_variable(v) and _has_derivative(v))
        more = {after for v, after in states.items() if v in needed and _is_variable(after)} - needed
        if not more:
            return [i for i, v in enumerate(minfo.weight_invars) if _has_derivative(v) and v not in needed]
        needed |= more


def _is_variable(atom: Any) -> bool:
    return not hasattr(atom, "val")


def _has_derivative(atom: Any) -> bool:
    return _is_variable(atom) and jnp.issubdtype(atom.aval.dtype, jnp.inexact)
