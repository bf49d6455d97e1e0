"""The generalised integrate-and-fire neuron. Plain numbers; times are in the unit of ``dt``."""

from __future__ import annotations

from functools import partial
from typing import Unpack

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .module import Size, constant, expand
from .neurons import LIF, Current, Membrane

__all__ = ["GIF"]


class GIF(LIF):
    """The generalised integrate-and-fire neuron (Mihalas and Niebur 2009): a moving threshold, two inner currents.

    Between spikes, with ``theta`` the threshold::

        dI1/dt = -k1 I1,   dI2/dt = -k2 I2,   dtheta/dt = a (V - V_rest) - b (theta - V_th)
        tau dV/dt = -(V - V_rest) + R (I1 + I2 + current)

    and at a spike, ``V >= theta``::

        V -> V_reset,   I1 -> R1 I1 + A1,   I2 -> R2 I2 + A2,   theta -> max(theta, theta_reset)

    A step does the jumps, then solves each equation exactly with the others held (exponential Euler): ``I1`` and
    ``I2`` first, ``theta`` with ``V`` as reset, ``V`` with the new currents. Shapes and other arguments as for
    :class:`LIF`; ``V_th`` is where ``theta`` starts and rests, ``a``, ``b``, ``k1``, ``k2`` are rates.

    >>> neuron = GIF(1, tau=5.0, A2=-1.0)
    >>> neuron.init_state()
    >>> [float(neuron(current=6.0)[0]) for _ in range(5)]
    [1.0, 0.0, 1.0, 0.0, 1.0]
    """

    state_names = ("V", "theta", "I1", "I2")

    def __init__(
        self,
        size: Size,
        *,
        theta_reset: ArrayLike = 1.0,
        a: ArrayLike = 0.005,
        b: ArrayLike = 0.01,
        k1: ArrayLike = 0.2,
        k2: ArrayLike = 0.02,
        R1: ArrayLike = 0.0,
        R2: ArrayLike = 1.0,
        A1: ArrayLike = 0.0,
        A2: ArrayLike = -0.1,
        dt: float = 1.0,
        reset: str = "hard",
        **membrane: Unpack[Membrane],
    ) -> None:
        super().__init__(size, dt=dt, reset=reset, **membrane)
        self.theta_reset = constant(self, "theta_reset", theta_reset)
        self.a = constant(self, "a", a)
        self.b = constant(self, "b", b, positive=True)
        self.R1, self.A1 = constant(self, "R1", R1), constant(self, "A1", A1)
        self.R2, self.A2 = constant(self, "R2", R2), constant(self, "A2", A2)
        self.decay_theta = np.exp(-dt * self.b)
        self.decay_1 = np.exp(-dt * constant(self, "k1", k1, positive=True))
        self.decay_2 = np.exp(-dt * constant(self, "k2", k2, positive=True))

    def first_value(self, name: str, shape: tuple[int, ...]) -> Array:
        """``V`` and ``theta`` start at rest, the currents at zero."""
        value = super().first_value(name, shape)
        return value + expand(self.V_th, value) if name == "theta" else value

    def update(self, current: Current = 0.0, delta: ArrayLike | None = None) -> Array:
        """One step: current and jump of the membrane in, spikes out."""
        V, theta, I1, I2 = values = self.read()
        z = self._spikes(*values)
        V = self._reset(V, z)
        at = partial(expand, like=V)
        I1 = at(self.decay_1) * (I1 + z * (at(self.R1) * I1 + at(self.A1) - I1))
        I2 = at(self.decay_2) * (I2 + z * (at(self.R2) * I2 + at(self.A2) - I2))
        theta = theta + z * jax.nn.relu(at(self.theta_reset) - theta)
        rest = at(self.V_th) + at(self.a / self.b) * (V - at(self.V_rest))
        theta = rest + at(self.decay_theta) * (theta - rest)
        inner = I1 + I2
        total = (lambda V: inner + current(V)) if callable(current) else inner + self._input(current)
        V = self._membrane(V, total, delta)
        self.write(V, theta, I1, I2)
        return self._spikes(V, theta)

    def _threshold(self, *values: Array) -> Array:
        return values[1]
