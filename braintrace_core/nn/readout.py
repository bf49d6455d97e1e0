"""The leaky readout of spiking networks."""

from __future__ import annotations

import brainstate
import numpy as np
from jax import Array
from jax.nn import initializers
from jax.typing import ArrayLike, DTypeLike

from ..ops import matmul
from .module import Cell, Initializer, Size, constant, expand, initial, matrix_shape, split_key

__all__ = ["LeakyRateReadout"]

_HE = initializers.he_normal()


class LeakyRateReadout(Cell):
    """A leaky sum of what a layer says, as in e-prop (Bellec et al. 2020)::

        r' = exp(-dt / tau) * r + x @ W

    ``x`` has shape ``(in,)`` or ``(batch, in)``, the output ``r'`` ``(out,)`` or ``(batch, out)``. The ParamState
    ``W`` is the ``(in, out)`` array.

    Main arguments:
      in_size, out_size: ``in`` and ``out``.
      tau, dt: time constant (a number, or one for each output) and time step, in the same unit.
      key: a JAX key for the first values; ``None`` stands for ``jax.random.key(0)``.

    Further arguments:
      w_init: a function of ``(key, shape, dtype)`` or an array.
      dtype: of parameters and states; ``None`` is JAX's default float.

    >>> import jax.numpy as jnp
    >>> readout = LeakyRateReadout(3, 1, w_init=jnp.ones((3, 1)))
    >>> readout.init_state()
    >>> readout(jnp.ones(3)).tolist()
    [3.0]
    """

    state_names = ("r",)

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        *,
        tau: ArrayLike = 5.0,
        dt: float = 1.0,
        w_init: Initializer = _HE,
        dtype: DTypeLike | None = None,
        key: Array | None = None,
    ) -> None:
        super().__init__(in_size, out_size, dtype)
        self.decay = np.exp(-constant(self, "dt", dt, positive=True) / constant(self, "tau", tau, positive=True))
        self.W = brainstate.ParamState(initial("w_init", w_init, split_key(key, 1)[0], matrix_shape(self), self.dtype))

    def update(self, x: ArrayLike) -> Array:
        """One step: ``x`` in, the new ``r`` out."""
        x = self.check_input(x)
        self.r.value = expand(self.decay, self.r.value) * self.r.value + matmul(x, self.W.value)
        return self.r.value
