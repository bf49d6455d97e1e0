"""pp-prop: a trace of the input and a trace of the hidden response, kept apart (also known as ES-D-RTRL).

    ex_t = ax ex_{t-1} + x_t
    ef_t = af D_t ef_{t-1} + (1 - af) df_t

The gradient is the operator's own at ``x = ex``, for the cotangent ``sum_a signal_a ef_a / (1 - af^t)``, where ``t``
counts time steps since the sequence began. Memory for each example is that of an input and an output, not of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..compiler.graph import ETraceGraph
from ..ops.dtypes import accumulation_dtype, storage_dtype
from .factors import Signal, WindowFactors
from .loop import scan
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

    @property
    def keep(self) -> float:
        return self.decays[1]

    def init(self, graph: ETraceGraph | RulePlan, batch_size: int, dtype: Any = None) -> Traces:
        plan = as_plan(graph)
        traces: Traces = {"steps": jnp.zeros((batch_size,), jnp.int32)}
        for link in plan.links:
            if link.operator.x is not None and plan.input_name(link) not in traces:
                shape = encoded_input(
                    link.operator, jax.ShapeDtypeStruct(link.operator.x.aval.shape, link.operator.x.aval.dtype)
                )
                traces[plan.input_name(link)] = jnp.zeros((batch_size, *shape.shape), storage_dtype(dtype, shape.dtype))
            y = link.operator.y.aval
            for a in link.reached:
                traces[f"{link.name}.f.{a}"] = jnp.zeros((batch_size, *y.shape), storage_dtype(dtype, y.dtype))
        return traces

    def advance(self, traces: Traces, factors: WindowFactors) -> Traces:
        return self._over_window(traces, factors, None)[0]

    def gradient(self, traces: Traces, signal: Signal) -> OperandGradients:
        seen = jax.tree.map(lambda value: value[None], self._seen(traces, signal.groups, signal.plan))
        return _gradient(seen, signal)

    def step_gradient(self, traces: Traces, factors: WindowFactors, signals: Signal) -> OperandGradients:
        return self.step_gradient_and_advance(traces, factors, signals)[0]

    def step_gradient_and_advance(
        self, traces: Traces, factors: WindowFactors, signals: Signal, start: Signal | None = None
    ) -> tuple[OperandGradients, Traces]:
        new, seen = self._over_window(traces, factors, signals)
        if start is not None:  # one more step of the same products
            first = self._seen(traces, start.groups, start.plan)
            seen = jax.tree.map(lambda a, more: jnp.concatenate([a[None].astype(more.dtype), more]), first, seen)
        assert seen is not None
        return _gradient(seen, signals), new

    def _over_window(
        self, traces: Traces, factors: WindowFactors, signals: Signal | None
    ) -> tuple[Traces, _Seen | None]:
        """The traces after a window and, for signals, what each step sees; rounded once, at the end."""
        plan, (keep_x, keep_f) = factors.plan, self.decays
        inputs = {
            plan.input_name(link): encoded_input(link.operator, factors.x[i])
            for i, link in enumerate(plan.links)
            if link.operator.x is not None
        }

        def step(old: Traces, now: Any) -> tuple[Traces, _Seen | None]:
            inputs, df, between, reset, signal = now
            old = old if reset is None else {name: _clear(value, reset) for name, value in old.items()}
            new: Traces = {"steps": old["steps"] + 1}
            for name, x in inputs.items():
                new[name] = keep_x * old[name] + x.astype(old[name].dtype)
            for i, link in enumerate(plan.links):
                new.update(_respond(link, old, df[i], between[link.group], keep_f, plan))
            new = {name: new[name] for name in old}
            return new, None if signal is None else self._seen(new, signal, plan)

        wide = {name: value if name == "steps" else _widened(value) for name, value in traces.items()}
        over = (inputs, factors.df, factors.D, factors.record.reset, None if signals is None else signals.groups)
        if factors.sizes[0] == 1:
            new, seen = step(wide, jax.tree.map(lambda value: value[0], over))
            seen = jax.tree.map(lambda value: value[None], seen)
        else:
            new, seen = scan(step, wide, over, factors.sizes[0])
        return {name: new[name].astype(value.dtype) for name, value in traces.items()}, seen

    def _seen(self, traces: Traces, signal: Sequence[Sequence[Array]], plan: RulePlan) -> _Seen:
        """What a signal sees at one moment: each link's input, and its result's cotangent."""
        weight = _unbias(traces["steps"], self.decays[1])
        inputs, cotangents = {}, []
        for link in plan.links:
            now = signal[link.group]
            found = total([times(link.at_operator(now[a]), traces[f"{link.name}.f.{a}"]) for a in link.reached])
            found = found.astype(link.operator.y.aval.dtype)
            cotangents.append(found * _spread(weight, found).astype(found.dtype))
            if link.operator.x is not None:
                inputs[plan.input_name(link)] = traces[plan.input_name(link)]
        return _Seen(inputs, cotangents)


class _Seen(NamedTuple):
    """Traces of inputs by name, and for each link the cotangent of its result."""

    inputs: dict[str, Array]
    cotangents: list[Array]


def _gradient(seen: _Seen, signal: Signal) -> OperandGradients:
    """One product over all steps, for each link."""
    found: OperandGradients = {}
    for i, link in enumerate(signal.plan.links):
        x = None if link.operator.x is None else seen.inputs[signal.plan.input_name(link)]
        for key, value in encoded_gradient(link.operator, signal.operands[i], x, seen.cotangents[i]).items():
            found[f"{link.name}.{key}"] = value
    return found


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
