"""Cells with as little as works: MinimalRNN, minGRU, minLSTM."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array
from jax.nn import initializers, sigmoid
from jax.typing import ArrayLike, DTypeLike

from .linear import Linear
from .module import Cell, Initializer, Size, matrix_shape, split_key

__all__ = ["MiniGRU", "MiniLSTM", "MinimalRNNCell"]

_ORTHOGONAL = initializers.orthogonal()


class MinimalRNNCell(Cell):
    """The MinimalRNN (Chen 2017)::

        z = activation(phi x)
        u = sigmoid(W_u [z, h])
        h' = u * h + (1 - u) * z

    ``x`` has shape ``(in,)`` or ``(batch, in)``, the output ``h'`` ``(out,)`` or ``(batch, out)``. ``phi`` (from
    ``in`` to ``out``) and ``W_u`` (from ``2 out`` to ``out``) are :class:`Linear` layers with bias.

    Main arguments:
      in_size, out_size: ``in`` and ``out``.
      key: a JAX key for the first values; ``None`` stands for ``jax.random.key(0)``.

    Further arguments:
      activation: a function of an array, ``tanh`` in the paper.
      w_init, b_init: functions of ``(key, shape, dtype)`` or arrays.
      dtype: of parameters and states; ``None`` is JAX's default float.

    >>> cell = MinimalRNNCell(3, 4)
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
        phi_key, u_key = split_key(key, 2)
        dense = partial(Linear, w_init=w_init, b_init=b_init, dtype=self.dtype)
        self.phi = dense(size_in, size, key=phi_key)
        self.W_u = dense(2 * size, size, key=u_key)
        self.activation = activation

    def update(self, x: ArrayLike) -> Array:
        """One step: ``x`` in, the new ``h`` out."""
        z = self.activation(self.phi(self.check_input(x)))
        u = sigmoid(self.W_u(jnp.concatenate([z, self.h.value], -1)))
        self.h.value = u * self.h.value + (1 - u) * z
        return self.h.value


class MiniGRU(Cell):
    """The minGRU (Feng et al. 2024), whose gate does not look at the state::

        z = sigmoid(W_z x)
        h' = (1 - z) * h + z * W_x x

    ``x`` has shape ``(in,)`` or ``(batch, in)``, the output ``h'`` ``(out,)`` or ``(batch, out)``. ``W_x`` and
    ``W_z`` are :class:`Linear` layers with bias.

    Main arguments:
      in_size, out_size: ``in`` and ``out``.
      key: a JAX key for the first values; ``None`` stands for ``jax.random.key(0)``.

    Further arguments:
      recurrent_gates: ``True`` for ``W_z [x, h]`` instead of ``W_z x``; the cell is then no longer minimal, and its
        recurrence no longer unit by unit.
      w_init, b_init: functions of ``(key, shape, dtype)`` or arrays.
      dtype: of parameters and states; ``None`` is JAX's default float.

    >>> cell = MiniGRU(3, 4)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        *,
        recurrent_gates: bool = False,
        w_init: Initializer = _ORTHOGONAL,
        b_init: Initializer = initializers.zeros,
        dtype: DTypeLike | None = None,
        key: Array | None = None,
    ) -> None:
        super().__init__(in_size, out_size, dtype)
        size_in, size = matrix_shape(self)
        gate_in = size_in + size if recurrent_gates else size_in
        x_key, z_key = split_key(key, 2)
        dense = partial(Linear, w_init=w_init, b_init=b_init, dtype=self.dtype)
        self.W_x = dense(size_in, size, key=x_key)
        self.W_z = dense(gate_in, size, key=z_key)
        self.recurrent_gates = recurrent_gates

    def update(self, x: ArrayLike) -> Array:
        """One step: ``x`` in, the new ``h`` out."""
        x, h = self.check_input(x), self.h.value
        seen = jnp.concatenate([x, h], -1) if self.recurrent_gates else x
        z = sigmoid(self.W_z(seen))
        self.h.value = (1 - z) * h + z * self.W_x(x)
        return self.h.value


class MiniLSTM(Cell):
    """The minLSTM (Feng et al. 2024), whose gates do not look at the state::

        f = sigmoid(W_f x)
        i = sigmoid(W_i x)
        h' = f * h + i * W_x x

    Shapes and arguments as for :class:`MiniGRU`. The gates are not normalised to ``f + i = 1``.

    >>> cell = MiniLSTM(3, 4)
    >>> cell.init_state()
    >>> cell(jnp.ones(3)).shape
    (4,)
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        *,
        recurrent_gates: bool = False,
        w_init: Initializer = _ORTHOGONAL,
        b_init: Initializer = initializers.zeros,
        dtype: DTypeLike | None = None,
        key: Array | None = None,
    ) -> None:
        super().__init__(in_size, out_size, dtype)
        size_in, size = matrix_shape(self)
        gate_in = size_in + size if recurrent_gates else size_in
        x_key, f_key, i_key = split_key(key, 3)
        dense = partial(Linear, w_init=w_init, b_init=b_init, dtype=self.dtype)
        self.W_x = dense(size_in, size, key=x_key)
        self.W_f = dense(gate_in, size, key=f_key)
        self.W_i = dense(gate_in, size, key=i_key)
        self.recurrent_gates = recurrent_gates

    def update(self, x: ArrayLike) -> Array:
        """One step: ``x`` in, the new ``h`` out."""
        x, h = self.check_input(x), self.h.value
        seen = jnp.concatenate([x, h], -1) if self.recurrent_gates else x
        f = sigmoid(self.W_f(seen))
        i = sigmoid(self.W_i(seen))
        self.h.value = f * h + i * self.W_x(x)
        return self.h.value
