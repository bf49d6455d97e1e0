"""How much memory a program needs beside its arguments, from its jaxpr alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp

__all__ = ["Divided", "peak_bytes"]

# What a compiler computes where it is used, rather than keep it.
_FUSED = frozenset(
    "abs add add_any and asin atan atan2 broadcast_in_dim ceil clamp complex conj convert_element_type cos cosh copy "
    "copy_p div eq erf erf_inv etp_elemwise exp exp2 expand_dims expm1 floor ge gt imag integer_pow iota is_finite le "
    "log log1p logistic lt max min mul name ne neg not or pow real rem reshape round rsqrt select_n "
    "sharding_constraint sign sin sinh slice split sqrt square squeeze stop_gradient sub tan tanh transpose rev xor "
    "reduce_precision".split()
)
_PRODUCTS = ("dot_general", "conv_general_dilated", "reduce_sum", "scatter-add")
_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat", "checkpoint")


class Divided(NamedTuple):
    """What a jaxpr does not say about a mesh.

    Attributes:
      gradients: sizes of a parameter's axes, sorted -> over how many devices its gradient is divided, once it is summed
        over them.
      sizes: size of an axis that is divided beside the batch's -> over how many devices.
    """

    gradients: Mapping[tuple[int, ...], int] = MappingProxyType({})
    sizes: Mapping[int, int] = MappingProxyType({})


def peak_bytes(jaxpr: Any, divided: Divided | None = None) -> int:
    """The most bytes that are alive at once beside arguments and results.

    Element-wise operations are taken to be computed where they are used, so that only what they are made of is kept;
    results are written where a donated argument was. What does not wait for a loop runs before it: compilers start what
    they can.

    Args:
      jaxpr: closed or open, of the work of one device.
      divided: what is smaller on a device than the jaxpr says.
    """
    return _Simulation(getattr(jaxpr, "jaxpr", jaxpr), divided or Divided()).peak()


class _Value:
    """A value at run time: a function that is called twice has its variables twice."""

    def __init__(self, aval: Any, source: _Value | None = None):
        self.aval = aval
        self.source = source or self  # what it was cast from


class _Step(NamedTuple):
    """An equation: its name, operands and results, and what it needs inside."""

    name: str
    operands: list[_Value]
    results: list[_Value]
    inside: int


class _Simulation:
    def __init__(self, jaxpr: Any, divided: Divided):
        self.divided = divided
        self.steps: list[_Step] = []
        self.arguments = [_Value(v.aval) for v in jaxpr.invars]
        names: dict[Any, Any] = dict(zip(jaxpr.invars, self.arguments, strict=True))
        self._flatten(jaxpr, names)
        self._order()
        self.places = [_at(v, names) for v in jaxpr.outvars]
        self.results = set(self.places)

    def _flatten(self, jaxpr: Any, names: dict[Any, Any]) -> None:
        """All equations in one row, those of called functions among them."""
        for eqn in jaxpr.eqns:
            operands = [_at(v, names) for v in eqn.invars]
            inner = _called(eqn)
            if inner is not None:
                own = dict(zip(inner.invars, operands[len(operands) - len(inner.invars) :], strict=True))
                self._flatten(inner, own)
                names.update((v, _at(found, own)) for v, found in zip(eqn.outvars, inner.outvars, strict=True))
                continue
            bodies = [b for value in eqn.params.values() for b in (value if isinstance(value, tuple) else (value,))]
            inside = [peak_bytes(b, self.divided) for b in bodies if hasattr(b, "eqns") or hasattr(b, "jaxpr")]
            known = [v for v in operands if v is not None]
            is_cast = eqn.primitive.name == "convert_element_type" and bool(known)
            source = known[0].source if is_cast else None
            if source is not None and source.aval.dtype == eqn.outvars[0].aval.dtype:  # cast there and back
                names[eqn.outvars[0]] = source
                continue
            made = [_Value(v.aval, source) for v in eqn.outvars]
            names.update(zip(eqn.outvars, made, strict=True))
            self.steps.append(_Step(eqn.primitive.name, known, made, max(inside, default=0)))

    def _order(self) -> None:
        """Sort steps by how many loops they wait for."""
        waits: dict[_Value, int] = {}
        keys = []
        for step in self.steps:
            before = max((waits.get(v, 0) for v in step.operands), default=0)
            after = before + (step.name in ("scan", "while"))
            waits.update(dict.fromkeys(step.results, after))
            keys.append(after)
        self.steps = [self.steps[i] for i in sorted(range(len(keys)), key=keys.__getitem__)]

    def peak(self) -> int:
        stored, added = self._stored()
        behind: dict[Any, set[Any]] = {}  # what has to be kept for a value: itself, or what it is computed from
        last: dict[Any, int] = {}
        for i, step in enumerate(self.steps):
            needed: set[Any] = set().union(*(behind.get(v, set()) for v in step.operands))
            last.update(dict.fromkeys(needed, i))
            for v in step.results:
                behind[v] = {v} if v in stored else needed
                last.setdefault(v, i)
        for v in self.results:
            last.update(dict.fromkeys(behind.get(v, ()), len(self.steps)))
        alive = most = 0
        ends: dict[int, int] = {}
        for i, step in enumerate(self.steps):
            at_once = 0
            for v in step.results:
                if v in added:  # both are there for a moment, before they are divided
                    first = added[v]
                    at_once += self._bytes(v) + self._bytes(first) - self._bytes(first) // self._spread(step.name, v)
                elif v in stored and v not in self.results:
                    lasting = self._bytes(v) // self._spread(step.name, v)
                    at_once += self._bytes(v) - lasting  # a gradient before it is divided
                    alive += lasting
                    ends[last[v]] = ends.get(last[v], 0) + lasting
            most = max(most, alive + at_once + step.inside)
            alive -= ends.get(i, 0)
        return max(most, alive // 2 + self._in_turn(stored))  # results come one by one: half is gone by then

    def _in_turn(self, stored: set[Any]) -> int:
        """What results need that take the places of one another's arguments, and so cannot all be written in place.

        All of them but one are copied first, and the copies of two such sets are alive at once, as the TPU's compiler
        has it.
        """
        place = {v: i for i, v in enumerate(self.arguments)}
        behind: dict[Any, set[int]] = {v: {i} for v, i in place.items()}
        for step in self.steps:
            found = set().union(*(behind.get(v, set()) for v in step.operands))
            behind.update((v, set() if v in stored else found) for v in step.results)
        copies: dict[frozenset[int], int] = {}
        for i, v in enumerate(self.places[: len(self.arguments)]):
            if v is None or v.aval.shape != self.arguments[i].aval.shape:
                continue
            alike = frozenset(j for j in behind.get(v, ()) if self.arguments[j].aval.shape == v.aval.shape)
            if alike - {i}:
                copies[alike] = (len(alike) - 1) * self._bytes(v)
        return sum(sorted(copies.values())[-2:])

    def _stored(self) -> tuple[set[_Value], dict[_Value, _Value]]:
        """The values that get memory of their own, and products that are added to another one at once."""
        made = {v: step for step in self.steps for v in step.results}
        readers: dict[Any, list[_Step]] = {}
        for step in self.steps:
            for v in step.operands:
                readers.setdefault(v, []).append(step)
        stored: set[_Value] = set()
        for v, step in made.items():
            found = readers.get(v, [])
            if step.name not in _FUSED or any(reader.name in ("scan", "while") for reader in found):
                stored.add(v)
        stored -= {v for v in stored if made[v].name in _PRODUCTS and self._is_written_at_once(v, readers)}
        added: dict[_Value, _Value] = {}
        root: dict[_Value, _Value] = {}  # a sum of products -> the one whose memory it takes
        for step in self.steps:
            if step.name not in ("add", "add_any", "convert_element_type", "transpose", "reshape"):
                continue
            terms = [root.get(v, v) for v in step.operands if v in root or self._is_term(v, made, readers)]
            terms = [v for v in terms if v in stored]
            if terms and len(terms) == len(step.operands):
                root[step.results[0]] = terms[0]
                for v in terms[1:]:
                    stored.discard(v)
                    added[v] = terms[0]
        return stored, added

    def _is_term(self, v: _Value, made: dict[_Value, _Step], readers: dict[_Value, list[_Step]]) -> bool:
        return v in made and made[v].name in _PRODUCTS and len(readers[v]) == 1

    def _is_written_at_once(self, v: Any, readers: dict[Any, list[_Step]]) -> bool:
        """Whether nothing but element-wise operations stand between a value and a result of its size."""
        size = math.prod(v.aval.shape)
        while v not in self.results:
            found = readers.get(v, [])
            if len(found) != 1 or found[0].name not in _FUSED or len(found[0].results) != 1:
                return False
            v = found[0].results[0]
            if math.prod(v.aval.shape) != size:
                return False
        return True

    def _spread(self, name: str, v: Any) -> int:
        return self.divided.gradients.get(tuple(sorted(v.aval.shape)), 1) if name in _PRODUCTS else 1

    def _bytes(self, v: Any) -> int:
        aval = v.aval
        if not hasattr(aval, "shape") or not (jnp.issubdtype(aval.dtype, jnp.number) or aval.dtype == bool):
            return 0
        parts = max((self.divided.sizes.get(size, 1) for size in aval.shape), default=1)
        return math.prod(aval.shape) * aval.dtype.itemsize // parts


def _at(v: Any, names: dict[Any, Any]) -> Any:
    return None if hasattr(v, "val") else names.get(v)  # None for a constant


def _called(eqn: Any) -> Any:
    """The body of an equation that does nothing but call it."""
    if eqn.primitive.name == "cond" and len({len(b.jaxpr.invars) for b in eqn.params["branches"]}) == 1:
        return getattr(eqn.params["branches"][-1], "jaxpr", eqn.params["branches"][-1])
    if eqn.primitive.name in _CALLS:
        found = next((eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params), None)
        return getattr(found, "jaxpr", found)
    return None
