"""What may stand between a parameter and its operator: a function of the parameter, then a mask."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

__all__ = ["prepare"]


def prepare(
    parameter: ArrayLike, function: Callable[[Array], Array] | None = None, mask: ArrayLike | None = None
) -> Array:
    """``function(parameter) * mask``; the compiler keeps both as the parameter's processing chain."""
    value = jnp.asarray(parameter)
    if function is not None:
        value = function(value)
    if mask is not None:
        value = value * jnp.asarray(mask, value.dtype)
    return value
