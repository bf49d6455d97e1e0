"""Inline: calls disappear, so that every trainable operation is an equation of one flat jaxpr.

``jit``, ``remat`` and ``closed_call`` are replaced by their bodies. A ``custom_jvp`` or ``custom_vjp`` call without a
trainable operation inside is kept whole, with its derivative rule (a surrogate gradient stays one); one that holds a
trainable operation is opened, and a record says that its rule does not reach the factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from .._compat import ClosedJaxpr, JaxprEqn, Literal, Var, bind_equation, open_jaxpr
from ..ops import is_etp
from .control_flow import CONTROL_FLOW, ControlFlowPolicy, select_branch, unroll_scan
from .diagnostics import DiagnosticKind, Path, Recorder, spell
from .jaxpr_tools import inner_jaxprs, walk

__all__ = ["CALLS", "CUSTOM_CALLS", "inline_calls", "inner_call"]

CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "core_closed_call", "remat", "remat2", "checkpoint"}
)
CUSTOM_CALLS = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})

# Operations that mix units and so cannot stay hidden inside a call when one of their operands is a parameter.
MIXING = frozenset({"dot_general", "conv_general_dilated", "gather", "ragged_dot_general"})


def inner_call(eqn: JaxprEqn) -> Any:
    """The jaxpr that a call equation runs."""
    return next(eqn.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in eqn.params)


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
    if not any(eqn.primitive.name in CALLS | CUSTOM_CALLS | CONTROL_FLOW for eqn in jaxpr.eqns):
        return closed

    def run_all(*args: Any) -> list[Any]:
        sources = [
            _Origin(frozenset((parameters[i],)), False) if i in parameters else _Origin(frozenset(), True)
            for i in range(len(args))
        ]
        inliner = _Inliner(policy, recorder)
        return [value for value, _ in inliner.run(jaxpr, consts, list(zip(args, sources, strict=True)), in_jit=False)]

    return jax.make_jaxpr(run_all)(*(v.aval for v in jaxpr.invars))


class _Origin:
    """Where a value comes from: the parameters behind it, and whether data (inputs, states) is behind it too."""

    __slots__ = ("data", "paths")

    def __init__(self, paths: frozenset[Path], data: bool):
        self.paths = paths
        self.data = data

    @staticmethod
    def join(origins: list[_Origin]) -> _Origin:
        return _Origin(frozenset().union(*(o.paths for o in origins)), any(o.data for o in origins))


_NOWHERE = _Origin(frozenset(), False)

_Sourced = tuple[Any, _Origin]


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
        name = eqn.primitive.name
        origin = _Origin.join([o for _, o in args])
        if name in CALLS:
            return self.call(inner_call(eqn), args, in_jit=True)
        if name in CUSTOM_CALLS and self.trains_inside(eqn, origin, only_mixing=True):
            self.recorder.warn(
                DiagnosticKind.CUSTOM_DERIVATIVE_INLINED,
                f"A `{name}` around {_spell_all(origin)} was opened to reach the operator inside: factors use the "
                "derivative of its body. Put the custom rule around the part without parameters to keep it.",
                primitive=eqn.primitive,
                weight_path=min(origin.paths, default=None),
            )
            return self.call(inner_call(eqn), args, in_jit)
        if name in CONTROL_FLOW and self.trains_inside(eqn, origin, only_mixing=False):
            opened = self.open_control_flow(eqn, args, origin)
            if opened is not None:
                return opened
        if in_jit and is_etp(eqn.primitive):
            self.recorder.info(
                DiagnosticKind.PRIMITIVE_INSIDE_NESTED_JIT,
                f"`{name}` on {_spell_all(origin)} stands inside a nested jit, which the compiler looks through.",
                primitive=eqn.primitive,
                weight_path=min(origin.paths, default=None),
            )
        return [(result, origin) for result in bind_equation(eqn, [value for value, _ in args])]

    def call(self, inner: Any, args: list[_Sourced], in_jit: bool) -> list[_Sourced]:
        jaxpr, consts = open_jaxpr(inner)
        return self.run(jaxpr, consts, args, in_jit)

    def trains_inside(self, eqn: JaxprEqn, origin: _Origin, only_mixing: bool) -> bool:
        """Whether a parameter meets data inside the equation, in a way that the analysis must see."""
        inner = [e for jaxpr in inner_jaxprs(eqn) for e in walk(jaxpr)]
        if any(is_etp(e.primitive) for e in inner):
            return True
        if not (origin.paths and origin.data):
            return False
        return not only_mixing or any(e.primitive.name in MIXING for e in inner)

    def open_control_flow(self, eqn: JaxprEqn, args: list[_Sourced], origin: _Origin) -> list[_Sourced] | None:
        name = eqn.primitive.name
        about: dict[str, Any] = {"primitive": eqn.primitive, "weight_path": min(origin.paths, default=None)}
        if not self.policy.opens(eqn):
            self.recorder.warn(
                DiagnosticKind.PRIMITIVE_INSIDE_CONTROL_FLOW,
                f"{_spell_all(origin)} acts inside a `{name}` that stays closed: {self.policy.refusal(eqn)}. Until "
                "then it learns within the window only.",
                paths=tuple(sorted(origin.paths)),
                **about,
            )
            return None
        self.recorder.info(
            DiagnosticKind.CONTROL_FLOW_UNROLLED,
            f"A `{name}` around {_spell_all(origin)} became straight-line code.",
            **about,
        )

        # Which value comes from where is not followed through the replacement: every one counts as coming from all.
        def run(inner: Any, values: list[Any]) -> list[Any]:
            return [value for value, _ in self.call(inner, [(v, origin) for v in values], in_jit=False)]

        replace = unroll_scan if name == "scan" else select_branch
        return [(value, origin) for value in replace(eqn, [v for v, _ in args], run)]


def _spell_all(origin: _Origin) -> str:
    return ", ".join(f"'{spell(path)}'" for path in sorted(origin.paths)) or "values without a parameter"
