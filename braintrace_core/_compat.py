"""Everything that depends on the JAX version, in one place.

JAX 0.11 merged ``ClosedJaxpr`` into ``Jaxpr``; the rest of the package only uses the functions below and never
asks which version it runs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.core import ShapedArray, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var, jaxpr_as_fun
from jax.extend.core import new_jaxpr_eqn as _new_jaxpr_eqn
from jax.interpreters import ad, batching, mlir
from jax.interpreters.partial_eval import dce_jaxpr as _dce_jaxpr

Atom = Var | Literal

__all__ = [
    "Atom",
    "ClosedJaxpr",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "Primitive",
    "ShapedArray",
    "Var",
    "ad",
    "batching",
    "bind_equation",
    "close_jaxpr",
    "dce_jaxpr",
    "eval_jaxpr",
    "is_jaxpr",
    "jaxpr_as_fun",
    "mlir",
    "new_equation",
    "new_jaxpr",
    "open_jaxpr",
]


def open_jaxpr(jaxpr: Any) -> tuple[Jaxpr, list[Any]]:
    """The jaxpr itself and the values of its constants, whether it was closed over them or not."""
    return getattr(jaxpr, "jaxpr", jaxpr), list(getattr(jaxpr, "consts", ()))


def close_jaxpr(jaxpr: Jaxpr, consts: Sequence[Any]) -> ClosedJaxpr:
    """``jaxpr`` bound to the values of its constants."""
    return ClosedJaxpr(jaxpr, list(consts))


def is_jaxpr(value: Any) -> bool:
    """Whether an equation parameter is a jaxpr, open or closed."""
    return isinstance(value, (Jaxpr, ClosedJaxpr))


def new_jaxpr(
    constvars: Sequence[Var], invars: Sequence[Var], outvars: Sequence[Atom], eqns: Sequence[JaxprEqn]
) -> Jaxpr:
    """A jaxpr made of existing equations; its effects are those of the equations."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns)) if eqns else frozenset()
    return Jaxpr(list(constvars), list(invars), list(outvars), list(eqns), effects)


def new_equation(
    primitive: Primitive, invars: Sequence[Atom], outvars: Sequence[Var], params: dict[str, Any]
) -> JaxprEqn:
    """An equation without effects."""
    return _new_jaxpr_eqn(list(invars), list(outvars), primitive, params, frozenset())


def dce_jaxpr(jaxpr: Jaxpr, used_outputs: Sequence[bool], keep_inputs: bool = True) -> Jaxpr:
    """``jaxpr`` without the equations that no used output needs."""
    pruned, _ = _dce_jaxpr(jaxpr, list(used_outputs), instantiate=keep_inputs)
    return pruned


def bind_equation(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Run one equation on ``values``: its results, always as a list. Derivative rules that it carries are kept."""
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]
