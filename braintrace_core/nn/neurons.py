"""Integrate-and-fire neurons: LIF, ALIF, GIF. Plain numbers; times are in the unit of ``dt``.

A neuron keeps its membrane potential as it stood before the reset: whether it spikes is a function of its state, and
the reset is the first thing that happens in the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, TypedDict, Unpack

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from .module import Cell, Size, constant, expand
from .surrogate import Surrogate, Triangular

__all__ = ["ALIF", "GIF", "LIF", "GroupALIF"]

Current = ArrayLike | Callable[[Array], Array]

_TRIANGULAR = Triangular()


class Membrane(TypedDict, total=False):
    """Arguments of :class:`LIF` that the other neurons hand on to it."""

    tau: ArrayLike
    R: ArrayLike
    V_th: ArrayLike
    V_reset: ArrayLike
    V_rest: ArrayLike
    surrogate: Surrogate
    dtype: DTypeLike | None


class LIF(Cell):
    """The leaky integrate-and-fire neuron (Gerstner et al. 2014, chapter 1)::

        tau dV/dt = -(V - V_rest) + R I,   a spike where V reaches V_th,   then V goes down by V_th - V_reset

    solved exactly over a step of constant current. With ``z = (V >= V_th)`` and ``A = exp(-dt / tau)``::

        V' = A (V - (V_th - V_reset) z) + (1 - A) (V_rest + R current) + delta

    ``current``, ``delta`` (a jump of the potential, what delta synapses give) and the spikes that a step returns have
    the shape of ``V``, ``(*size)`` or ``(batch, *size)``. ``current`` may be a number, or a function of the potential
    after the reset, called once in each step.

    Main arguments:
      size: number of neurons, or the shape of a sheet of them.
      tau, R, V_th, V_reset, V_rest: numbers, or one for each neuron.
      dt: the time step.

    Further arguments:
      surrogate: spikes and their pseudo-derivative, at ``x = (V - V_th) / (V_th - V_reset)``.
      reset: ``"soft"`` as above; ``"hard"`` puts ``V`` to ``V_reset``.
      dtype: of the states; ``None`` is JAX's default float.

    >>> neuron = LIF(2, tau=5.0)
    >>> neuron.init_state()
    >>> neuron(current=jnp.array([1.0, 6.0])).tolist()
    [0.0, 1.0]
    """

    state_names: ClassVar[tuple[str, ...]] = ("V",)

    def __init__(
        self,
        size: Size,
        *,
        tau: ArrayLike = 5.0,
        R: ArrayLike = 1.0,
        V_th: ArrayLike = 1.0,
        V_reset: ArrayLike = 0.0,
        V_rest: ArrayLike = 0.0,
        dt: float = 1.0,
        surrogate: Surrogate = _TRIANGULAR,
        reset: str = "soft",
        dtype: DTypeLike | None = None,
    ) -> None:
        super().__init__(size, size, dtype)
        if reset not in ("soft", "hard"):
            raise ValueError(f'{type(self).__name__} needs reset="soft" or reset="hard", got {reset!r}.')
        self.V_th = constant(self, "V_th", V_th)
        self.V_reset = constant(self, "V_reset", V_reset)
        self.V_rest = constant(self, "V_rest", V_rest)
        self.R = constant(self, "R", R)
        self.decay = np.exp(-constant(self, "dt", dt, positive=True) / constant(self, "tau", tau, positive=True))
        if np.any(self.V_th <= self.V_reset):
            raise ValueError(f"{type(self).__name__} needs V_th above V_reset, got {V_th} and {V_reset}.")
        self.surrogate = surrogate
        self.reset = reset

    def first_value(self, name: str, shape: tuple[int, ...]) -> Array:
        """``V`` starts at rest, all else at zero."""
        zeros = super().first_value(name, shape)
        return zeros + expand(self.V_rest, zeros) if name == "V" else zeros

    def read(self) -> tuple[Array, ...]:
        """The values of the states; the first one is the membrane potential."""
        return tuple(self._state(name).value for name in self.state_names)

    def write(self, *values: Array) -> None:
        """Set the states, in the order of ``read``."""
        for name, value in zip(self.state_names, values, strict=True):
            self._state(name).value = value

    def spikes(self) -> Array:
        """The spikes of the present state: 1 or 0, of the shape of ``V``."""
        return self._spikes(*self.read())

    def update(self, current: Current = 0.0, delta: ArrayLike | None = None) -> Array:
        """One step: current and jump of the membrane in, spikes out."""
        (V,) = self.read()
        V = self._membrane(self._reset(V, self._spikes(V)), current, delta)
        self.write(V)
        return self._spikes(V)

    def _threshold(self, *values: Array) -> Array | float:
        return expand(self.V_th, values[0])

    def _spikes(self, *values: Array) -> Array:
        V = values[0]
        return self.surrogate((V - self._threshold(*values)) / expand(self.V_th - self.V_reset, V))

    def _reset(self, V: Array, z: Array) -> Array:
        if self.reset == "soft":
            return V - expand(self.V_th - self.V_reset, V) * z
        return V + (expand(self.V_reset, V) - V) * z

    def _membrane(self, V: Array, current: Current, delta: ArrayLike | None) -> Array:
        drive = expand(self.V_rest, V) + expand(self.R, V) * self._input(current(V) if callable(current) else current)
        V = expand(self.decay, V) * V + expand(1 - self.decay, V) * drive
        return V if delta is None else V + self._input(delta)

    def _input(self, value: ArrayLike) -> Array | float:
        return value if isinstance(value, (int, float)) else self.check_input(value)


class ALIF(LIF):
    """The LIF neuron with an adaptive threshold (Bellec et al. 2018, 2020)::

        z = (V >= V_th + beta a)
        V' = A (V - (V_th - V_reset) z) + (1 - A) (V_rest + R current) + delta
        a' = exp(-dt / tau_a) (a + z)

    Each spike raises the threshold by ``beta``, from when on the rise decays. (Bellec et al. start the decay one step
    later: their ``a`` is ours times ``exp(dt / tau_a)``.) Shapes and other arguments as for :class:`LIF`.

    >>> neuron = ALIF(1, tau=5.0, tau_a=50.0, beta=0.5)
    >>> neuron.init_state()
    >>> [float(neuron(current=6.0)[0]) for _ in range(5)]
    [1.0, 0.0, 1.0, 0.0, 1.0]
    """

    state_names: ClassVar[tuple[str, ...]] = ("V", "a")

    def __init__(
        self,
        size: Size,
        *,
        tau_a: ArrayLike = 100.0,
        beta: ArrayLike = 0.1,
        dt: float = 1.0,
        reset: str = "soft",
        **membrane: Unpack[Membrane],
    ) -> None:
        super().__init__(size, dt=dt, reset=reset, **membrane)
        self.beta = constant(self, "beta", beta)
        self.decay_a = np.exp(-dt / constant(self, "tau_a", tau_a, positive=True))

    def update(self, current: Current = 0.0, delta: ArrayLike | None = None) -> Array:
        """One step: current and jump of the membrane in, spikes out."""
        V, a = self.read()
        z = self._spikes(V, a)
        V = self._membrane(self._reset(V, z), current, delta)
        a = expand(self.decay_a, a) * (a + z)
        self.write(V, a)
        return self._spikes(V, a)

    def _threshold(self, *values: Array) -> Array:
        V, a = values
        return expand(self.V_th, V) + expand(self.beta, a) * a


class GroupALIF(ALIF):
    """:class:`ALIF` with its two states in one ``brainstate.HiddenGroupState`` named ``state``.

    ``state`` has shape ``(*size, 2)`` or ``(batch, *size, 2)``: ``V`` and ``a`` on the last axis.

    >>> neuron = GroupALIF(3)
    >>> neuron.init_state()
    >>> neuron.state.value.shape, neuron.state.num_state
    ((3, 2), 2)
    """

    state_names = ("state",)
    state_class: ClassVar[type[brainstate.HiddenState]] = brainstate.HiddenGroupState

    @property
    def state_size(self) -> tuple[int, ...]:
        """Shape of ``state``, batch aside."""
        return (*self.out_size, 2)

    def first_value(self, name: str, shape: tuple[int, ...]) -> Array:
        """``V`` starts at rest, ``a`` at zero."""
        V, a = (super(GroupALIF, self).first_value(each, shape[:-1]) for each in ALIF.state_names)
        return jnp.stack([V, a], -1)

    def read(self) -> tuple[Array, ...]:
        """``V`` and ``a``."""
        state = self._state("state").value
        return state[..., 0], state[..., 1]

    def write(self, *values: Array) -> None:
        """Set ``V`` and ``a``."""
        self._state("state").value = jnp.stack(values, -1)


class GIF(LIF):
    """The generalised integrate-and-fire neuron (Mihalas and Niebur 2009): a moving threshold, two inner currents.

    Between spikes, with ``theta`` the threshold::

        dI1/dt = -k1 I1,   dI2/dt = -k2 I2,   dtheta/dt = a (V - V_rest) - b (theta - V_th)
        tau dV/dt = -(V - V_rest) + R (I1 + I2 + current)

    and at a spike, ``V >= theta``::

        V -> V_reset,   I1 -> R1 I1 + A1,   I2 -> R2 I2 + A2,   theta -> max(theta, theta_reset)

    A step does the jumps, then solves each equation exactly with the others held (exponential Euler): ``I1`` and
    ``I2`` first, ``theta`` with the old ``V``, ``V`` with the new currents. Shapes and other arguments as for
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
        outer = self._input(current(V) if callable(current) else current)
        V = self._membrane(V, I1 + I2 + outer, delta)
        self.write(V, theta, I1, I2)
        return self._spikes(V, theta)

    def _threshold(self, *values: Array) -> Array:
        return values[1]
