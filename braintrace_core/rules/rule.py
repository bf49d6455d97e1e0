"""What a learning rule is: four pure functions on traces, factors and signals."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..compiler.graph import ETraceGraph
from ..ops.dtypes import common_dtype
from .factors import Signal, WindowFactors
from .plan import RulePlan

__all__ = ["OperandGradients", "Rule", "Traces", "as_plan", "times", "total"]

Traces = dict[str, Array]
"""Named arrays, the same names in every process; the batch is the first axis of each."""

OperandGradients = dict[str, Array]
"""Gradients by ``link name.operand key`` or, for rules on whole parameters, ``parameter index``."""


@dataclass(frozen=True)
class Rule(ABC):
    """A learning rule.

    Every method is a pure function. ``plan`` stands for the compiled graph; a graph will do in its place.

    A rule of one's own is a subclass; all else follows from its ``init``, ``advance`` and ``gradient``, step by step
    where credit is given at each step. This one is D-RTRL with traces that fade faster than the network's memory:

    >>> import jax, jax.numpy as jnp
    >>> from dataclasses import dataclass, replace
    >>> from braintrace_core import compile_step_graph
    >>> from braintrace_core.rules import DRTRL, RulePlan, online_gradient
    >>> @dataclass(frozen=True)
    ... class Fading(DRTRL):
    ...     keep: float = 0.5
    ...
    ...     def advance(self, traces, factors):
    ...         return super().advance(traces, replace(factors, D=jax.tree.map(lambda d: self.keep * d, factors.D)))
    >>> step = lambda w, h, x: (0.9 * h + x @ w, h)
    >>> w, h, x = jnp.ones((2, 3)), jnp.zeros(3), jnp.ones(2)
    >>> plan = RulePlan.of(compile_step_graph(step, w, h, x))
    >>> rule = Fading()
    >>> loss = lambda window: (window.outputs[0].sum(), None)
    >>> result = online_gradient(plan, rule, loss, [w], [h[None]], rule.init(plan, 1), [x[None, None]])
    >>> sorted(result.traces)[:2]
    ['group0.D.0.0', 'params@0.df.0']
    """

    @property
    def minds_windows(self) -> bool:
        """Whether ``advance`` looks at ``factors.fine`` and ``factors.anew`` itself.

        Choosing between two whole sets of traces afterwards, as is done for other rules, reads and writes them once
        more.
        """
        return False

    @property
    def keep(self) -> float:
        """How much of what ``D`` hands on the rule keeps from step to step."""
        return 1.0

    @property
    def follows_parameters(self) -> bool:
        """Whether traces follow whatever the next states depend on, through all hidden states and operators.

        Otherwise they follow the operators that feed a hidden state, each to that state.
        """
        return False

    @property
    def feedback_seed(self) -> int | None:
        """The seed of fixed random weights that errors come back through; None for the readout's own weights."""
        return None

    @abstractmethod
    def init(self, graph: ETraceGraph | RulePlan, batch_size: int, dtype: Any = None) -> Traces:
        """Traces before the first step.

        Args:
          graph: the compiled graph.
          batch_size: the number of examples that run side by side.
          dtype: the dtype to store traces in; None for that of the parameters.
        """

    @abstractmethod
    def advance(self, traces: Traces, factors: WindowFactors) -> Traces:
        """Traces after a window, from those before it."""

    @abstractmethod
    def gradient(self, traces: Traces, signal: Signal) -> OperandGradients:
        """What a signal at this moment says about the operands, through everything before it."""

    def gradient_and_advance(
        self, traces: Traces, signal: Signal, factors: WindowFactors
    ) -> tuple[OperandGradients, Traces]:
        """``(gradient(traces, signal), advance(traces, factors))``; a rule may have a faster way to both."""
        return self.gradient(traces, signal), self.advance(traces, factors)

    def step_gradient(self, traces: Traces, factors: WindowFactors, signals: Signal) -> OperandGradients:
        """The sum over a window of each step's signal times the traces after that step.

        Args:
          traces: before the window.
          factors: of the window.
          signals: one for each step, arrays ``(time, batch, *varshape)``.
        """

        def step(old: Traces, now: Any) -> tuple[Traces, OperandGradients]:
            moving, signal = now
            new = self.advance(old, factors.with_moving(moving))
            return new, self.gradient(new, Signal(signal, factors.operands, factors.plan))

        _, found = lax.scan(step, traces, (factors.moving, signals.groups))
        return jax.tree.map(lambda gradient: gradient.sum(0), found)

    def step_gradient_and_advance(
        self, traces: Traces, factors: WindowFactors, signals: Signal, start: Signal | None = None
    ) -> tuple[OperandGradients, Traces]:
        """``(step_gradient(traces, factors, signals), advance(traces, factors))``; a rule may have a faster way.

        Args:
          traces, factors, signals: as in :meth:`step_gradient`.
          start: a signal of the states before the window, whose gradient is added; None for none.
        """
        found = self.step_gradient(traces, factors, signals)
        if start is not None:
            found = {name: found[name] + more for name, more in self.gradient(traces, start).items()}
        return found, self.advance(traces, factors)

    def bytes(self, graph: ETraceGraph | RulePlan, batch_size: int, dtype: Any = None) -> int:
        """The memory that the traces of a batch take."""
        shapes = jax.eval_shape(lambda: self.init(graph, batch_size, dtype))
        return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in shapes.values())


def total(terms: Sequence[Array], like: Array | None = None) -> Array:
    """The sum of some arrays; zeros like ``like`` if there are none."""
    if not terms:
        assert like is not None
        return jnp.zeros_like(like)
    result = terms[0]
    for term in terms[1:]:
        result = result + term
    return result


def times(a: Array, b: Array) -> Array:
    """The product of two arrays whose dtypes may differ (a real factor and a complex trace, or a short one)."""
    dtype = common_dtype(a.dtype, b.dtype)
    return a.astype(dtype) * b.astype(dtype)


def as_plan(graph: ETraceGraph | RulePlan) -> RulePlan:
    """The plan of a graph; a plan is its own."""
    return graph if isinstance(graph, RulePlan) else RulePlan.of(graph)
