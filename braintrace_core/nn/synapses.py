"""Synapses: how spikes become conductance, and conductance becomes current. Plain numbers; times in units of ``dt``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from .module import Cell, Size, constant, expand

__all__ = ["COBA", "CUBA", "DualExpon", "Expon"]


class Expon(Cell):
    """The exponential synapse: each input jumps the conductance, which then decays (Destexhe et al. 1994)::

        g' = exp(-dt / tau) g + x

    ``x`` and the output ``g'`` have shape ``(*size)`` or ``(batch, *size)``. ``tau`` is a number, or one for each
    unit; ``dtype=None`` is JAX's default float.

    >>> synapse = Expon(1, tau=2.0)
    >>> synapse.init_state()
    >>> [round(float(synapse(np.array([x]))[0]), 3) for x in (1.0, 0.0, 0.0)]
    [1.0, 0.607, 0.368]
    """

    state_names = ("g",)

    def __init__(self, size: Size, *, tau: ArrayLike = 8.0, dt: float = 1.0, dtype: DTypeLike | None = None) -> None:
        super().__init__(size, size, dtype)
        self.decay = np.exp(-constant(self, "dt", dt, positive=True) / constant(self, "tau", tau, positive=True))

    def update(self, x: ArrayLike) -> Array:
        """One step: ``x`` in, the conductance out."""
        x, g = self.check_input(x), self.g.value
        self.g.value = expand(self.decay, g) * g + x
        return self.g.value


class DualExpon(Cell):
    """The double-exponential synapse, which rises before it decays (Destexhe et al. 1994)::

        g_rise' = exp(-dt / tau_rise) g_rise + x
        g_decay' = exp(-dt / tau_decay) g_decay + x
        g = A (g_decay' - g_rise')

    ``A`` makes the response to a single 1 peak at 1: ``A = q^(-p) / (1 - q)`` with ``q = tau_rise / tau_decay``
    and ``p = tau_rise / (tau_decay - tau_rise)``. Shapes and arguments as for :class:`Expon`; ``g`` is the output.

    >>> synapse = DualExpon(1, tau_decay=10.0, tau_rise=1.0)
    >>> synapse.init_state()
    >>> [round(float(synapse(np.array([x]))[0]), 3) for x in (1.0, 0.0, 0.0, 0.0)]
    [0.0, 0.771, 0.981, 0.992]
    """

    state_names = ("g_rise", "g_decay")

    def __init__(
        self,
        size: Size,
        *,
        tau_decay: ArrayLike = 10.0,
        tau_rise: ArrayLike = 1.0,
        dt: float = 1.0,
        dtype: DTypeLike | None = None,
    ) -> None:
        super().__init__(size, size, dtype)
        step = constant(self, "dt", dt, positive=True)
        slow = constant(self, "tau_decay", tau_decay, positive=True)
        fast = constant(self, "tau_rise", tau_rise, positive=True)
        if np.any(fast >= slow):
            raise ValueError(f"DualExpon needs tau_rise below tau_decay, got {tau_rise} and {tau_decay}.")
        self.decay_rise, self.decay_decay = np.exp(-step / fast), np.exp(-step / slow)
        q = fast / slow
        self.scale = q ** (-q / (1 - q)) / (1 - q)

    def update(self, x: ArrayLike) -> Array:
        """One step: ``x`` in, the conductance out."""
        x, rise, decay = self.check_input(x), self.g_rise.value, self.g_decay.value
        self.g_rise.value = expand(self.decay_rise, rise) * rise + x
        self.g_decay.value = expand(self.decay_decay, decay) * decay + x
        return expand(self.scale, x) * (self.g_decay.value - self.g_rise.value)


@dataclass(frozen=True)
class CUBA:
    """A current that does not depend on the membrane: ``scale * conductance`` (Brette et al. 2007).

    >>> CUBA(scale=2.0)(3.0)
    6.0
    """

    scale: float = 1.0

    def __call__(self, conductance: Array, potential: Array | None = None) -> Array:
        """The current for a conductance; the membrane potential plays no part."""
        del potential
        return self.scale * conductance


@dataclass(frozen=True)
class COBA:
    """A current that pulls the membrane to ``E``: ``conductance * (E - potential)`` (Brette et al. 2007).

    >>> COBA(E=2.0)(3.0, potential=0.5)
    4.5
    """

    E: float

    def __call__(self, conductance: Array, potential: Array) -> Array:
        """The current for a conductance and a membrane potential, arrays of one shape."""
        return conductance * (self.E - potential)
