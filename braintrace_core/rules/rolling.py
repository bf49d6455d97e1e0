"""What a window does to the stored traces of a link: they decay, and its steps add to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ..ops.in_place import after, in_turn
from ..ops.trace_rules import TraceRule
from .factors import Pair
from .rule import times, total

__all__ = ["Roll", "unless"]


@dataclass(frozen=True)
class Roll:
    """A window as the traces of a link see it; arrays have the shape of the operator's result.

    Attributes:
      stored: the components that are stored.
      decays: ``(a, b)`` -> how much of component ``b`` before the window is in ``a`` after it, ``(batch, ...)``.
      x: the operator's input, ``(time, batch, ...)``; None if it has none.
      cotangents: component -> what each step adds, times ``x``, ``(time, batch, ...)``.
      anew: a bool, whether the traces before the window are to be forgotten first; None if not.
    """

    stored: tuple[int, ...]
    decays: Mapping[Pair, Array]
    x: Any
    cotangents: Mapping[int, Array]
    anew: Any

    def decayed(self, rule: TraceRule, a: int, old: Mapping[int, Array], ready: Sequence[Array] = ()) -> Array | None:
        """What remains of old traces in component ``a``, made after those that are ready; None for nothing."""
        decays = {b: after(ready, self.decays[a, b]) for b in self.stored if (a, b) in self.decays}
        return total([times(rule.align(decay), old[b]) for b, decay in decays.items()]) if decays else None

    def new(
        self, rule: TraceRule, old: Mapping[int, Array], add: Callable[..., Array] | None = None
    ) -> dict[int, Array]:
        """The traces after the window, by component; ``add`` in place of the rule's own."""
        add = add or rule.add
        before = {a: unless(self.anew, trace) for a, trace in old.items()}
        found: dict[int, Array] = {}
        for a in self.order:
            trace = self.decayed(rule, a, before, [*found.values()])  # in an order, or each old one would be copied
            if a in self.cotangents:
                given = self.x, self.cotangents[a]
                trace = rule.instant(*given) if trace is None else add(trace, *given)
            found[a] = jnp.zeros_like(old[a]) if trace is None else trace.astype(old[a].dtype)
        return found

    @property
    def order(self) -> list[int]:
        """The components in an order in which each comes before those that it is made of, as far as there is one."""
        left, found = [*self.stored], []
        while left:
            needed = {b for a, b in self.decays if a in left and a != b}
            found.append(next((a for a in left if a not in needed), left[0]))
            left.remove(found[-1])
        return found

    def new_and_read(
        self, rule: TraceRule, old: Mapping[int, Array], signals: Sequence[Mapping[int, Array]]
    ) -> tuple[dict[int, Array], list[Array]]:
        """The traces after the window, and what those before it say of signals at each component.

        On CPUs example by example: see :func:`in_turn`.
        """

        def at_once(old: Any, over_batch: Any, over_time: Any, add: Callable[..., Array] | None = None) -> Any:
            (decays, signals), (x, cotangents) = over_batch, over_time
            read = [total([rule.contract(old[b], signal[b]) for b in self.stored]) for signal in signals]
            return Roll(self.stored, decays, x, cotangents, self.anew).new(rule, old, add), read

        def one(old: Any, over_batch: Any, over_time: Any) -> Any:
            return at_once(old, over_batch, over_time, partial(TraceRule.add, rule))  # one product: the cache holds it

        over_batch, over_time = (dict(self.decays), [*map(dict, signals)]), (self.x, dict(self.cotangents))
        return lax.platform_dependent(dict(old), over_batch, over_time, cpu=partial(in_turn, one), default=at_once)


def unless(flag: Any, value: Array) -> Array:
    """``value``, or zero if there is a flag and it is up."""
    return value if flag is None else jnp.where(flag, jnp.zeros_like(value), value)
