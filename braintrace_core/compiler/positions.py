"""Positions: index patterns carried through a jaxpr, from chosen source variables to every value behind them.

The patterns are those of derivatives: an equation through which no small change passes (a comparison, a cast to
integers) ends a dependence. Inside a custom derivative rule they are those of values, which is never too little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compat import Jaxpr, JaxprEqn, Literal, Var, bind_equation, open_jaxpr
from ..ops import is_boundary
from .inline import CALLS, CUSTOM_CALLS, inner_call
from .patterns import Pattern, union
from .primitive_kinds import CUMULATIVE, ELEMENTWISE, FLAT, MOVES, REDUCTIONS

__all__ = ["Positions"]

Patterns = dict[Any, Pattern]  # source -> pattern

_LONGEST_SCAN = 64


class Positions:
    """Carries patterns through equations.

    Args:
      consts: values of variables that are known at compile time (index arrays among them).
    """

    def __init__(self, consts: Mapping[Var, Any]):
        self._known: dict[Var, Any] = dict(consts)
        self._foldable: dict[Var, JaxprEqn] = {}

    def propagate(self, eqns: Iterable[JaxprEqn], patterns: dict[Var, Patterns], *, values: bool = False) -> None:
        """Extend ``patterns`` (variable -> source -> pattern) by the results of ``eqns``, in order.

        Args:
          eqns: equations in the order in which they run; ETP boundaries among them end every dependence.
          patterns: the sources' own patterns, extended in place; variables without an entry depend on nothing.
          values: follow values rather than derivatives (through comparisons and casts).
        """
        for eqn in eqns:
            self._note_constants(eqn)
            if is_boundary(eqn.primitive):
                continue
            inputs = [patterns.get(v, {}) if isinstance(v, Var) else {} for v in eqn.invars]
            if not any(inputs):
                continue
            for var, result in zip(eqn.outvars, self._equation(eqn, inputs, values), strict=True):
                result = {source: p for source, p in result.items() if p.mixed or p.index.shape[-1]}
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
            return self._inner(inner_call(eqn), inputs, values or name in CUSTOM_CALLS)
        if name == "cond":
            branches = [self._inner(branch, inputs[1:], values) for branch in eqn.params["branches"]]
            return [_join(results) for results in zip(*branches, strict=True)]
        if name == "scan" and eqn.params["length"] <= _LONGEST_SCAN:
            return self._scan(eqn, inputs, values)
        rule = self._rule(eqn, values)
        sources = {source: None for operand in inputs for source in operand}
        results: list[Patterns] = [{} for _ in eqn.outvars]
        for source in sources:
            for result, pattern in zip(results, rule([operand.get(source) for operand in inputs]), strict=True):
                if pattern is not None:
                    result[source] = pattern
        return results

    def _rule(self, eqn: JaxprEqn, values: bool) -> Callable[[list[Pattern | None]], list[Pattern | None]]:
        """How one source's patterns go through ``eqn``."""
        name, params = eqn.primitive.name, eqn.params
        shapes = [tuple(v.aval.shape) for v in eqn.outvars]
        if name in ELEMENTWISE or name in FLAT or _is_elementwise_etp(eqn):
            chooser = {0} if name == "select_n" and not values else set()
            return lambda ps: [
                _elementwise([p for i, p in enumerate(ps) if p is not None and i not in chooser], shape)
                for shape in shapes
            ]
        if name in MOVES:
            return lambda ps: _move(name, params, ps, [tuple(v.aval.shape) for v in eqn.invars], shapes)
        if name in REDUCTIONS:
            return lambda ps: [p.merged(params["axes"]) if p is not None else None for p in ps[:1]]
        if name in _INDEXED and all(self._value(v) is not None for v in eqn.invars[_INDEXED[name] :]):
            return lambda ps: [self._indexed(eqn, ps)]
        if name in CUMULATIVE:
            return lambda ps: [union([ps[0], Pattern.mixing(shapes[0])]) if ps[0] is not None else None]
        return lambda ps: [Pattern.mixing(shape) if any(p is not None for p in ps) else None for shape in shapes]

    def _indexed(self, eqn: JaxprEqn, ps: list[Pattern | None]) -> Pattern | None:
        """A gather, slice or update with known indices, run on the lists themselves, one column at a time."""
        count = _INDEXED[eqn.primitive.name]
        indices = [self._value(v) for v in eqn.invars[count:]]
        width = max(p.index.shape[-1] for p in ps[:count] if p is not None)
        columns = []
        for k in range(width):
            operands = [_column(p, k, v.aval.shape) for p, v in zip(ps, eqn.invars[:count], strict=False)]
            with jax.ensure_compile_time_eval():
                columns.append(np.asarray(bind_equation(eqn, [*operands, *indices])[0]))
        index = np.maximum(np.stack(columns, axis=-1), -1).astype(np.int32)
        return Pattern(index, any(p.mixed for p in ps[:count] if p is not None))

    def _inner(self, inner: Any, inputs: Sequence[Patterns], values: bool) -> list[Patterns]:
        jaxpr, consts = open_jaxpr(inner)
        self._known.update(zip(jaxpr.constvars, consts, strict=True))
        patterns = {v: operand for v, operand in zip(jaxpr.invars, inputs, strict=True) if operand}
        self.propagate(jaxpr.eqns, patterns, values=values)
        return [patterns.get(v, {}) if isinstance(v, Var) else {} for v in jaxpr.outvars]

    def _scan(self, eqn: JaxprEqn, inputs: Sequence[Patterns], values: bool) -> list[Patterns]:
        params = eqn.params
        first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
        consts, carry, stacked = list(inputs[:first]), list(inputs[first:last]), inputs[last:]
        rows: list[list[Patterns]] = []
        steps = range(params["length"])
        for t in reversed(steps) if params["reverse"] else steps:
            xs = [{s: p.moved(p.index[t]) for s, p in operand.items()} for operand in stacked]
            results = self._inner(params["jaxpr"], [*consts, *carry, *xs], values)
            carry, row = results[: params["num_carry"]], results[params["num_carry"] :]
            rows.append(row)
        if params["reverse"]:
            rows.reverse()
        shapes = [tuple(v.aval.shape) for v in eqn.outvars[params["num_carry"] :]]
        return [*carry, *(_stack([row[i] for row in rows], shape) for i, shape in enumerate(shapes))]


# Primitives that take elements at given indices -> how many leading operands hold elements (the rest are indices).
_INDEXED = {"gather": 1, "dynamic_slice": 1, "dynamic_update_slice": 2}


def _is_elementwise_etp(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "etp_elemwise"


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


def _column(pattern: Pattern | None, k: int, shape: tuple[int, ...]) -> np.ndarray:
    if pattern is None or k >= pattern.index.shape[-1]:
        return np.full(shape, -1, np.int32)
    return np.ascontiguousarray(pattern.index[..., k])


def _stack(row: list[Patterns], shape: tuple[int, ...]) -> Patterns:
    result: Patterns = {}
    for source in {s: None for patterns in row for s in patterns}:
        parts = [patterns.get(source) for patterns in row]
        width = max(p.index.shape[-1] for p in parts if p is not None)
        index = np.full((*shape, width), -1, np.int32)
        for t, p in enumerate(parts):
            if p is not None:
                index[t, ..., : p.index.shape[-1]] = p.index
        result[source] = Pattern(index, any(p.mixed for p in parts if p is not None))
    return result


def _move(
    name: str,
    params: Mapping[str, Any],
    ps: list[Pattern | None],
    in_shapes: list[tuple[int, ...]],
    out_shapes: list[tuple[int, ...]],
) -> list[Pattern | None]:
    """Patterns of a primitive that rearranges elements: the same rearrangement of the lists."""
    if name == "concatenate":
        return [_concatenate(ps, in_shapes, params["dimension"])]
    pattern = ps[0]
    if pattern is None:
        return [None] * len(out_shapes)
    index, width, shape = pattern.index, pattern.index.shape[-1], out_shapes[0]
    if name == "split":
        parts = np.split(index, np.cumsum([int(n) for n in params["sizes"]])[:-1], axis=params["axis"])
        return [pattern.moved(part) for part in parts]
    if name == "broadcast_in_dim":
        expanded = [1] * len(shape)
        for axis, n in zip(params["broadcast_dimensions"], index.shape[:-1], strict=True):
            expanded[axis] = n
        index = np.broadcast_to(index.reshape(*expanded, width), (*shape, width))
    elif name in ("reshape", "squeeze", "expand_dims"):
        index = index.reshape(*shape, width)
    elif name == "transpose":
        index = index.transpose(*params["permutation"], index.ndim - 1)
    elif name == "rev":
        index = np.flip(index, params["dimensions"])
    elif name == "slice":
        strides = params["strides"] or (1,) * len(shape)
        bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
        index = index[tuple(slice(*bound) for bound in bounds)]
    elif name == "pad":
        index = _pad(index, params["padding_config"], shape)
    return [pattern.moved(index)]


def _pad(index: np.ndarray, config: Sequence[tuple[int, int, int]], shape: tuple[int, ...]) -> np.ndarray:
    result = np.full((*shape, index.shape[-1]), -1, np.int32)
    source, target = [], []
    for (low, _, interior), n, m in zip(config, index.shape[:-1], shape, strict=True):
        places = low + np.arange(n) * (interior + 1)
        inside = (places >= 0) & (places < m)
        source.append(np.flatnonzero(inside))
        target.append(places[inside])
    result[np.ix_(*target)] = index[np.ix_(*source)]
    return result


def _concatenate(ps: list[Pattern | None], shapes: list[tuple[int, ...]], axis: int) -> Pattern:
    width = max(p.index.shape[-1] for p in ps if p is not None)
    parts = []
    for p, shape in zip(ps, shapes, strict=True):
        part = np.full((*shape, width), -1, np.int32)
        if p is not None:
            part[..., : p.index.shape[-1]] = p.index
        parts.append(part)
    return Pattern(np.concatenate(parts, axis=axis), any(p.mixed for p in ps if p is not None))
