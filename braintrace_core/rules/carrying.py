"""What a group's ``D`` does to traces and to credit over a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from .factors import Pair
from .frames import Axis, follow, triangular
from .plan import GroupPlan
from .rule import total

__all__ = ["Carried", "carry_back", "carry_on"]


class Carried(NamedTuple):
    """What a window does to the traces of a group, as entries between components.

    Attributes:
      across: ``P = D_k ... D_1``, along the axes of the group's frames.
      to_end: for each step, ``Q_u = D_k ... D_{u+1}``; None stands for one (the identity of a single step).
      pairs, axis: the group's frames, and their axes after the window.
    """

    across: Mapping[Pair, Array]
    to_end: Mapping[Pair, Array | None]
    pairs: tuple[Pair, ...]
    axis: Axis


def carry_on(
    group: GroupPlan,
    between: Mapping[Pair, Array],
    one: Mapping[Pair, Array] | None = None,
    pairs: tuple[Pair, ...] = (),
    axis: Axis | None = None,
) -> Carried:
    """What a window does to the traces of a group.

    Args:
      group: the group.
      between: ``D`` of each step.
      one: ``D`` of all steps but the first, if these are alike.
      pairs, axis: the group's frames, and their axes before the window.
    """
    across, to_end = _products(group, between, one)
    after = follow(pairs, axis or {}, between, across)
    return Carried(triangular(pairs, axis or {}, after, across), to_end, pairs, after)


def _products(
    group: GroupPlan, between: Mapping[Pair, Array], one: Mapping[Pair, Array] | None
) -> tuple[dict[Pair, Array], dict[Pair, Array | None]]:
    """``P`` and ``Q`` between components."""
    rows = group.recurrent
    if not rows:
        return {}, {}
    steps = next(iter(between.values())).shape[0]
    if steps == 1:
        return {(a, b): d[0] for (a, b), d in between.items() if a in rows}, {(a, a): None for a in rows}
    pattern = [(a, c) for a, c in group.closure if a in rows]

    def start(like: Array) -> dict[Pair, Array]:
        return {(a, c): jnp.ones_like(like) if a == c else jnp.zeros_like(like) for a, c in pattern}

    def step(later: dict[Pair, Array], d: Mapping[Pair, Array]) -> Any:
        like = next(iter(d.values()))
        return {
            (a, c): total([later[a, b] * d[b, c] for b, e in group.entries if e == c and (a, b) in later], like=like)
            for a, c in pattern
        }, later

    if one is None:
        return lax.scan(step, start(next(iter(between.values()))[0]), dict(between), reverse=True)
    _, to_end = lax.scan(lambda later, _: step(later, one), start(next(iter(one.values()))), length=steps, reverse=True)
    across, _ = step({pair: q[0] for pair, q in to_end.items()}, {pair: d[0] for pair, d in between.items()})
    return across, to_end


def carry_back(
    group: GroupPlan,
    between: Mapping[Pair, Array],
    signals: Sequence[Array],
    one: Mapping[Pair, Array] | None = None,
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Each step's signal with those of later steps of the window, carried back to it unit by unit.

        R_t = s_t + R_{t+1} D_{t+1}

    Args:
      group: the group.
      between: ``D`` of the window.
      signals: for each component, ``(time, batch, *varshape)``.
      one: ``D`` of every step, if all are alike.

    Returns:
      ``R`` for each component, and the credit ``R_1 D_1`` that reaches the states before the window.
    """
    count = group.count

    def back(credit: tuple[Array, ...], d: Mapping[Pair, Array]) -> tuple[Array, ...]:
        return tuple(
            total([credit[a] * d[a, b] for a, c in group.entries if c == b], like=credit[b]) for b in range(count)
        )

    def step(later: tuple[Array, ...], now: Any) -> Any:
        signal, d = now
        credit = tuple(s + r for s, r in zip(signal, later, strict=True))
        return back(credit, d), credit

    zero = tuple(jnp.zeros_like(s[0]) for s in signals)
    if signals[0].shape[0] == 1:
        first = tuple(s[0] for s in signals)
        return tuple(signals), back(first, {pair: d[0] for pair, d in between.items()})
    if one is None:
        before, credits = lax.scan(step, zero, (tuple(signals), dict(between)), reverse=True)
    else:
        before, credits = lax.scan(lambda later, now: step(later, (now, one)), zero, tuple(signals), reverse=True)
    return credits, before
