"""Baselines behind the same switch: plain back-propagation, in windows or through the whole sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..compiler.graph import ETraceGraph
from .factors import Signal, WindowFactors
from .plan import RulePlan
from .rule import OperandGradients, Rule, Traces

__all__ = ["BPTT", "TBPTT"]


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
    """Back-propagation through the whole sequence, which is then one window."""
