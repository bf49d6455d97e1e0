"""Diagonals: how to read the unit-by-unit part of a group's Jacobian with few passes of reverse differentiation.

One pass weighs one component of some of the units and gives its derivative with respect to every state and every
operator at once. Units whose derivatives cannot be confused share a pass: they get one colour. Where nothing couples
the units there is one colour and the passes are as many as the components; where a layer norm couples all of
them, every unit is a colour of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .components import Components

__all__ = ["DiagonalPlan", "OperatorPositions"]

# From this many colours on, passes run one after the other: memory stays that of a single pass.
_MANY_COLOURS = 4

Tail = Callable[[list[Any], list[Any]], Sequence[Any]]


@dataclass(frozen=True, eq=False)
class OperatorPositions:
    """Which unit of a group each element of an operator's result belongs to.

    Attributes:
      unit: flat unit index for each element of ``y``, ``-1`` for elements that do not feed the group.
      exact: whether every element feeds its own unit only.
    """

    unit: np.ndarray
    exact: bool


@dataclass(frozen=True, eq=False)
class DiagonalPlan:
    """What to compute for one group, and in how many passes.

    Attributes:
      components: the group's components.
      hidden_entries: pairs ``(a, b)`` for which ``d a / d b`` can be non-zero at some unit.
      operator_entries: for each operator, the components that it can move.
      positions: for each operator, where its elements belong.
      colours: for each component, the colour of each unit and the number of colours.
      exact: whether the group's Jacobian between its states is nothing but this diagonal.
    """

    components: Components
    hidden_entries: tuple[tuple[int, int], ...]
    operator_entries: tuple[tuple[int, ...], ...]
    positions: tuple[OperatorPositions, ...]
    colours: tuple[tuple[np.ndarray, int], ...]
    exact: bool

    @property
    def num_passes(self) -> int:
        """How many passes of reverse differentiation one step takes."""
        return sum(count for a, (_, count) in enumerate(self.colours) if self._is_needed(a))

    def evaluate(
        self, tail: Tail, hidden: list[Any], operators: list[Any]
    ) -> tuple[dict[tuple[int, int], Array], list[dict[int, Array]]]:
        """The entries at these values: ``D[a, b]`` of shape ``varshape``, and for each operator ``df[a]`` of its shape.

        Args:
          tail: ``(hidden values, operators' results) -> new hidden values``.
          hidden, operators: where to differentiate.
        """
        _, pull_back = jax.vjp(tail, hidden, operators)
        between: dict[tuple[int, int], Array] = {}
        from_operators: list[dict[int, Array]] = [{} for _ in operators]
        for a in range(len(self.components)):
            if not self._is_needed(a):
                continue
            by_hidden, by_operator = self._pass(pull_back, a, hidden, operators)
            for _, b in filter(lambda entry: entry[0] == a, self.hidden_entries):
                between[a, b] = self.components.of_cotangents(by_hidden, b)
            for found, value, entries in zip(from_operators, by_operator, self.operator_entries, strict=True):
                if a in entries:
                    found[a] = value
        return between, from_operators

    def _is_needed(self, a: int) -> bool:
        return any(a == row for row, _ in self.hidden_entries) or any(a in entries for entries in self.operator_entries)

    def _pass(self, pull_back: Any, a: int, hidden: list[Any], operators: list[Any]) -> tuple[list[Any], list[Any]]:
        """Derivatives of component ``a`` at each unit's own place, all colours taken together."""
        colour, count = self.colours[a]
        dtype = self.components.real_dtype(a)

        def one(weights: Array) -> Any:
            return pull_back(self.components.cotangents_of(a, weights))

        if count == 1:
            return one(jnp.ones(self.components.varshape, dtype))
        of_hidden = [_to_states(colour, width) if s else colour for width, s in self._layout()]
        of_operators = [_colour_of(p, colour) for p in self.positions]
        own = (of_hidden, of_operators)

        def add(total: Any, c: Array) -> tuple[Any, None]:
            result = one((jnp.asarray(colour) == c).astype(dtype))
            keep = jax.tree.map(lambda own, r: jnp.where(jnp.asarray(own) == c, r, jnp.zeros_like(r)), own, result)
            return jax.tree.map(jnp.add, total, keep), None

        zeros = jax.tree.map(jnp.zeros_like, (hidden, operators))
        if count <= _MANY_COLOURS:
            for c in range(count):
                zeros, _ = add(zeros, jnp.asarray(c, jnp.int32))
            return zeros
        return lax.scan(add, zeros, jnp.arange(count, dtype=jnp.int32))[0]

    def _layout(self) -> list[tuple[int, bool]]:
        return list(zip(self.components.widths, self.components.stacked, strict=True))


def _to_states(colour: np.ndarray, width: int) -> np.ndarray:
    return np.broadcast_to(colour[..., None], (*colour.shape, width))


def _colour_of(positions: OperatorPositions, colour: np.ndarray) -> np.ndarray:
    """The colour in which each element of an operator's result is read; -1 for those without a unit."""
    unit = positions.unit
    return np.where(unit >= 0, colour.ravel()[np.maximum(unit, 0)], -1).astype(np.int32)
