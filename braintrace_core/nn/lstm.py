"""Cells with a memory ``c`` beside the output ``h``: LSTM, URLSTM."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import brainstate
import jax
import jax.numpy as jnp
from jax import Array
from jax.nn import initializers, sigmoid
from jax.typing import ArrayLike, DTypeLike

from ..ops import element_wise
from .linear import Linear
from .module import Cell, Initializer, Size, matrix_shape, split_key

__all__ = ["LSTMCell", "URLSTMCell"]

_GLOROT = initializers.glorot_normal()


class LSTMCell(Cell):
    """Long short-term memory (Hochreiter and Schmidhuber 1997; in the form of Zaremba et al. 2014)::

        i = sigmoid(Wi [x, h])
        f = sigmoid(Wf [x, h] + 1)
        g = activation(Wg [x, h])
        o = sigmoid(Wo [x, h])
        c' = f * c + i * g
        h' = o * activation(c')

    The 1 keeps the memory open at the start of training (Jozefowicz et al. 2015). ``x`` has shape ``(in,)`` or
    ``(batch, in)``, the output ``h'`` ``(out,)`` or ``(batch, out)``. ``Wi``, ``Wg``, ``Wf``, ``Wo`` are
    :class:`Linear` layers with bias, from ``in + out`` to ``out``.

    Main arguments:
      in_size, out_size: ``in`` and ``out``.
      key: a JAX key for the first values; ``None`` stands for ``jax.random.key(0)``.

    Further arguments:
      activation: a function of an array.
      w_init, b_init: functions of ``(key, shape, dtype)`` or arrays.
      dtype: of parameters and states; ``None`` is JAX's default float.

    >>> cell = LSTMCell(3, 4)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 4)
    """

    state_names = ("c", "h")

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        *,
        activation: Callable[[Array], Array] = jnp.tanh,
        w_init: Initializer = _GLOROT,
        b_init: Initializer = initializers.zeros,
        dtype: DTypeLike | None = None,
        key: Array | None = None,
    ) -> None:
        super().__init__(in_size, out_size, dtype)
        size_in, size = matrix_shape(self)
        dense = partial(Linear, size_in + size, size, w_init=w_init, b_init=b_init, dtype=self.dtype)
        self.Wi, self.Wg, self.Wf, self.Wo = (dense(key=each) for each in split_key(key, 4))
        self.activation = activation

    def update(self, x: ArrayLike) -> Array:
        """One step: ``x`` in, the new ``h`` out."""
        both = jnp.concatenate([self.check_input(x), self.h.value], -1)
        i = sigmoid(self.Wi(both))
        g = self.activation(self.Wg(both))
        f = sigmoid(self.Wf(both) + 1)
        o = sigmoid(self.Wo(both))
        self.c.value = f * self.c.value + i * g
        self.h.value = o * self.activation(self.c.value)
        return self.h.value


class URLSTMCell(Cell):
    """The LSTM with uniform gate initialisation and a refine gate (Gu et al. 2020)::

        f = sigmoid(Wf [x, h] + bias)
        r = sigmoid(Wr [x, h] - bias)
        g = 2 * r * f + (1 - 2 * r) * f**2
        c' = g * c + (1 - g) * activation(Wu [x, h])
        h' = sigmoid(Wo [x, h]) * activation(c')

    Shapes and arguments as for :class:`LSTMCell`. ``Wf``, ``Wr``, ``Wu``, ``Wo`` have no bias of their own; ``bias``,
    of shape ``(out,)``, starts at ``log(u / (1 - u))`` with ``u`` uniform in ``(1 / out, 1 - 1 / out)``, so that
    the time scales of the units are spread out.

    >>> cell = URLSTMCell(3, 4)
    >>> cell.init_state()
    >>> cell(jnp.ones(3)).shape
    (4,)
    """

    state_names = ("c", "h")

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        *,
        activation: Callable[[Array], Array] = jnp.tanh,
        w_init: Initializer = _GLOROT,
        dtype: DTypeLike | None = None,
        key: Array | None = None,
    ) -> None:
        super().__init__(in_size, out_size, dtype)
        size_in, size = matrix_shape(self)
        *w_keys, b_key = split_key(key, 5)
        dense = partial(Linear, size_in + size, size, w_init=w_init, b_init=None, dtype=self.dtype)
        self.Wf, self.Wr, self.Wu, self.Wo = (dense(key=each) for each in w_keys)
        # One or two units leave no room between 1 / out and 1 - 1 / out: they start at u = 1 / 2.
        low = min(1 / size, 0.5)
        u = jax.random.uniform(b_key, (size,), self.dtype, low, 1 - low)
        self.bias = brainstate.ParamState(jnp.log(u) - jnp.log1p(-u))
        self.activation = activation

    def update(self, x: ArrayLike) -> Array:
        """One step: ``x`` in, the new ``h`` out."""
        both = jnp.concatenate([self.check_input(x), self.h.value], -1)
        bias = element_wise(jnp.broadcast_to(self.bias.value, self.c.value.shape))
        f = sigmoid(self.Wf(both) + bias)
        r = sigmoid(self.Wr(both) - bias)
        g = 2 * r * f + (1 - 2 * r) * f * f
        self.c.value = g * self.c.value + (1 - g) * self.activation(self.Wu(both))
        self.h.value = sigmoid(self.Wo(both)) * self.activation(self.c.value)
        return self.h.value
