"""Gated cells with one state: GRU, MGU, CFN."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array
from jax.nn import initializers, sigmoid
from jax.typing import ArrayLike, DTypeLike

from .linear import Linear
from .module import Cell, Initializer, Size, matrix_shape, split_key

__all__ = ["CFNCell", "GRUCell", "MGUCell"]

_ORTHOGONAL = initializers.orthogonal()


class GRUCell(Cell):
    """The gated recurrent unit (Cho et al. 2014, with the update gate of Chung et al. 2014)::

        z = sigmoid(Wz [x, h])
        r = sigmoid(Wr [x, h])
        h' = (1 - z) * h + z * activation(Wh [x, r * h])

    ``x`` has shape ``(in,)`` or ``(batch, in)``, the output ``h'`` ``(out,)`` or ``(batch, out)``. ``Wz``, ``Wr``,
    ``Wh`` are :class:`Linear` layers with bias, from ``in + out`` to ``out``.

    Main arguments:
      in_size, out_size: ``in`` and ``out``.
      key: a JAX key for the first values; ``None`` stands for ``jax.random.key(0)``.

    Further arguments:
      activation: a function of an array.
      w_init, b_init: functions of ``(key, shape, dtype)`` or arrays.
      dtype: of parameters and states; ``None`` is JAX's default float.

    >>> cell = GRUCell(3, 4)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        *,
        activation: Callable[[Array], Array] = jnp.tanh,
        w_init: Initializer = _ORTHOGONAL,
        b_init: Initializer = initializers.zeros,
        dtype: DTypeLike | None = None,
        key: Array | None = None,
    ) -> None:
        super().__init__(in_size, out_size, dtype)
        size_in, size = matrix_shape(self)
        dense = partial(Linear, size_in + size, size, w_init=w_init, b_init=b_init, dtype=self.dtype)
        self.Wz, self.Wr, self.Wh = (dense(key=each) for each in split_key(key, 3))
        self.activation = activation

    def update(self, x: ArrayLike) -> Array:
        """One step: ``x`` in, the new ``h`` out."""
        x, h = self.check_input(x), self.h.value
        both = jnp.concatenate([x, h], -1)
        z = sigmoid(self.Wz(both))
        r = sigmoid(self.Wr(both))
        candidate = self.activation(self.Wh(jnp.concatenate([x, r * h], -1)))
        self.h.value = (1 - z) * h + z * candidate
        return self.h.value


class MGUCell(Cell):
    """The minimal gated unit (Zhou et al. 2016), a GRU whose two gates are one::

        f = sigmoid(Wf [x, h])
        h' = (1 - f) * h + f * activation(Wh [x, f * h])

    Shapes and arguments as for :class:`GRUCell`.

    >>> cell = MGUCell(3, 4)
    >>> cell.init_state()
    >>> cell(jnp.ones(3)).shape
    (4,)
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        *,
        activation: Callable[[Array], Array] = jnp.tanh,
        w_init: Initializer = _ORTHOGONAL,
        b_init: Initializer = initializers.zeros,
        dtype: DTypeLike | None = None,
        key: Array | None = None,
    ) -> None:
        super().__init__(in_size, out_size, dtype)
        size_in, size = matrix_shape(self)
        dense = partial(Linear, size_in + size, size, w_init=w_init, b_init=b_init, dtype=self.dtype)
        self.Wf, self.Wh = (dense(key=each) for each in split_key(key, 2))
        self.activation = activation

    def update(self, x: ArrayLike) -> Array:
        """One step: ``x`` in, the new ``h`` out."""
        x, h = self.check_input(x), self.h.value
        f = sigmoid(self.Wf(jnp.concatenate([x, h], -1)))
        candidate = self.activation(self.Wh(jnp.concatenate([x, f * h], -1)))
        self.h.value = (1 - f) * h + f * candidate
        return self.h.value


class CFNCell(Cell):
    """The chaos-free network (Laurent and von Brecht 2017); without input its state goes to zero::

        f = sigmoid(Wf [x, h])
        i = sigmoid(Wi [x, h])
        h' = f * activation(h) + i * activation(Wh x)

    Shapes and arguments as for :class:`GRUCell`; ``Wh`` goes from ``in`` to ``out``. All three have a bias; the
    paper's ``Wh`` has none, which is ``b = 0`` here.

    >>> cell = CFNCell(3, 4)
    >>> cell.init_state()
    >>> cell(jnp.ones(3)).shape
    (4,)
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        *,
        activation: Callable[[Array], Array] = jnp.tanh,
        w_init: Initializer = _ORTHOGONAL,
        b_init: Initializer = initializers.zeros,
        dtype: DTypeLike | None = None,
        key: Array | None = None,
    ) -> None:
        super().__init__(in_size, out_size, dtype)
        size_in, size = matrix_shape(self)
        f_key, i_key, h_key = split_key(key, 3)
        dense = partial(Linear, w_init=w_init, b_init=b_init, dtype=self.dtype)
        self.Wf = dense(size_in + size, size, key=f_key)
        self.Wi = dense(size_in + size, size, key=i_key)
        self.Wh = dense(size_in, size, key=h_key)
        self.activation = activation

    def update(self, x: ArrayLike) -> Array:
        """One step: ``x`` in, the new ``h`` out."""
        x, h = self.check_input(x), self.h.value
        both = jnp.concatenate([x, h], -1)
        f = sigmoid(self.Wf(both))
        i = sigmoid(self.Wi(both))
        self.h.value = f * self.activation(h) + i * self.activation(self.Wh(x))
        return self.h.value
