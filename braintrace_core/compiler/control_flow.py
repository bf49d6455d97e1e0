"""Control flow: what to do with ``cond``, ``scan`` and ``while`` that hold trainable operations.

The analysis reads straight-line code. A ``scan`` of known length becomes its steps one after the other, a ``cond`` becomes
both branches and a selection; both compute the same values and derivatives. Control flow without trainable
operations is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._compat import JaxprEqn

__all__ = ["CONTROL_FLOW", "ControlFlowPolicy", "select_branch", "unroll_scan"]

CONTROL_FLOW = frozenset({"cond", "scan", "while"})

Run = Callable[[Any, list[Any]], list[Any]]


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
        return (name == "scan" and eqn.params["length"] <= self.scan_unroll_limit) or (
            name == "cond" and self.cond_to_select
        )

    def refusal(self, eqn: JaxprEqn) -> str:
        """Why this equation stays closed, and the remedy."""
        name = eqn.primitive.name
        if name == "scan":
            return (
                f"its {eqn.params['length']} steps are more than `scan_unroll_limit={self.scan_unroll_limit}`; raise "
                "the limit in `ControlFlowPolicy` to unroll it"
            )
        if name == "cond":
            return "`cond_to_select` is off in `ControlFlowPolicy`"
        return "its number of iterations depends on data; use a `scan` of fixed length"


def unroll_scan(eqn: JaxprEqn, values: list[Any], run: Run) -> list[Any]:
    """The results of a ``scan`` equation, one body after the other."""
    params = eqn.params
    num_consts, num_carry, length = params["num_consts"], params["num_carry"], params["length"]
    consts, carry = values[:num_consts], values[num_consts : num_consts + num_carry]
    stacked = values[num_consts + num_carry :]
    num_ys = len(eqn.outvars) - num_carry
    ys: list[list[Any]] = [[] for _ in range(num_ys)]
    for t in reversed(range(length)) if params["reverse"] else range(length):
        slices = [lax.index_in_dim(x, t, keepdims=False) for x in stacked]
        results = run(params["jaxpr"], [*consts, *carry, *slices])
        carry = results[:num_carry]
        for column, y in zip(ys, results[num_carry:], strict=True):
            column.append(y)
    if params["reverse"]:
        ys = [column[::-1] for column in ys]
    empty = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars[num_carry:]] if length == 0 else None
    return [*carry, *(empty or [jnp.stack(column) for column in ys])]


def select_branch(eqn: JaxprEqn, values: list[Any], run: Run) -> list[Any]:
    """The results of a ``cond`` equation: all branches run, one is chosen."""
    index, *operands = values
    branches = eqn.params["branches"]
    if len(branches) == 1:
        return run(branches[0], operands)
    results = [run(branch, operands) for branch in branches]
    index = lax.clamp(jnp.zeros_like(index), index, jnp.full_like(index, len(branches) - 1))
    return [lax.select_n(index, *cases) if len(branches) > 2 else lax.select_n(index.astype(bool), *cases)
            for cases in zip(*results, strict=True)]
