"""A recurrent layer of spiking neurons: weights, then a synapse, then neurons."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.nn import initializers
from jax.typing import ArrayLike

from .linear import Linear
from .module import Initializer, Layer, Size, matrix_shape
from .neurons import LIF
from .synapses import COBA, CUBA, DualExpon, Expon

__all__ = ["SpikingLayer"]

_CUBA = CUBA()
_HE = initializers.he_normal()


class SpikingLayer(Layer):
    """Neurons that see the input and each other's last spikes ``z`` through one weight matrix::

        s = W [x, z]
        without a synapse (delta):   the membrane jumps by s
        with one:                    g = synapse(s),   current = output(g, V)

    ``V`` is the membrane potential at the beginning of the step, after the reset. ``x`` has shape ``(in,)`` or
    ``(batch, in)``, the spikes that a step returns ``(n,)`` or ``(batch, n)``. ``W`` is a :class:`Linear`.

    Main arguments:
      in_size: ``in``.
      neuron: the ``n`` neurons, such as ``LIF(n)``, ``ALIF(n)``; its dtype is the layer's.
      synapse: ``Expon(n)``, ``DualExpon(n)``, or ``None`` for delta synapses.
      output: ``CUBA()`` or ``COBA(E)``; what the synapse does to the membrane.
      key: a JAX key for the first values; ``None`` stands for ``jax.random.key(0)``.

    Further arguments:
      recurrent: ``False`` for ``s = W x``.
      w_init, b_init: functions of ``(key, shape, dtype)`` or arrays; ``b_init=None`` for no bias.

    >>> from braintrace_core.nn import ALIF
    >>> delta = SpikingLayer(3, LIF(4, tau=10.0))
    >>> exponential = SpikingLayer(3, ALIF(4), Expon(4, tau=5.0), COBA(E=3.0))
    >>> exponential.init_state(batch_size=2)
    >>> exponential(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def __init__(
        self,
        in_size: Size,
        neuron: LIF,
        synapse: Expon | DualExpon | None = None,
        output: CUBA | COBA = _CUBA,
        *,
        recurrent: bool = True,
        w_init: Initializer = _HE,
        b_init: Initializer | None = None,
        key: Array | None = None,
    ) -> None:
        super().__init__(in_size, neuron.out_size, neuron.dtype)
        size_in, size = matrix_shape(self)
        if synapse is not None and (synapse.out_size, synapse.dtype) != (neuron.out_size, neuron.dtype):
            raise ValueError(
                f"SpikingLayer needs a synapse like its neuron, {neuron.dtype.name}{tuple(neuron.out_size)}, "
                f"got {synapse.dtype.name}{tuple(synapse.out_size)}."
            )
        sources = size_in + size if recurrent else size_in
        self.W = Linear(sources, size, w_init=w_init, b_init=b_init, dtype=self.dtype, key=key)
        self.neuron = neuron
        self.synapse = synapse
        self.output = output
        self.recurrent = recurrent

    def init_state(self, batch_size: int | None = None) -> None:
        """Make the states of the neurons and of the synapse."""
        self.neuron.init_state(batch_size)
        if self.synapse is not None:
            self.synapse.init_state(batch_size)

    def reset_state(self, batch_size: int | None = None) -> None:
        """Put these states back to where they start; ``None`` keeps the present batch size."""
        self.neuron.reset_state(batch_size)
        if self.synapse is not None:
            self.synapse.reset_state(batch_size)

    def update(self, x: ArrayLike) -> Array:
        """One step: ``x`` in, spikes out."""
        x = self.check_input(x)
        s = self.W(jnp.concatenate([x, self.neuron.spikes()], -1) if self.recurrent else x)
        if self.synapse is None:
            return self.neuron(delta=s)
        g = self.synapse(s)
        return self.neuron(lambda V: self.output(g, V))
