"""Rules by name, wherever a rule is asked for."""

from __future__ import annotations

from collections.abc import Callable

from .baselines import BPTT, TBPTT
from .dni import DNI
from .drtrl import DRTRL
from .eprop import EProp, Immediate, ThreeFactor
from .ostl import OSTL
from .pp_prop import PPProp
from .rtrl import RTRL, UORO
from .rule import Rule
from .snap import SnAp

__all__ = ["get_rule"]

_RULES: dict[str, Callable[[], Rule]] = {
    "bptt": BPTT,
    "d_rtrl": DRTRL,
    "dni": DNI,
    "e_prop": EProp,
    "immediate": Immediate,
    "ostl": OSTL,
    "pp_prop": PPProp,
    "rtrl": RTRL,
    "snap": SnAp,
    "tbptt": TBPTT,
    "three_factor": ThreeFactor,
    "uoro": UORO,
}


def get_rule(rule: str | Rule) -> Rule:
    """A rule by its name, with its default arguments; a rule is itself.

    >>> get_rule("pp_prop")
    PPProp(decay=0.9)
    """
    if isinstance(rule, Rule):
        return rule
    if rule not in _RULES:
        raise ValueError(f"There is no rule {rule!r}. Use one of {', '.join(sorted(_RULES))}, or a rule object.")
    return _RULES[rule]()
