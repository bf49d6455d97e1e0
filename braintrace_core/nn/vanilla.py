"""The plain recurrent network."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn import initializers
from jax.typing import ArrayLike, DTypeLike

from .linear import Linear
from .module import Cell, Initializer, Size, matrix_shape

__all__ = ["ValinaRNNCell"]

_GLOROT = initializers.glorot_normal()


class ValinaRNNCell(Cell):
    """The recurrent network of Elman (1990)::

        h' = activation(W [x, h] + b)

    ``x`` has shape ``(in,)`` or ``(batch, in)``, the output ``h'`` ``(out,)`` or ``(batch, out)``. ``W`` is a
    :class:`Linear` from the concatenation of ``x`` and ``h``.

    Main arguments:
      in_size, out_size: ``in`` and ``out``.
      activation: a function of an array.
      key: a JAX key for the first values; ``None`` stands for ``jax.random.key(0)``.

    Further arguments:
      w_init, b_init: functions of ``(key, shape, dtype)`` or arrays.
      dtype: of parameters and states; ``None`` is JAX's default float.

    >>> cell = ValinaRNNCell(3, 4)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        *,
        activation: Callable[[Array], Array] = jax.nn.relu,
        w_init: Initializer = _GLOROT,
        b_init: Initializer = initializers.zeros,
        dtype: DTypeLike | None = None,
        key: Array | None = None,
    ) -> None:
        super().__init__(in_size, out_size, dtype)
        size_in, size = matrix_shape(self)
        self.W = Linear(size_in + size, size, w_init=w_init, b_init=b_init, dtype=self.dtype, key=key)
        self.activation = activation

    def update(self, x: ArrayLike) -> Array:
        """One step: ``x`` in, the new ``h`` out."""
        x = self.check_input(x)
        self.h.value = self.activation(self.W(jnp.concatenate([x, self.h.value], -1)))
        return self.h.value
