"""A table of vectors, looked up by integer."""

from __future__ import annotations

import brainstate
from jax import Array
from jax.nn import initializers
from jax.typing import ArrayLike, DTypeLike

from .. import ops
from .module import Initializer, Layer, Size, initial, split_key

__all__ = ["Embedding"]

_NORMAL = initializers.normal(1.0)


class Embedding(Layer):
    """``y = weight[indices]``: integers of shape ``(...)`` become vectors of shape ``(..., *size)``.

    The ParamState ``weight`` is the table, of shape ``(rows, *size)``.

    Main arguments:
      rows: how many different indices there are.
      size: of each vector.
      key: a JAX key for the first values; ``None`` stands for ``jax.random.key(0)``.

    Further arguments:
      w_init: a function of ``(key, shape, dtype)`` or an array.
      dtype: of the table and the result; ``None`` is JAX's default float.

    >>> import jax.numpy as jnp
    >>> Embedding(10, 4)(jnp.array([1, 3, 3])).shape
    (3, 4)
    """

    def __init__(
        self,
        rows: int,
        size: Size,
        *,
        w_init: Initializer = _NORMAL,
        dtype: DTypeLike | None = None,
        key: Array | None = None,
    ) -> None:
        super().__init__(rows, size, dtype)
        shape = (*self.in_size, *self.out_size)
        self.weight = brainstate.ParamState(initial("w_init", w_init, split_key(key, 1)[0], shape, self.dtype))

    def update(self, indices: ArrayLike) -> Array:
        """The vectors at ``indices``."""
        return ops.embedding(indices, self.weight.value)
