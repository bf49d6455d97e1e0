"""Inline: calls disappear, so that every trainable operation is an equation of one flat jaxpr.

``jit``, ``remat`` and ``closed_call`` are replaced by their bodies. A ``custom_jvp`` or ``custom_vjp`` call without a
trainable operation inside is kept whole, with its derivative rule (a surrogate gradient stays one); one that holds a
trainable operation is opened, and a record says that its rule does not reach the factors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax

from .._compat import (
    CALLS,
    CUSTOM_CALLS,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    bind_equation,
    inner_call,
    open_jaxpr,
)
from ..ops import is_etp
from .control_flow import CONTROL_FLOW, ControlFlowPolicy, select_branch, unroll_scan
from .diagnostics import DiagnosticKind, Path, Recorder, spell
from .jaxpr_tools import inner_jaxprs, walk

__all__ = ["inline_calls"]

# Operations that mix units and so cannot stay hidden inside a call when one of their operands is a parameter.
MIXING = frozenset({"dot_general", "conv_general_dilated", "gather", "dynamic_slice", "ragged_dot_general"})


def inline_calls(
    closed: ClosedJaxpr, parameters: Mapping[int, Path], policy: ControlFlowPolicy, recorder: Recorder
) -> ClosedJaxpr:
    """``closed`` with calls and, under ``policy``, control flow replaced by what they do.

    Args:
      closed: the traced step.
      parameters: index of each input that is a parameter -> its path.
      policy: which control flow may be opened.
      recorder: told of everything that was opened or had to stay closed.
    """
    jaxpr, consts = open_jaxpr(closed)
    if not any(any(inner_jaxprs(eqn)) for eqn in jaxpr.eqns):
        return closed

    def run_all(*args: Any) -> list[Any]:
        sources = [frozenset((parameters[i],)) if i in parameters else None for i in range(len(args))]
        inliner = _Inliner(policy, recorder)
        return [value for value, _ in inliner.run(jaxpr, consts, list(zip(args, sources, strict=True)), in_jit=False)]

    return jax.make_jaxpr(run_all)(*(v.aval for v in jaxpr.invars))


# A value and where it comes from: the parameters that it is made of (none, for a constant), or None if it is data.
_Origin = frozenset[Path] | None
_Sourced = tuple[Any, _Origin]
_NOWHERE: frozenset[Path] = frozenset()


def _join(args: Sequence[_Sourced]) -> _Origin:
    """Where a value computed from ``args`` comes from."""
    return None if any(origin is None for _, origin in args) else _acting(args)


def _acting(args: Sequence[_Sourced]) -> frozenset[Path]:
    """The parameters that enter an equation as such, not as part of data."""
    return _NOWHERE.union(*(origin for _, origin in args if origin is not None))


class _Inliner:
    def __init__(self, policy: ControlFlowPolicy, recorder: Recorder):
        self.policy = policy
        self.recorder = recorder

    def run(self, jaxpr: Any, consts: Any, args: list[_Sourced], in_jit: bool) -> list[_Sourced]:
        """Run a jaxpr on values that know their origin."""
        env: dict[Var, _Sourced] = dict(zip(jaxpr.invars, args, strict=True))
        env.update(zip(jaxpr.constvars, ((c, _NOWHERE) for c in consts), strict=True))

        def read(atom: Any) -> _Sourced:
            return (atom.val, _NOWHERE) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self.equation(eqn, [read(v) for v in eqn.invars], in_jit), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, args: list[_Sourced], in_jit: bool) -> list[_Sourced]:
        name, acting = eqn.primitive.name, _acting(args)
        if name in CALLS:
            return self.call(inner_call(eqn), args, in_jit=True)
        if name in CUSTOM_CALLS and self.trains_inside(eqn, args, only_mixing=True):
            self.recorder.warn(
                DiagnosticKind.CUSTOM_DERIVATIVE_INLINED,
                f"A `{name}` around {_spell_all(acting)} was opened to reach the operator inside: factors use the "
                "derivative of its body. Put the custom rule around the part without parameters to keep it.",
                **_about(eqn, acting),
            )
            return self.call(inner_call(eqn), args, in_jit)
        if name not in CUSTOM_CALLS and self.trains_inside(eqn, args, only_mixing=name not in CONTROL_FLOW):
            opened = self.open_control_flow(eqn, args)
            if opened is not None:
                return opened
        if in_jit and is_etp(eqn.primitive):
            self.recorder.info(
                DiagnosticKind.PRIMITIVE_INSIDE_NESTED_JIT,
                f"`{name}` on {_spell_all(acting)} stands inside a nested jit, which the compiler looks through.",
                **_about(eqn, acting),
            )
        return [(result, _join(args)) for result in bind_equation(eqn, [value for value, _ in args])]

    def call(self, inner: Any, args: list[_Sourced], in_jit: bool) -> list[_Sourced]:
        jaxpr, consts = open_jaxpr(inner)
        return self.run(jaxpr, consts, args, in_jit)

    def trains_inside(self, eqn: JaxprEqn, args: list[_Sourced], only_mixing: bool) -> bool:
        """Whether a parameter meets data inside the equation, in a way that the analysis must see."""
        inner = [e for jaxpr in inner_jaxprs(eqn) for e in walk(jaxpr)]
        if any(is_etp(e.primitive) for e in inner):
            return True
        if not _acting(args) or _join(args) is not None:
            return False
        return not only_mixing or any(e.primitive.name in MIXING for e in inner)

    def open_control_flow(self, eqn: JaxprEqn, args: list[_Sourced]) -> list[_Sourced] | None:
        name, acting = eqn.primitive.name, _acting(args)
        about = _about(eqn, acting)
        if not self.policy.opens(eqn):
            self.recorder.warn(
                DiagnosticKind.PRIMITIVE_INSIDE_CONTROL_FLOW,
                f"{_spell_all(acting)} acts inside a `{name}` that stays closed: {self.policy.refusal(eqn)}. Until "
                "then it learns within the window only.",
                paths=about["weight_paths"],
                **about,
            )
            return None
        self.recorder.info(
            DiagnosticKind.CONTROL_FLOW_UNROLLED,
            f"A `{name}` around {_spell_all(acting)} became straight-line code.",
            **about,
        )
        replace = unroll_scan if name == "scan" else select_branch
        return replace(eqn, args, partial(self.call, in_jit=False), _apply)


def _apply(function: Callable[..., Any], *args: _Sourced) -> _Sourced:
    return function(*(value for value, _ in args)), _join(args)


def _about(eqn: JaxprEqn, acting: frozenset[Path]) -> dict[str, Any]:
    paths = tuple(sorted(acting))
    return {"primitive": eqn.primitive, "weight_path": paths[0] if paths else None, "weight_paths": paths}


def _spell_all(acting: frozenset[Path]) -> str:
    return ", ".join(f"'{spell(path)}'" for path in sorted(acting)) or "values without a parameter"
