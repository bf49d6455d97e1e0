"""DNI: a learnt estimate of the credit that a window's end will receive from the future."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._compat import Var
from ..compiler.graph import ETraceGraph
from .drtrl import DRTRL
from .factors import signal_of_states
from .influence import HiddenVector
from .operators import add_to
from .plan import RulePlan
from .rule import Traces, as_plan
from .window import WindowRecord

__all__ = ["DNI", "LinearSynthesiser", "Synthesiser", "with_future"]

PREFIX = "synthesiser."


class Synthesiser(Protocol):
    """Estimates gradients of hidden values from the hidden values themselves; pure functions."""

    def init(self, size: int, dtype: Any) -> dict[str, Array]:
        """Its own parameters, for examples of ``size`` hidden values."""

    def estimate(self, own: dict[str, Array], hidden: Array) -> Array:
        """``(batch, size)`` estimates for ``(batch, size)`` hidden values."""


@dataclass(frozen=True)
class LinearSynthesiser:
    """``estimate = hidden A + c``, zero at first."""

    def init(self, size: int, dtype: Any) -> dict[str, Array]:
        return {"bias": jnp.zeros((size,), dtype), "weight": jnp.zeros((size, size), dtype)}

    def estimate(self, own: dict[str, Array], hidden: Array) -> Array:
        return hidden @ own["weight"] + own["bias"][None]


@dataclass(frozen=True)
class DNI(DRTRL):
    """Decoupled neural interfaces (Jaderberg et al., 2017): synthetic gradients on top of D-RTRL.

    Where a trace follows a parameter, credit from later windows reaches it through the trace. The others (a reset gate,
    an input layer below another operator) have none: they get the estimate of what later windows will say of
    the states at this window's end. The estimate of the states at a window's start is trained towards the gradient
    that the window, with its own estimate at the end, then finds for them. Step credit does not look at a window's end:
    with it, this is D-RTRL.

    Attributes:
      synthesiser: estimates gradients of hidden values; its parameters are kept with the traces and train with them.
      learning_rate: of the synthesiser's own gradient descent on the squared error, a mean over examples.
    """

    synthesiser: Synthesiser = field(default_factory=LinearSynthesiser)
    learning_rate: float = 0.01

    @property
    def minds_windows(self) -> bool:
        return False  # a synthesiser learns in every window

    def init(self, graph: ETraceGraph | RulePlan, batch_size: int, dtype: Any = None) -> Traces:
        plan = as_plan(graph)
        vector = HiddenVector(plan)
        own = self.synthesiser.init(vector.size, vector.dtype)
        return {**super().init(plan, batch_size, dtype), **{PREFIX + name: value for name, value in own.items()}}

    def future(self, traces: Traces, plan: RulePlan, states: Sequence[Any]) -> Array:
        """The estimated gradient of the hidden values ``(batch, size)`` at these states."""
        return self.synthesiser.estimate(_own(traces), _hidden(plan, states))

    def learn(self, traces: Traces, plan: RulePlan, states: Sequence[Any], target: Sequence[Any]) -> Traces:
        """The synthesiser trained towards ``target``, the gradients of ``states``."""
        hidden = _hidden(plan, states)
        wanted = HiddenVector(plan).of_signal(signal_of_states(plan, target, ()))

        def error(own: dict[str, Array]) -> Array:
            return 0.5 * jnp.mean(jnp.sum(jnp.square(self.synthesiser.estimate(own, hidden) - wanted), -1))

        own = _own(traces)
        moved = jax.tree.map(lambda a, g: a - self.learning_rate * g, own, jax.grad(error)(own))
        return {**traces, **{PREFIX + name: value for name, value in moved.items()}}


def with_future(
    plan: RulePlan,
    rule: DNI,
    traces: Traces,
    frontier: Mapping[Var, Any],
    record: WindowRecord,
    present: Any,
    initial: Sequence[Any] | None,
) -> tuple[dict[Var, Array], Traces]:
    """What the estimate at a window's end says about parameters that no trace follows, and the traces after learning.

    Args:
      plan, rule, traces, frontier, record: what the window ran with, and recorded.
      present: the window's own gradient.
      initial: what new sequences start from.
    """
    program = plan.program
    estimate = lax.stop_gradient(rule.future(traces, plan, present.after))
    _, _, _, ahead = program.value_and_gradient(
        lambda window: (jnp.sum(estimate * _hidden(plan, window.states)), None),
        frontier,
        present.before,
        record.inputs,
        record.reset,
        initial,
        operators=plan.not_followed,
    )
    found = program.operand_gradients(frontier, program.local_values(frontier, record), ahead.operators)
    for var, value in zip(program.schedule.direct, ahead.direct, strict=True):
        add_to(found, var, value)
    target = [None if now is None else now + later for now, later in zip(present.signal, ahead.states, strict=True)]
    return found, rule.learn(traces, plan, present.before, target)


def _own(traces: Traces) -> dict[str, Array]:
    return {name.removeprefix(PREFIX): value for name, value in traces.items() if name.startswith(PREFIX)}


def _hidden(plan: RulePlan, states: Sequence[Any]) -> Array:
    vector = HiddenVector(plan)
    return jax.vmap(
        lambda leaves: vector.of_states(dict(zip(plan.program.state_invars, leaves, strict=True)), after=False)
    )(list(states))
