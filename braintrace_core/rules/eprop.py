"""Rules on D-RTRL's trace with another signal or filter: e-prop, three-factor learning, the bare local derivative."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jax import Array

from ..compiler.graph import ETraceGraph
from .drtrl import DRTRL
from .factors import Signal, WindowFactors
from .plan import RulePlan
from .rule import OperandGradients, Rule, Traces, as_plan

__all__ = ["EProp", "Immediate", "ThreeFactor"]


@dataclass(frozen=True)
class EProp(Rule):
    """e-prop (Bellec et al., 2020): each step's learning signal times a filtered eligibility trace.

        ebar_t = kappa ebar_{t-1} + eps_t

    The filter advances with every step, whether or not a loss is taken.

    Attributes:
      kappa: the filter's decay, that of a leaky readout; 0 for no filter.
      feedback: ``"symmetric"`` sends errors back through the readout's own weights, ``"random"`` through fixed random
        ones of the same shape.
      seed: of the random weights.
    """

    minds_windows: ClassVar[bool] = True

    kappa: float = 0.0
    feedback: Literal["symmetric", "random"] = "symmetric"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.kappa < 1.0:
            raise ValueError(f"EProp needs kappa in [0, 1), got {self.kappa}.")
        if self.feedback not in ("symmetric", "random"):
            raise ValueError(f'EProp needs feedback "symmetric" or "random", got {self.feedback!r}.')

    def init(self, graph: ETraceGraph | RulePlan, batch_size: int, dtype: Any = None) -> Traces:
        return DRTRL().init(self._plan(as_plan(graph)), batch_size, dtype)

    def advance(self, traces: Traces, factors: WindowFactors) -> Traces:
        return DRTRL().advance(traces, self._factors(factors))

    def gradient(self, traces: Traces, signal: Signal) -> OperandGradients:
        return DRTRL().gradient(traces, self._signal(signal))

    def gradient_and_advance(
        self, traces: Traces, signal: Signal, factors: WindowFactors
    ) -> tuple[OperandGradients, Traces]:
        return DRTRL().gradient_and_advance(traces, self._signal(signal), self._factors(factors))

    def step_gradient(self, traces: Traces, factors: WindowFactors, signals: Signal) -> OperandGradients:
        return DRTRL().step_gradient(traces, self._factors(factors), self._signal(signals))

    def step_gradient_and_advance(
        self, traces: Traces, factors: WindowFactors, signals: Signal
    ) -> tuple[OperandGradients, Traces]:
        return DRTRL().step_gradient_and_advance(traces, self._factors(factors), self._signal(signals))

    def _plan(self, plan: RulePlan) -> RulePlan:
        return plan.with_filter if self.kappa else plan

    def _factors(self, factors: WindowFactors) -> WindowFactors:
        if not self.kappa:
            return factors
        between = []
        for group, old in zip(factors.plan.groups, factors.D, strict=True):
            n = group.count
            decay = _kept(factors, self.kappa, group.varshape)
            between.append(
                {
                    **old,
                    **{(a + n, b): d for (a, b), d in old.items()},
                    **{(a + n, a + n): decay.astype(group.dtypes[a]) for a in range(n)},
                }
            )
        counts = [factors.plan.groups[link.group].count for link in factors.plan.links]
        df = [{**old, **{a + n: d for a, d in old.items()}} for n, old in zip(counts, factors.df, strict=True)]
        return replace(factors, D=tuple(between), df=tuple(df), plan=self._plan(factors.plan))

    def _signal(self, signal: Signal) -> Signal:
        if not self.kappa:
            return signal
        groups = tuple((*map(jnp.zeros_like, group), *group) for group in signal.groups)
        return Signal(groups, signal.operands, self._plan(signal.plan))


@dataclass(frozen=True)
class ThreeFactor(DRTRL):
    """Three-factor learning: D-RTRL's trace times a reward or modulator that is given for each step."""


@dataclass(frozen=True)
class Immediate(Rule):
    """The local derivative only: what the last step's operators did, nothing from before. A baseline."""

    def init(self, graph: ETraceGraph | RulePlan, batch_size: int, dtype: Any = None) -> Traces:
        return DRTRL().init(as_plan(graph).without_recurrence, batch_size, dtype)

    def advance(self, traces: Traces, factors: WindowFactors) -> Traces:
        return DRTRL().advance(traces, _cut(factors))

    def gradient(self, traces: Traces, signal: Signal) -> OperandGradients:
        return DRTRL().gradient(traces, replace(signal, plan=signal.plan.without_recurrence))

    def step_gradient(self, traces: Traces, factors: WindowFactors, signals: Signal) -> OperandGradients:
        return DRTRL().step_gradient(traces, _cut(factors), replace(signals, plan=signals.plan.without_recurrence))


def _cut(factors: WindowFactors) -> WindowFactors:
    return replace(factors, D=tuple({} for _ in factors.D), plan=factors.plan.without_recurrence)


def _kept(factors: WindowFactors, kappa: float, varshape: tuple[int, ...]) -> Array:
    """The filter's decay for each step and example; zero where a new sequence starts."""
    value = jnp.full((*factors.sizes, *varshape), kappa)
    reset = factors.record.reset
    if reset is None:
        return value
    return jnp.where(jnp.expand_dims(reset, tuple(range(2, value.ndim))), 0.0, value)
