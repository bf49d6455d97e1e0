"""OSTL: online spatio-temporal learning, with the recurrence through operators or without any."""

from __future__ import annotations

from dataclasses import dataclass

from .combined import Combined, RuleOfParts
from .pp_prop import PPProp

__all__ = ["OSTL"]


@dataclass(frozen=True)
class OSTL(RuleOfParts):
    """Online spatio-temporal learning (Bohnstingl et al., 2023).

    Attributes:
      recurrent: if true, D-RTRL's trace with a unit's whole effect on itself from step to step, that through operators
        (a recurrent weight's diagonal) included; with dense recurrent weights a step takes as many passes of
        differentiation as there are hidden values. If false, nothing is handed from step to step.
    """

    recurrent: bool = True

    @property
    def parts(self) -> Combined:
        return Combined(recurrence="coupled") if self.recurrent else Combined(PPProp(0.0))
