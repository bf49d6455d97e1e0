"""Positions: index patterns carried through a jaxpr, from chosen source variables to every value behind them.

The patterns are those of derivatives: an equation through which no small change passes (a comparison, a cast to
integers) ends a dependence. Inside a custom derivative rule they are those of values, which is never too little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compat import (
    CALLS,
    CUSTOM_CALLS,
    JaxprEqn,
    Literal,
    Var,
    bind_equation,
    inner_call,
    open_jaxpr,
    scan_sizes,
)
from ..ops import is_boundary, is_etp
from .moves import move, place, stack
from .patterns import Pattern, union
from .primitive_kinds import ACCUMULATING, CUMULATIVE, ELEMENTWISE, FLAT, INDEXED, MOVES, REDUCTIONS

__all__ = ["Positions"]

Patterns = dict[Any, Pattern]  # source -> pattern
Rule = Callable[[list[Pattern | None]], list[Pattern | None]]  # one source's patterns through an equation

_LONGEST_SCAN = 64


class Positions:
    """Carries patterns through equations.

    Args:
      consts: values of variables that are known at compile time (index arrays among them).
    """

    def __init__(self, consts: Mapping[Var, Any]):
        self._known: dict[Var, Any] = dict(consts)
        self._foldable: dict[Var, JaxprEqn] = {}

    def propagate(self, eqns: Iterable[JaxprEqn], patterns: dict[Var, Patterns]) -> None:
        """Extend ``patterns`` (variable -> source -> pattern) by the results of ``eqns``, in order.

        Args:
          eqns: equations in the order in which they run; ETP boundaries among them end every dependence.
          patterns: the sources' own patterns, extended in place; variables without an entry depend on nothing.
        """
        self._propagate((eqn for eqn in eqns if not is_boundary(eqn.primitive)), patterns, values=False)

    def _propagate(self, eqns: Iterable[JaxprEqn], patterns: dict[Var, Patterns], values: bool) -> None:
        """As above without boundaries; ``values``: follow values rather than derivatives."""
        for eqn in eqns:
            self._note_constants(eqn)
            inputs = [patterns.get(v, {}) if isinstance(v, Var) else {} for v in eqn.invars]
            if not any(inputs):
                continue
            for var, result in zip(eqn.outvars, self._equation(eqn, inputs, values), strict=True):
                result = {source: p for source, p in result.items() if p.mixed or p.width}
                if result and (values or jnp.issubdtype(var.aval.dtype, jnp.inexact)):
                    patterns[var] = {**patterns.get(var, {}), **result}

    def _note_constants(self, eqn: JaxprEqn) -> None:
        """Remember index arrays that could be computed now; :meth:`_value` does so when one is asked for."""
        if all(v in self._known or v in self._foldable for v in eqn.invars if isinstance(v, Var)) and all(
            v.aval.dtype == bool or jnp.issubdtype(v.aval.dtype, jnp.integer) for v in eqn.outvars
        ):
            self._foldable.update((v, eqn) for v in eqn.outvars)

    def _value(self, atom: Any) -> Any:
        """The value of ``atom`` if it is known at compile time, else None."""
        if isinstance(atom, Literal):
            return atom.val
        if atom not in self._known and atom in self._foldable:
            eqn = self._foldable[atom]
            operands = [self._value(v) for v in eqn.invars]
            with jax.ensure_compile_time_eval():
                self._known.update(zip(eqn.outvars, bind_equation(eqn, operands), strict=True))
        return self._known.get(atom)

    def _equation(self, eqn: JaxprEqn, inputs: Sequence[Patterns], values: bool) -> list[Patterns]:
        name = eqn.primitive.name
        if name in FLAT and not values:
            return [{} for _ in eqn.outvars]
        if name in CALLS or name in CUSTOM_CALLS:
            return self._inner(inner_call(eqn), eqn.invars, inputs, values or name in CUSTOM_CALLS)
        if is_etp(eqn.primitive):
            # One through which credit passes, or one inside control flow that stays closed: as the plain operation.
            plain = partial(eqn.primitive.apply, **eqn.params)
            return self._inner(jax.make_jaxpr(plain)(*(v.aval for v in eqn.invars)), eqn.invars, inputs, values)
        if name == "cond":
            branches = [self._inner(branch, eqn.invars[1:], inputs[1:], values) for branch in eqn.params["branches"]]
            return [_join(results) for results in zip(*branches, strict=True)]
        if name == "scan" and eqn.params["length"] <= _LONGEST_SCAN:
            return self._scan(eqn, inputs, values)
        rule = self._rule(eqn)
        sources = {source: None for operand in inputs for source in operand}
        results: list[Patterns] = [{} for _ in eqn.outvars]
        for source in sources:
            for result, pattern in zip(results, rule([operand.get(source) for operand in inputs]), strict=True):
                if pattern is not None:
                    result[source] = pattern
        return results

    def _rule(self, eqn: JaxprEqn) -> Rule:
        """How one source's patterns go through ``eqn``."""
        name, params = eqn.primitive.name, eqn.params
        shapes = [tuple(v.aval.shape) for v in eqn.outvars]
        if name == "optimization_barrier":
            return lambda ps: ps
        if name in ELEMENTWISE or name in FLAT:
            return lambda ps: [_elementwise([p for p in ps if p is not None], shape) for shape in shapes]
        if name in MOVES:
            return lambda ps: move(name, params, ps, [tuple(v.aval.shape) for v in eqn.invars], shapes)
        if name in REDUCTIONS:
            return lambda ps: [p.merged(params["axes"]) if p is not None else None for p in ps[:1]]
        if name in INDEXED and all(self._value(v) is not None for v in _indices(eqn)):
            return lambda ps: [self._indexed(eqn, ps)]
        if name in ACCUMULATING and self._value(eqn.invars[1]) is not None:
            return lambda ps: [self._accumulated(eqn, ps)]
        if name in CUMULATIVE:
            return lambda ps: [union([ps[0], Pattern.mixing(shapes[0])]) if ps[0] is not None else None]
        return lambda ps: [Pattern.mixing(shape) if any(p is not None for p in ps) else None for shape in shapes]

    def _indexed(self, eqn: JaxprEqn, ps: list[Pattern | None]) -> Pattern:
        """A primitive that takes elements at known indices, run on the lists themselves, one column at a time."""
        where = INDEXED[eqn.primitive.name]
        if "fill_value" in eqn.params:
            eqn = eqn.replace(params={**eqn.params, "fill_value": -1})  # for indices out of range
        patterns = [ps[i] for i in where]
        width = max(p.width for p in patterns if p is not None)
        columns = []
        for k in range(width):
            operands = [self._value(v) if i not in where else _column(ps[i], k, v) for i, v in enumerate(eqn.invars)]
            with jax.ensure_compile_time_eval():
                columns.append(np.asarray(bind_equation(eqn, operands)[0]))
        if not columns:
            return Pattern.mixing(eqn.outvars[0].aval.shape)
        return Pattern(np.stack(columns, axis=-1), any(p.mixed for p in patterns if p is not None))

    def _accumulated(self, eqn: JaxprEqn, ps: list[Pattern | None]) -> Pattern:
        """Updates combined with an operand at known indices: element-wise, once the updates are in their places."""
        operand, _, updates = ps
        parts = [] if operand is None else [operand]
        if updates is not None:
            parts.append(place(updates, eqn.invars[0].aval.shape, self._value(eqn.invars[1]), eqn.params))
        return union(parts)

    def _inner(self, inner: Any, operands: Sequence[Any], inputs: Sequence[Patterns], values: bool) -> list[Patterns]:
        """The patterns of the results of an inner jaxpr; None stands for an operand that is never known."""
        jaxpr, consts = open_jaxpr(inner)
        known = dict(zip(jaxpr.constvars, consts, strict=True))
        given = zip(jaxpr.invars, (None if atom is None else self._value(atom) for atom in operands), strict=True)
        known.update((v, value) for v, value in given if value is not None)
        patterns = {v: operand for v, operand in zip(jaxpr.invars, inputs, strict=True) if operand}
        Positions(known)._propagate(jaxpr.eqns, patterns, values)
        return [patterns.get(v, {}) if isinstance(v, Var) else {} for v in jaxpr.outvars]

    def _scan(self, eqn: JaxprEqn, inputs: Sequence[Patterns], values: bool) -> list[Patterns]:
        params = eqn.params
        num_consts, num_carry = scan_sizes(eqn)
        consts, carry = list(inputs[:num_consts]), list(inputs[num_consts : num_consts + num_carry])
        stacked = inputs[num_consts + num_carry :]
        operands = [*eqn.invars[:num_consts], *[None] * (len(inputs) - num_consts)]
        rows: list[list[Patterns]] = []
        steps = range(params["length"])
        for t in reversed(steps) if params["reverse"] else steps:
            xs = [{s: p.moved(p.entries[t]) for s, p in operand.items()} for operand in stacked]
            results = self._inner(params["jaxpr"], operands, [*consts, *carry, *xs], values)
            carry, row = results[:num_carry], results[num_carry:]
            rows.append(row)
        if params["reverse"]:
            rows.reverse()
        shapes = [tuple(v.aval.shape) for v in eqn.outvars[num_carry:]]
        return [*carry, *(_stack([row[i] for row in rows], shape) for i, shape in enumerate(shapes))]


def _indices(eqn: JaxprEqn) -> list[Any]:
    return [v for i, v in enumerate(eqn.invars) if i not in INDEXED[eqn.primitive.name]]


def _column(pattern: Pattern | None, k: int, atom: Any) -> np.ndarray:
    if pattern is None or k >= pattern.width:
        return np.full(atom.aval.shape, -1, np.int32)
    return np.ascontiguousarray(pattern.entries[..., k])


def _elementwise(patterns: list[Pattern], shape: tuple[int, ...]) -> Pattern | None:
    if not patterns:
        return None
    if any(p.shape != shape and any(n not in (1, m) for n, m in _aligned(p.shape, shape)) for p in patterns):
        return Pattern.mixing(shape)
    return union([p.broadcast(shape) for p in patterns])


def _aligned(shape: tuple[int, ...], onto: tuple[int, ...]) -> list[tuple[int, int]]:
    """Sizes of the axes of ``shape`` next to those of ``onto``; a scalar has none."""
    if len(shape) not in (0, len(onto)):
        return [(-1, 0)]
    return list(zip(shape, onto, strict=False))


def _join(results: Sequence[Patterns]) -> Patterns:
    sources = {source: None for result in results for source in result}
    return {s: union([result[s] for result in results if s in result]) for s in sources}


def _stack(rows: list[Patterns], shape: tuple[int, ...]) -> Patterns:
    sources = {s: None for patterns in rows for s in patterns}
    return {s: stack([patterns.get(s) for patterns in rows], shape) for s in sources}
