"""Rules put together from parts that can be chosen one by one.

- *storage*: what is kept: ``DRTRL()`` has a trace for each weight, ``PPProp()`` one of the input and one of the
  response.
- *recurrence*: what is handed from step to step: a unit's effect on itself past all operators, through them too, or
  nothing.
- *filter*: whether the trace is smoothed over time, as a leaky readout would see it.
- *signal*: which way errors come back. Whatever the rule, a modulator given for each step can take their place.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array

from ..compiler.graph import ETraceGraph
from .baselines import TBPTT
from .coupling import coupled_factors, coupled_plan
from .dni import DNI
from .drtrl import DRTRL
from .factors import Signal, WindowFactors
from .plan import RulePlan
from .pp_prop import PPProp
from .rule import OperandGradients, Rule, Traces, as_plan

__all__ = ["Combined", "RuleOfParts"]


class RuleOfParts(Rule):
    """A rule that is a combination of parts; see :class:`Combined`."""

    @property
    @abstractmethod
    def parts(self) -> Combined:
        """The parts."""

    @property
    def minds_windows(self) -> bool:
        return self.parts.storage.minds_windows

    @property
    def follows_parameters(self) -> bool:
        return self.parts.storage.follows_parameters

    @property
    def feedback_seed(self) -> int | None:
        return self.parts.seed if self.parts.feedback == "random" else None

    def init(self, graph: ETraceGraph | RulePlan, batch_size: int, dtype: Any = None) -> Traces:
        return self.parts.storage.init(self._plan(as_plan(graph)), batch_size, dtype)

    def advance(self, traces: Traces, factors: WindowFactors) -> Traces:
        return self.parts.storage.advance(traces, self._factors(factors))

    def gradient(self, traces: Traces, signal: Signal) -> OperandGradients:
        return self.parts.storage.gradient(traces, self._signal(signal))

    def gradient_and_advance(
        self, traces: Traces, signal: Signal, factors: WindowFactors
    ) -> tuple[OperandGradients, Traces]:
        return self.parts.storage.gradient_and_advance(traces, self._signal(signal), self._factors(factors))

    def step_gradient(self, traces: Traces, factors: WindowFactors, signals: Signal) -> OperandGradients:
        return self.parts.storage.step_gradient(traces, self._factors(factors), self._signal(signals))

    def step_gradient_and_advance(
        self, traces: Traces, factors: WindowFactors, signals: Signal, start: Signal | None = None
    ) -> tuple[OperandGradients, Traces]:
        at_start = None if start is None else self._signal(start)
        return self.parts.storage.step_gradient_and_advance(
            traces, self._factors(factors), self._signal(signals), at_start
        )

    def _plan(self, plan: RulePlan) -> RulePlan:
        plan = _RECURRENCES[self.parts.recurrence].plan(plan)
        return plan.with_filter if self.parts.kappa else plan

    def _factors(self, factors: WindowFactors) -> WindowFactors:
        factors = _RECURRENCES[self.parts.recurrence].factors(factors)
        # What a storage keeps of everything from step to step is no part of the filter.
        return _filtered(factors, self.parts.kappa / self.parts.storage.keep) if self.parts.kappa else factors

    def _signal(self, signal: Signal) -> Signal:
        plan = self._plan(signal.plan)
        if not self.parts.kappa:
            return replace(signal, plan=plan)
        groups = tuple((*map(jnp.zeros_like, group), *group) for group in signal.groups)
        return Signal(groups, signal.operands, plan)


@dataclass(frozen=True)
class Combined(RuleOfParts):
    """A rule from parts, without a class of its own.

    Most named rules are such combinations: ``DRTRL()`` is ``Combined()``, ``EProp(0.8)`` is ``Combined(kappa=0.8)``,
    ``OSTL()`` is ``Combined(recurrence="coupled")``, ``Immediate()`` is ``Combined(recurrence="none")``, and
    ``OSTL(recurrent=False)`` is ``Combined(PPProp(0.0))``.

    e-prop in the memory of pp-prop, with errors that come back through random weights:

    >>> import jax.numpy as jnp
    >>> from braintrace_core import compile_step_graph
    >>> from braintrace_core.rules import EProp, PPProp
    >>> graph = compile_step_graph(
    ...     lambda w, h, x: (0.9 * h + x @ w, h), jnp.ones((100, 50)), jnp.zeros(50), jnp.zeros(100)
    ... )
    >>> rule = Combined(PPProp(0.9), kappa=0.8, feedback="random")
    >>> rule.bytes(graph, batch_size=1) < EProp(kappa=0.8).bytes(graph, batch_size=1) / 10
    True

    Attributes:
      storage: how traces are kept, ``DRTRL()`` or ``PPProp()``. ``feedback`` can be chosen for other rules too.
      recurrence: ``"units"`` for a unit's effect on itself past all operators; ``"coupled"`` for its whole effect on
        itself, that through operators (a recurrent weight's diagonal) included; ``"none"`` for none.
      kappa: the filter's decay, ``ebar_t = kappa ebar_{t-1} + eps_t``, in ``[0, 1)``; 0 for no filter. With
        ``PPProp``, of the response's trace.
      feedback: ``"symmetric"`` sends errors back through the readout's own weights, ``"random"`` through fixed random
        ones of the same shape.
      seed: of the random weights.
    """

    storage: Rule = field(default_factory=DRTRL)
    recurrence: Literal["units", "coupled", "none"] = "units"
    kappa: float = 0.0
    feedback: Literal["symmetric", "random"] = "symmetric"
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.storage, Rule) or isinstance(self.storage, (TBPTT, DNI)):
            raise ValueError(
                f"`storage` is a rule that keeps traces and no more, DRTRL() or PPProp(); got {self.storage!r}."
            )
        if self.recurrence not in _RECURRENCES:
            raise ValueError(f'`recurrence` is "units", "coupled" or "none", got {self.recurrence!r}.')
        check_filter_and_feedback(self.kappa, self.feedback)
        if (self.recurrence != "units" or self.kappa) and not isinstance(self.storage, (DRTRL, PPProp)):
            raise ValueError(
                f"{self.storage} follows the recurrence in a way of its own: `recurrence` and `kappa` can be chosen "
                "with DRTRL() and PPProp() only."
            )
        if self.kappa and not self.storage.keep:
            raise ValueError(f"{self.storage} keeps nothing for a filter to smooth: give it a decay above 0.")

    @property
    def parts(self) -> Combined:
        return self


def check_filter_and_feedback(kappa: float, feedback: str) -> None:
    """Raise unless they are what a rule can have."""
    if not 0.0 <= kappa < 1.0:
        raise ValueError(f"`kappa` is a decay in [0, 1), got {kappa}.")
    if feedback not in ("symmetric", "random"):
        raise ValueError(f'`feedback` is "symmetric" or "random", got {feedback!r}.')


class _Recurrence(NamedTuple):
    """What is handed from step to step: a plan and factors as a rule is to see them."""

    plan: Callable[[RulePlan], RulePlan]
    factors: Callable[[WindowFactors], WindowFactors]


def _cut(factors: WindowFactors) -> WindowFactors:
    return replace(factors, D=tuple({} for _ in factors.D), plan=factors.plan.without_recurrence)


_RECURRENCES = {
    "units": _Recurrence(lambda plan: plan, lambda factors: factors),
    "coupled": _Recurrence(coupled_plan, coupled_factors),
    "none": _Recurrence(lambda plan: plan.without_recurrence, _cut),
}


def _filtered(factors: WindowFactors, kappa: float) -> WindowFactors:
    """The factors with, for each component, a second one that sums it over time with a decay."""
    between = []
    for group, old in zip(factors.plan.groups, factors.D, strict=True):
        n = group.count
        decay = _kept(factors, kappa, group.varshape)
        between.append(
            {
                **old,
                **{(a + n, b): d for (a, b), d in old.items()},
                **{(a + n, a + n): decay.astype(group.dtypes[a]) for a in range(n)},
            }
        )
    counts = [factors.plan.groups[link.group].count for link in factors.plan.links]
    df = [{**old, **{a + n: d for a, d in old.items()}} for n, old in zip(counts, factors.df, strict=True)]
    return replace(factors, D=tuple(between), df=tuple(df), plan=factors.plan.with_filter)


def _kept(factors: WindowFactors, kappa: float, varshape: tuple[int, ...]) -> Array:
    """The filter's decay for each step and example; zero where a new sequence starts."""
    value = jnp.full((*factors.sizes, *varshape), kappa)
    reset = factors.record.reset
    if reset is None:
        return value
    return jnp.where(jnp.expand_dims(reset, tuple(range(2, value.ndim))), 0.0, value)
