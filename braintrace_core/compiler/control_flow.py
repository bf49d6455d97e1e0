"""Control flow: what to do with ``cond``, ``scan`` and ``while`` that hold trainable operations.

The analysis reads straight-line code. A ``scan`` of known length becomes its steps one after the other, a ``cond``
becomes both branches and a selection; both compute the same values and derivatives. Control flow without
trainable operations is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._compat import JaxprEqn, scan_sizes

__all__ = ["CONTROL_FLOW", "ControlFlowPolicy", "select_branch", "unroll_scan"]

CONTROL_FLOW = frozenset({"cond", "scan", "while"})

Run = Callable[[Any, list[Any]], list[Any]]
Apply = Callable[..., Any]


@dataclass(frozen=True)
class ControlFlowPolicy:
    """What the compiler may do to reach trainable operations inside control flow.

    Attributes:
      scan_unroll_limit: the longest ``scan`` to unroll. A longer one stays closed: the parameters inside learn within
        the window only, and a record says so.
      cond_to_select: whether a ``cond`` becomes both branches and a selection (as under ``vmap``). Both branches
        then run, so each must be free of errors such as a division by zero that the other one guards against.
    """

    scan_unroll_limit: int = 64
    cond_to_select: bool = True

    def opens(self, eqn: JaxprEqn) -> bool:
        """Whether this equation may be replaced by straight-line code."""
        name = eqn.primitive.name
        if name == "scan":
            return bool(eqn.params["length"] <= self.scan_unroll_limit)
        return name == "cond" and self.cond_to_select and "branches_platforms" not in eqn.params

    def refusal(self, eqn: JaxprEqn) -> str:
        """Why this equation stays closed, and the remedy."""
        name = eqn.primitive.name
        if name == "scan":
            return (
                f"its {eqn.params['length']} steps are more than `scan_unroll_limit={self.scan_unroll_limit}`; raise "
                "the limit in `ControlFlowPolicy` to unroll it"
            )
        if "branches_platforms" in eqn.params:
            return "each of its branches is for another kind of device"
        if name == "cond":
            return "`cond_to_select` is off in `ControlFlowPolicy`"
        if name == "while":
            return "its number of iterations depends on data, and JAX differentiates it forwards only; use a `scan`"
        return "the compiler does not look inside; move the operator out of it"


def unroll_scan(eqn: JaxprEqn, operands: list[Any], run: Run, apply: Apply) -> list[Any]:
    """The results of a ``scan`` equation, one body after the other.

    Args:
      eqn: the equation.
      operands: what stands for its operands; only ``run`` and ``apply`` look inside.
      run: ``(jaxpr, operands) -> results``.
      apply: ``(function of arrays, *operands) -> result``.
    """
    (num_consts, num_carry), length = scan_sizes(eqn), eqn.params["length"]
    consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]
    stacked = operands[num_consts + num_carry :]
    ys: list[list[Any]] = []
    steps = range(length)
    for t in reversed(steps) if eqn.params["reverse"] else steps:
        rows = [apply(partial(lax.index_in_dim, index=t, keepdims=False), x) for x in stacked]
        results = run(eqn.params["jaxpr"], [*consts, *carry, *rows])
        carry = results[:num_carry]
        ys.append(results[num_carry:])
    if eqn.params["reverse"]:
        ys.reverse()
    if not ys:
        shapes = [v.aval for v in eqn.outvars[num_carry:]]
        return [*carry, *(apply(partial(jnp.zeros, a.shape, a.dtype)) for a in shapes)]
    return [*carry, *(apply(lambda *column: jnp.stack(column), *column) for column in zip(*ys, strict=True))]


def select_branch(eqn: JaxprEqn, operands: list[Any], run: Run, apply: Apply) -> list[Any]:
    """The results of a ``cond`` equation: all branches run, one is chosen. Arguments as for :func:`unroll_scan`."""
    index, *others = operands
    branches = eqn.params["branches"]
    results = [run(branch, others) for branch in branches]
    if len(branches) == 1:
        return results[0]

    def choose(index: Any, *cases: Any) -> Any:
        if len(cases) == 2:
            return lax.select_n(index.astype(bool), *cases)
        return lax.select_n(lax.clamp(jnp.zeros_like(index), index, jnp.full_like(index, len(cases) - 1)), *cases)

    return [apply(choose, index, *cases) for cases in zip(*results, strict=True)]
