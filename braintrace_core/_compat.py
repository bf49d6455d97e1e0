"""Everything that depends on the JAX version, in one place.

JAX 0.11 merged ``ClosedJaxpr`` into ``Jaxpr``; the rest of the package only uses the functions below and never
asks which version it runs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from jax import lax
from jax.core import ShapedArray, Tracer, eval_jaxpr
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, Primitive, Var, new_jaxpr_eqn
from jax.interpreters import ad, batching, mlir

__all__ = [
    "CALLS",
    "CUSTOM_CALLS",
    "Atom",
    "ClosedJaxpr",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "Primitive",
    "ShapedArray",
    "Var",
    "ad",
    "add_equation",
    "batching",
    "bind_equation",
    "close_jaxpr",
    "eval_jaxpr",
    "inner_call",
    "is_jaxpr",
    "is_traced",
    "mlir",
    "new_jaxpr",
    "open_jaxpr",
    "scan_sizes",
]

Atom: TypeAlias = Var | Literal

# Names of primitives that run one inner jaxpr on their operands, without and with a derivative rule of their own.
CALLS = frozenset(
    """
    checkpoint closed_call composite core_call core_closed_call custom_vmap_call eval_jaxpr jit pjit remat remat2
    """.split()
)
CUSTOM_CALLS = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})

# Since ClosedJaxpr and Jaxpr are one class, the constvars of a jaxpr are the inputs to which values are attached.
_CONSTVARS_NEED_VALUES = ClosedJaxpr is Jaxpr

_NO_NAMES = DebugInfo("braintrace", "part of a step", None, None)


def open_jaxpr(jaxpr: Any) -> tuple[Jaxpr, list[Any]]:
    """The jaxpr itself and the values of its constants, whether it was closed over them or not."""
    return getattr(jaxpr, "jaxpr", jaxpr), list(getattr(jaxpr, "consts", ()))


def close_jaxpr(jaxpr: Jaxpr, consts: Sequence[Any]) -> ClosedJaxpr:
    """``jaxpr`` bound to the values of its constants."""
    return ClosedJaxpr(jaxpr, list(consts))


def is_jaxpr(value: Any) -> bool:
    """Whether an equation parameter is a jaxpr, open or closed."""
    return isinstance(value, (Jaxpr, ClosedJaxpr))


def is_traced(value: Any) -> bool:
    """Whether a value is only known by its shape and dtype, since a function is being traced."""
    return isinstance(value, Tracer)


def new_jaxpr(
    constvars: Sequence[Var], invars: Sequence[Var], outvars: Sequence[Atom], eqns: Sequence[JaxprEqn]
) -> Jaxpr:
    """A jaxpr made of existing equations; its effects are those of the equations.

    It is not closed over values: they are given to :func:`eval_jaxpr` or :func:`close_jaxpr`.
    """
    effects = frozenset().union(*(eqn.effects for eqn in eqns)) if eqns else frozenset()
    jaxpr = Jaxpr(list(constvars), list(invars), list(outvars), list(eqns), effects, _NO_NAMES)
    # Shapes stand in for the values, so that constvars stay apart from invars.
    return ClosedJaxpr(jaxpr, [v.aval for v in constvars]) if _CONSTVARS_NEED_VALUES else jaxpr


def inner_call(eqn: JaxprEqn) -> Any:
    """The jaxpr that an equation of :data:`CALLS` or :data:`CUSTOM_CALLS` runs."""
    return next(eqn.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call") if name in eqn.params)


def scan_sizes(eqn: JaxprEqn) -> tuple[int, int]:
    """How many operands of a ``scan`` equation are constants and how many are carried; the others are scanned over."""
    if "ft_in" in eqn.params:
        num_consts, num_carry, _ = map(len, eqn.params["ft_in"].unpack())
        return num_consts, num_carry
    return eqn.params["num_consts"], eqn.params["num_carry"]


def bind_equation(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Run one equation on ``values``: its results, always as a list. Derivative rules that it carries are kept."""
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def add_equation(a: Var, b: Var, total: Var) -> JaxprEqn:
    """The equation ``total = a + b``."""
    return new_jaxpr_eqn([a, b], [total], lax.add_p, {}, frozenset())
