"""Ahead of time: what an operator inside the loop over time makes of inputs alone, for all steps of a window at once.

``concatenate([x, h]) @ w`` is ``x @ w[:n] + h @ w[n:]``, and the first product needs no state. Inside the loop the
operator is left with the second: forward, and on the way back as well, where nobody asks for the gradient of ``x``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._compat import JaxprEqn, Var
from ..compiler.schedule import Operator, Schedule
from ..ops import etp_mm_p, etp_mv_p
from ..ops.in_place import on_one_device

__all__ = ["SplitProduct", "split_products"]


@dataclass(frozen=True, eq=False)
class SplitProduct:
    """A product inside the loop over time whose input is inputs and states side by side.

    Attributes:
      operator: the operator.
      known: its pieces that need no state.
      ahead, left: the places of those pieces in its input, and of the others.
    """

    operator: Operator
    known: tuple[Var, ...]
    ahead: tuple[slice, ...]
    left: tuple[slice, ...]

    def for_all_steps(self, windowed: Mapping[Var, Any], operands: Sequence[Any]) -> Array:
        """Its share of the result that needs no state, ``(time, batch, ...)``, bias included."""
        eqn = self.operator.eqn
        weight = _joined([operands[1][rows] for rows in self.ahead], 0)

        def one(pieces: list[Any]) -> Any:
            return eqn.primitive.bind(_joined(pieces, -1), weight, *operands[2:], **eqn.params)

        return jax.vmap(jax.vmap(one))([windowed[v] for v in self.known])

    def in_the_loop(self, operands: Sequence[Any]) -> Callable[[Any], Any]:
        """The share of a step, from the operator's whole input."""
        eqn = self.operator.eqn
        weight = _joined([operands[1][rows] for rows in self.left], 0)
        params = {**eqn.params, "has_bias": False}
        return lambda x: eqn.primitive.bind(_joined([x[..., place] for place in self.left], -1), weight, **params)


def split_products(schedule: Schedule, known: Collection[Var], steps: int) -> dict[int, SplitProduct]:
    """The operators that are better split, by index, where ``known`` variables need no state.

    Not so on several devices: the weight's rows may be divided among them. Nor in short types, where a sum of two
    results is not as good as one.
    """
    if steps == 1 or not on_one_device():
        return {}
    makers = {v: eqn for eqn in schedule.recurrence.eqns for v in eqn.outvars}
    found = {}
    for i, operator in enumerate(schedule.operators):
        joining = makers.get(operator.x)
        if operator.y in makers and joining is not None and _can_be_split(operator, joining):
            start, places = 0, []
            for piece in joining.invars:
                places.append((piece, slice(start, start + piece.aval.shape[-1])))
                start = places[-1][1].stop
            ahead = [(v, place) for v, place in places if isinstance(v, Var) and v in known]
            left = [place for v, place in places if not (isinstance(v, Var) and v in known)]
            if ahead and left:
                found[i] = SplitProduct(operator, tuple(v for v, _ in ahead), tuple(s for _, s in ahead), tuple(left))
    return found


def _can_be_split(operator: Operator, joining: JaxprEqn) -> bool:
    """Whether the operator is a product with parameters over the axis along which its input was joined."""
    eqn = operator.eqn
    return (
        joining.primitive is lax.concatenate_p
        and joining.params["dimension"] == operator.x.aval.ndim - 1
        and eqn.primitive in (etp_mv_p, etp_mm_p)
        and len(operator.operands) == len(eqn.invars) - 1
        and operator.y.aval.dtype.itemsize >= 4
    )


def _joined(pieces: Sequence[Any], axis: int) -> Any:
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis)
