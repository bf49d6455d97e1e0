"""pp-prop: a trace of the input and a trace of the hidden response, kept apart (also known as ES-D-RTRL).

    ex_t = ax ex_{t-1} + x_t
    ef_t = af D_t ef_{t-1} + (1 - af) df_t

The gradient is the operator's own at ``x = ex``, for the cotangent ``sum_a signal_a ef_a / (1 - af^t)``, where ``t``
counts time steps since the sequence began. Memory for each example is that of an input and an output, not of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..compiler.graph import ETraceGraph
from ..ops.dtypes import accumulation_dtype, storage_dtype
from .factors import Signal, WindowFactors
from .operators import encoded_gradient, encoded_input
from .plan import Link, RulePlan
from .rule import OperandGradients, Rule, Traces, as_plan, times, total

__all__ = ["PPProp"]

Decay = float | int | tuple[float | int, float | int]


@dataclass(frozen=True)
class PPProp(Rule):
    """Trace of the input times trace of the response.

    Attributes:
      decay: how much of the traces is kept from step to step: a number in ``[0, 1)``, a whole number ``r >= 1`` for
        ``(r - 1) / (r + 1)``, or a pair of such for the input's side and the response's side.
    """

    decay: Decay = 0.9

    def __post_init__(self) -> None:
        for side in self.decay if isinstance(self.decay, tuple) else (self.decay,):
            _decay(side)

    @property
    def decays(self) -> tuple[float, float]:
        """The decay of the input's side and of the response's side."""
        sides = self.decay if isinstance(self.decay, tuple) else (self.decay, self.decay)
        return _decay(sides[0]), _decay(sides[1])

    def init(self, graph: ETraceGraph | RulePlan, batch_size: int, dtype: Any = None) -> Traces:
        plan = as_plan(graph)
        traces: Traces = {"steps": jnp.zeros((batch_size,), jnp.int32)}
        for link in plan.links:
            if link.operator.x is not None and input_name(plan, link) not in traces:
                shape = encoded_input(
                    link.operator, jax.ShapeDtypeStruct(link.operator.x.aval.shape, link.operator.x.aval.dtype)
                )
                traces[input_name(plan, link)] = jnp.zeros(
                    (batch_size, *shape.shape), storage_dtype(dtype, shape.dtype)
                )
            y = link.operator.y.aval
            for a in link.reached:
                traces[f"{link.name}.f.{a}"] = jnp.zeros((batch_size, *y.shape), storage_dtype(dtype, y.dtype))
        return traces

    def advance(self, traces: Traces, factors: WindowFactors) -> Traces:
        every = self._every_step(traces, factors)
        return {name: every[name][-1].astype(value.dtype) for name, value in traces.items()}

    def gradient(self, traces: Traces, signal: Signal) -> OperandGradients:
        every = jax.tree.map(lambda value: value[None], traces)
        signals = Signal(jax.tree.map(lambda value: value[None], signal.groups), signal.operands, signal.plan)
        return self._gradient(every, signals)

    def step_gradient(self, traces: Traces, factors: WindowFactors, signals: Signal) -> OperandGradients:
        return self._gradient(self._every_step(traces, factors), signals)

    def _every_step(self, traces: Traces, factors: WindowFactors) -> Traces:
        """The traces after each step of a window, ``(time, batch, ...)``, not yet rounded to how they are stored."""
        plan, (keep_x, keep_f) = factors.plan, self.decays
        traces = {name: value if name == "steps" else _widened(value) for name, value in traces.items()}
        inputs = {
            input_name(plan, link): encoded_input(link.operator, factors.x[i])
            for i, link in enumerate(plan.links)
            if link.operator.x is not None
        }

        def step(old: Traces, now: Any) -> tuple[Traces, Traces]:
            inputs, df, between, reset = now
            old = old if reset is None else {name: _clear(value, reset) for name, value in old.items()}
            new: Traces = {"steps": old["steps"] + 1}
            for name, x in inputs.items():
                new[name] = keep_x * old[name] + x.astype(old[name].dtype)
            for i, link in enumerate(plan.links):
                new.update(_respond(link, old, df[i], between[link.group], keep_f, plan))
            new = {name: new[name] for name in old}
            return new, new

        over = (inputs, factors.df, factors.D, factors.record.reset)
        if factors.sizes[0] == 1:
            _, new = step(traces, jax.tree.map(lambda value: value[0], over))
            return {name: value[None] for name, value in new.items()}
        return lax.scan(step, traces, over)[1]

    def _gradient(self, every: Traces, signals: Signal) -> OperandGradients:
        plan, (_, keep_f) = signals.plan, self.decays
        weight = _unbias(every["steps"], keep_f)
        found: OperandGradients = {}
        for i, link in enumerate(plan.links):
            now = signals.groups[link.group]
            dtype = link.operator.y.aval.dtype
            responses = [times(link.at_operator(now[a]), every[f"{link.name}.f.{a}"]) for a in link.reached]
            cotangent = total(responses).astype(dtype)
            cotangent = cotangent * _spread(weight, cotangent).astype(cotangent.dtype)
            x = None if link.operator.x is None else every[input_name(plan, link)]
            for key, value in encoded_gradient(link.operator, signals.operands[i], x, cotangent).items():
                found[f"{link.name}.{key}"] = value
        return found


def input_name(plan: RulePlan, link: Link) -> str:
    """The name of the trace of an operator's input; operators with one input share it."""
    first = next(other for other in plan.links if other.operator.x is link.operator.x)
    return f"{first.name}.x"


def _respond(
    link: Link, old: Traces, df: Mapping[int, Array], between: Mapping[Any, Array], keep: float, plan: RulePlan
) -> Traces:
    new: Traces = {}
    group = plan.groups[link.group]
    for a in link.reached:
        terms = []
        for row, b in group.entries:
            if row == a and b in link.reached:
                before = old[f"{link.name}.f.{b}"]
                decay = keep * link.at_operator(between[a, b])
                terms.append(times(decay, before))
        if a in df:
            terms.append((1 - keep) * df[a])
        stored = old[f"{link.name}.f.{a}"]
        new[f"{link.name}.f.{a}"] = total([term.astype(stored.dtype) for term in terms], like=stored)
    return new


def _decay(side: float | int) -> float:
    if isinstance(side, bool) or not isinstance(side, (int, float)):
        raise ValueError(
            f"PPProp needs a decay as a number, a rank as a whole number, or a pair of them, got {side!r}."
        )
    if isinstance(side, int):
        if side < 1:
            raise ValueError(f"PPProp needs a rank of at least 1, got {side}.")
        return (side - 1) / (side + 1)
    if not 0.0 <= side < 1.0:
        raise ValueError(f"PPProp needs a decay in [0, 1), got {side}.")
    return side


def _unbias(steps: Array, keep: float) -> Array:
    """``1 / (1 - keep^t)``: what the weights of a running mean that began at zero still lack; zero before any step."""
    steps = steps.astype(jnp.result_type(float))
    return jnp.where(steps > 0, 1.0 / jnp.maximum(1.0 - keep**steps, jnp.finfo(steps.dtype).tiny), 0.0)


def _widened(trace: Array) -> Array:
    return trace.astype(accumulation_dtype(trace.dtype))


def _spread(value: Array, onto: Array) -> Array:
    return jnp.expand_dims(value, tuple(range(value.ndim, onto.ndim)))


def _clear(value: Array, reset: Array) -> Array:
    return jnp.where(_spread(reset, value), jnp.zeros_like(value), value)
