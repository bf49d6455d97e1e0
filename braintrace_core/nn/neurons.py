"""Integrate-and-fire neurons: LIF, ALIF. Plain numbers; times are in the unit of ``dt``.

A neuron keeps its membrane potential as it stood before the reset: whether it spikes is a function of its state, and
the reset is the first thing that happens in the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypedDict, Unpack

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from .module import Cell, Size, constant, expand
from .surrogate import Surrogate, Triangular

__all__ = ["ALIF", "LIF", "Current", "GroupALIF", "Membrane"]

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

    solved exactly over a step. With ``z = (V >= V_th)`` and ``A = exp(-dt / tau)``::

        V' = A (V - (V_th - V_reset) z) + (1 - A) (V_rest + R current) + delta

    ``current``, ``delta`` (a jump of the potential, what delta synapses give) and the spikes that a step returns have
    the shape of ``V``, ``(*size)`` or ``(batch, *size)``. ``current`` may also be a number, or a function of ``V``
    unit by unit: conductances add to the leak. It is taken as linear in ``V`` over the step (exponential Euler)::

        V' = V_inf + A^(1 - R s) (V - V_inf),   s = dI/dV,   V_inf = (V_rest + R (I(V) - s V)) / (1 - R s)

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
        self.rate = constant(self, "dt", dt, positive=True) / constant(self, "tau", tau, positive=True)
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
        rest, R = expand(self.V_rest, V), expand(self.R, V)
        if callable(current):
            value, slope = jax.jvp(current, (V,), (jnp.ones_like(V),))
            leak = 1 - R * slope
            A = jnp.exp(-expand(self.rate, V) * leak)
            drive = (rest + R * (value - slope * V)) / leak
        else:
            A, drive = expand(np.exp(-self.rate), V), rest + R * self._input(current)
        V = A * V + (1 - A) * drive
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
