"""Rules on D-RTRL's trace with another signal or filter: e-prop, three-factor learning, the bare local derivative."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .combined import Combined, RuleOfParts, check_filter_and_feedback
from .drtrl import DRTRL

__all__ = ["EProp", "Immediate", "ThreeFactor"]


@dataclass(frozen=True)
class EProp(RuleOfParts):
    """e-prop (Bellec et al., 2020): each step's learning signal times a filtered eligibility trace.

        ebar_t = kappa ebar_{t-1} + eps_t

    The filter advances with every step, whether or not a loss is taken.

    Attributes:
      kappa: the filter's decay, that of a leaky readout; 0 for no filter.
      feedback: ``"symmetric"`` sends errors back through the readout's own weights, ``"random"`` through fixed random
        ones of the same shape.
      seed: of the random weights.
    """

    kappa: float = 0.0
    feedback: Literal["symmetric", "random"] = "symmetric"
    seed: int = 0

    def __post_init__(self) -> None:
        check_filter_and_feedback(self.kappa, self.feedback)

    @property
    def parts(self) -> Combined:
        return Combined(kappa=self.kappa, feedback=self.feedback, seed=self.seed)


@dataclass(frozen=True)
class ThreeFactor(DRTRL):
    """Three-factor learning: D-RTRL's trace times a reward or modulator that is given for each step."""


@dataclass(frozen=True)
class Immediate(RuleOfParts):
    """The local derivative only: what the last step's operators did, nothing from before. A baseline."""

    @property
    def parts(self) -> Combined:
        return Combined(recurrence="none")
