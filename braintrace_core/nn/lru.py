"""The linear recurrent unit: a diagonal complex recurrence."""

from __future__ import annotations

import brainstate
import jax
import jax.numpy as jnp
from jax import Array
from jax.nn import initializers
from jax.typing import ArrayLike, DTypeLike

from ..ops import element_wise
from .linear import Linear
from .module import Cell, axis_sizes, split_key

__all__ = ["LRUCell"]


class LRUCell(Cell):
    """The linear recurrent unit (Orvieto et al. 2023)::

        lambda = exp(-exp(nu_log) + i exp(theta_log))
        h' = lambda * h + exp(gamma_log) * (B x)
        y = Re(C h') + D * x

    ``x`` and the output ``y`` have shape ``(d_model,)`` or ``(batch, d_model)``. The complex ``h`` is kept as two real
    states ``h_re`` and ``h_im`` of size ``d_hidden``, ``B`` and ``C`` as real and imaginary :class:`Linear` layers
    without bias (``B_re``, ``B_im``, ``C_re``, ``C_im``). ``nu_log``, ``theta_log``, ``gamma_log`` have shape
    ``(d_hidden,)``, ``D`` ``(d_model,)``.

    Main arguments:
      d_model, d_hidden: sizes of input and output, and of the state.
      key: a JAX key for the first values; ``None`` stands for ``jax.random.key(0)``.

    Further arguments:
      r_min, r_max: ``lambda`` starts uniform in the ring of these radii.
      max_phase: ... and with a phase between 0 and this.
      dtype: of parameters and states; ``None`` is JAX's default float.

    >>> cell = LRUCell(3, 4)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 3)
    """

    state_names = ("h_re", "h_im")

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        *,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 6.28,
        dtype: DTypeLike | None = None,
        key: Array | None = None,
    ) -> None:
        super().__init__(d_model, d_model, dtype)
        if not 0 <= r_min < r_max <= 1:
            raise ValueError(f"LRUCell needs 0 <= r_min < r_max <= 1, got r_min={r_min} and r_max={r_max}.")
        if not max_phase > 0:
            raise ValueError(f"LRUCell needs a positive max_phase, got {max_phase}.")
        self.d_hidden = axis_sizes(self, "d_hidden", d_hidden)[0]
        radius_key, phase_key, b_re, b_im, c_re, c_im, d_key = split_key(key, 7)
        # The ends are left out: at radius 0 or 1 and at phase 0 the logarithms would be infinite.
        tiny = float(jnp.finfo(self.dtype).eps)
        square = jax.random.uniform(radius_key, (d_hidden,), self.dtype, tiny, 1 - tiny)
        square = square * (r_max**2 - r_min**2) + r_min**2
        phase = max_phase * jax.random.uniform(phase_key, (d_hidden,), self.dtype, tiny, 1)
        self.nu_log = brainstate.ParamState(jnp.log(-0.5 * jnp.log(square)))
        self.theta_log = brainstate.ParamState(jnp.log(phase))
        self.gamma_log = brainstate.ParamState(0.5 * jnp.log1p(-square))
        into = initializers.normal((2 * d_model) ** -0.5)
        out_of = initializers.normal(d_hidden**-0.5)
        self.B_re = Linear(d_model, d_hidden, w_init=into, b_init=None, dtype=self.dtype, key=b_re)
        self.B_im = Linear(d_model, d_hidden, w_init=into, b_init=None, dtype=self.dtype, key=b_im)
        self.C_re = Linear(d_hidden, d_model, w_init=out_of, b_init=None, dtype=self.dtype, key=c_re)
        self.C_im = Linear(d_hidden, d_model, w_init=out_of, b_init=None, dtype=self.dtype, key=c_im)
        self.D = brainstate.ParamState(jax.random.normal(d_key, (d_model,), self.dtype))

    @property
    def state_size(self) -> tuple[int, ...]:
        """Shape of ``h_re`` and of ``h_im``, batch aside."""
        return (self.d_hidden,)

    def update(self, x: ArrayLike) -> Array:
        """One step: ``x`` in, ``y`` out."""
        x, h_re, h_im = self.check_input(x), self.h_re.value, self.h_im.value
        radius = jnp.exp(-jnp.exp(element_wise(jnp.broadcast_to(self.nu_log.value, h_re.shape))))
        phase = jnp.exp(element_wise(jnp.broadcast_to(self.theta_log.value, h_re.shape)))
        gamma = jnp.exp(element_wise(jnp.broadcast_to(self.gamma_log.value, h_re.shape)))
        a, b = radius * jnp.cos(phase), radius * jnp.sin(phase)
        self.h_re.value = a * h_re - b * h_im + gamma * self.B_re(x)
        self.h_im.value = b * h_re + a * h_im + gamma * self.B_im(x)
        y = self.C_re(self.h_re.value) - self.C_im(self.h_im.value)
        return y + element_wise(jnp.broadcast_to(self.D.value, x.shape)) * x
