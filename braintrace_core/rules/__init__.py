"""Learning rules: pure functions from factors, traces and signals to gradients. One file a family."""

from .baselines import BPTT, TBPTT
from .combined import Combined
from .dni import DNI, LinearSynthesiser
from .drtrl import DRTRL
from .eprop import EProp, Immediate, ThreeFactor
from .factors import Signal, WindowFactors
from .names import get_rule
from .online import (
    OnlineGradient,
    PresentGradient,
    online_gradient,
    past_gradient,
    step_gradient,
    step_online_gradient,
    window_gradient,
)
from .ostl import OSTL
from .plan import RulePlan
from .pp_prop import PPProp
from .quality import GradientComparison, QualityMeter, compare_gradients
from .rtrl import RTRL, UORO
from .rule import Rule, Traces
from .snap import SnAp
from .window import WindowProgram

__all__ = [
    "BPTT",
    "DNI",
    "DRTRL",
    "OSTL",
    "RTRL",
    "TBPTT",
    "UORO",
    "Combined",
    "EProp",
    "GradientComparison",
    "Immediate",
    "LinearSynthesiser",
    "OnlineGradient",
    "PPProp",
    "PresentGradient",
    "QualityMeter",
    "Rule",
    "RulePlan",
    "Signal",
    "SnAp",
    "ThreeFactor",
    "Traces",
    "WindowFactors",
    "WindowProgram",
    "compare_gradients",
    "get_rule",
    "online_gradient",
    "past_gradient",
    "step_gradient",
    "step_online_gradient",
    "window_gradient",
]
