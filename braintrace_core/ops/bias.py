"""A bias, where an operator takes one: its check on the way in, its sum on the way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax import Array, lax
from jax.typing import ArrayLike

from .hooks import prepare

__all__ = ["add_bias", "bias_operands"]


def bias_operands(
    operator: str, bias: ArrayLike | None, function: Callable[[Array], Array] | None, shape: tuple[int, ...]
) -> list[Array]:
    """The operator's last operand if it has a bias, which must then have ``shape``; nothing otherwise."""
    if bias is None:
        return []
    value = prepare(bias, function)
    if value.shape != shape:
        raise ValueError(f"{operator} needs bias of shape {shape}, got {value.shape}.")
    return [value]


def add_bias(y: Array, bias: Array | None, axes: Sequence[int]) -> Array:
    """``y + bias``, where the axes of ``bias`` are the ``axes`` of ``y``."""
    return y if bias is None else y + lax.broadcast_in_dim(bias, y.shape, axes)
