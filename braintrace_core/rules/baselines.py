"""Baselines behind the same switch: plain back-propagation, in windows or through the whole sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._compat import bind_equation
from ..compiler.graph import ETraceGraph
from ..compiler.jaxpr_tools import evaluate
from ..compiler.module_info import is_differentiable
from .factors import Signal, WindowFactors
from .parts import restart
from .plan import RulePlan
from .rule import OperandGradients, Rule, Traces
from .window import WindowProgram, WindowRecord, WindowResult

__all__ = ["BPTT", "TBPTT", "checkpointed_gradient"]


@dataclass(frozen=True)
class TBPTT(Rule):
    """Truncated back-propagation: no traces, nothing from before the window."""

    def init(self, graph: ETraceGraph | RulePlan, batch_size: int, dtype: Any = None) -> Traces:
        del graph, batch_size, dtype
        return {}

    def advance(self, traces: Traces, factors: WindowFactors) -> Traces:
        del factors
        return traces

    def gradient(self, traces: Traces, signal: Signal) -> OperandGradients:
        del traces, signal
        return {}

    def step_gradient(self, traces: Traces, factors: WindowFactors, signals: Signal) -> OperandGradients:
        del traces, factors, signals
        return {}


@dataclass(frozen=True)
class BPTT(TBPTT):
    """Back-propagation through the whole sequence, which is then one window.

    Attributes:
      checkpoint: ``"sqrt"`` keeps the states at the ends of about ``sqrt(T)`` stretches only and computes the rest
        again on the way back: memory grows with ``sqrt(T)``, for about a third more time. None keeps everything.
    """

    checkpoint: Literal["sqrt"] | None = None

    def __post_init__(self) -> None:
        if self.checkpoint not in (None, "sqrt"):
            raise ValueError(f'BPTT needs checkpoint "sqrt" or None, got {self.checkpoint!r}.')


def checkpointed_gradient(
    program: WindowProgram,
    loss: Callable[[WindowResult], tuple[Array, Any]],
    parameters: Sequence[Any],
    states: Sequence[Any],
    inputs: Sequence[Any],
    reset: Any = None,
    initial: Sequence[Any] | None = None,
) -> tuple[Array, Any, list[Array], list[Array]]:
    """The value, auxiliary output, states after the sequence and gradients of a loss, with ``sqrt(T)`` checkpoints.

    Args:
      program: of the graph.
      loss, parameters, states, inputs, reset, initial: as in :func:`online_gradient`.
    """
    minfo = program.graph.module_info
    steps = inputs[0].shape[0]
    stretch = math.isqrt(max(steps - 1, 0)) + 1
    moving = [i for i, v in enumerate(minfo.weight_invars) if is_differentiable(v.aval)]

    def one(parameters: Sequence[Any], states: Sequence[Any], inputs: Sequence[Any]) -> Any:
        known = {
            **dict(zip(minfo.weight_invars, parameters, strict=True)),
            **dict(zip(program.state_invars, states, strict=True)),
            **dict(zip(minfo.input_invars, inputs, strict=True)),
        }
        found = evaluate(minfo.jaxpr, minfo.consts, [known[v] for v in minfo.jaxpr.invars], bind_equation)
        after = dict(zip(minfo.jaxpr.invars[len(minfo.input_invars) :], found[minfo.num_var_out :], strict=True))
        return [after[v] for v in program.state_invars], list(found[: minfo.num_var_out])

    def of(values: Sequence[Any]) -> Any:
        leaves = list(parameters)
        for i, value in zip(moving, values, strict=True):
            leaves[i] = value

        def step(states: list[Any], now: Any) -> Any:
            inputs, reset = now
            if reset is not None and initial is not None:
                states = [
                    s if start is None else restart(reset, start, s) for s, start in zip(states, initial, strict=True)
                ]
            new, outputs = jax.vmap(one, in_axes=(None, 0, 0))(leaves, states, inputs)
            return [n.astype(s.dtype) for n, s in zip(new, states, strict=True)], outputs

        def run_stretch(states: list[Any], now: Any) -> Any:
            return lax.scan(step, states, now)

        over = (list(inputs), reset)
        whole = steps // stretch * stretch
        first = jax.tree.map(lambda a: a[:whole].reshape(-1, stretch, *a.shape[1:]), over)
        after, outputs = lax.scan(jax.checkpoint(run_stretch), list(states), first)
        outputs = [o.reshape(whole, *o.shape[2:]) for o in outputs]
        if whole < steps:
            after, last = jax.checkpoint(run_stretch)(after, jax.tree.map(lambda a: a[whole:], over))
            outputs = [jnp.concatenate(pair) for pair in zip(outputs, last, strict=True)]
        value, aux = loss(WindowResult(outputs, after, WindowRecord(tuple(inputs), (), reset)))
        return value, (aux, after)

    (value, (aux, after)), found = jax.value_and_grad(of, has_aux=True)([parameters[i] for i in moving])
    gradients = [jnp.zeros_like(p) for p in parameters]
    for i, gradient in zip(moving, found, strict=True):
        gradients[i] = gradient
    return value, aux, after, gradients
