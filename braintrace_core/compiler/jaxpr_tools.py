"""Small questions that several passes ask of a jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import jax

from .._compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, is_jaxpr, new_jaxpr, open_jaxpr

__all__ = ["IndexedJaxpr", "evaluate", "inner_jaxprs", "rewrite", "walk"]

Handler = Callable[[JaxprEqn, list[Any]], list[Any]]


def inner_jaxprs(eqn: JaxprEqn) -> Iterator[Any]:
    """The jaxprs among an equation's parameters (bodies, branches)."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if is_jaxpr(item):
                yield item


def walk(jaxpr: Any) -> Iterator[JaxprEqn]:
    """Every equation of ``jaxpr``, those of inner jaxprs included."""
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from walk(inner)


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], handle: Handler) -> list[Any]:
    """Run ``jaxpr``, giving each equation and its input values to ``handle``."""
    env: dict[Var, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, handle(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]


def rewrite(closed: ClosedJaxpr, handle: Handler) -> ClosedJaxpr:
    """``closed`` traced anew, each equation replaced by what ``handle`` does with its inputs."""
    jaxpr, consts = open_jaxpr(closed)
    return jax.make_jaxpr(lambda *args: evaluate(jaxpr, consts, args, handle))(*(v.aval for v in jaxpr.invars))


class IndexedJaxpr:
    """A jaxpr with its definitions indexed, so that parts of it are found without a walk over the whole."""

    def __init__(self, jaxpr: Jaxpr):
        self.jaxpr = jaxpr
        self.producer: dict[Var, int] = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        order = [*jaxpr.constvars, *jaxpr.invars, *self.producer]
        self._order: dict[Var, int] = {v: i for i, v in enumerate(order)}

    @cached_property
    def consumers(self) -> dict[Var, list[int]]:
        """For each variable, the equations that read it."""
        found: dict[Var, list[int]] = {}
        for i, eqn in enumerate(self.jaxpr.eqns):
            for v in eqn.invars:
                if isinstance(v, Var):
                    found.setdefault(v, []).append(i)
        return found

    def in_order(self, variables: Iterable[Var]) -> list[Var]:
        """``variables`` in the order in which the jaxpr defines them."""
        return sorted(variables, key=self._order.__getitem__)

    def ancestors(self, outvars: Iterable[Any], stop: Callable[[Var], bool] = lambda _: False) -> list[int]:
        """Indices of the equations that compute ``outvars``, not looking behind variables that ``stop``, in order."""
        found: set[int] = set()
        todo = [v for v in outvars if isinstance(v, Var) and not stop(v)]
        while todo:
            index = self.producer.get(todo.pop())
            if index is not None and index not in found:
                found.add(index)
                todo.extend(v for v in self.jaxpr.eqns[index].invars if isinstance(v, Var) and not stop(v))
        return sorted(found)

    def reached(self, sources: Iterable[Var], eqns: Iterable[int]) -> set[Var]:
        """``sources`` and whatever the equations ``eqns`` compute from them."""
        found = set(sources)
        for i in eqns:
            eqn = self.jaxpr.eqns[i]
            if any(v in found for v in eqn.invars if isinstance(v, Var)):
                found.update(eqn.outvars)
        return found

    def part(
        self, invars: Sequence[Var], outvars: Sequence[Any], stop: Callable[[Var], bool] = lambda _: False
    ) -> Jaxpr:
        """The part that computes ``outvars`` from ``invars``, not looking behind variables that ``stop``.

        What it needs besides ``invars`` becomes its constvars, in the order in which the jaxpr defines them.
        """
        given = set(invars)
        eqns = [self.jaxpr.eqns[i] for i in self.ancestors(outvars, lambda v: v in given or stop(v))]
        made = {v for eqn in eqns for v in eqn.outvars} - set(invars)
        used = {v for v in outvars if isinstance(v, Var)}
        used.update(v for eqn in eqns for v in eqn.invars if isinstance(v, Var))
        return new_jaxpr(self.in_order(used - made - set(invars)), invars, outvars, eqns)
