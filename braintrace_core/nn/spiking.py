"""A recurrent layer of spiking neurons: weights, then a synapse, then neurons."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from .linear import Linear, SignedWLinear
from .module import Layer, Size, check_batch, matrix_shape
from .neurons import LIF
from .synapses import COBA, CUBA, DualExpon, Expon

__all__ = ["SpikingLayer"]

_CUBA = CUBA()


class SpikingLayer(Layer):
    """Neurons that see the input and each other's last spikes ``z`` through one weight matrix::

        s = W [x, z]
        without a synapse (delta):   the membrane jumps by s
        with one:                    g = synapse(s),   the current is output(g, V)

    ``x`` has shape ``(in,)`` or ``(batch, in)``, the spikes that a step returns ``(n,)`` or ``(batch, n)``.

    Main arguments:
      in_size: ``in``.
      neuron: the ``n`` neurons, such as ``LIF(n)``, ``ALIF(n)``; its dtype is the layer's.
      synapse: ``Expon(n)``, ``DualExpon(n)``, or ``None`` for delta synapses.
      output: what the synapse does to the membrane, ``CUBA()`` or ``COBA(E)``.
      key: a JAX key for the first weights; ``None`` stands for ``jax.random.key(0)``.

    Further arguments:
      recurrent: ``False`` for ``s = W x``.
      W: the weights, any layer from ``in + n`` (``in`` if not recurrent) to ``n``. ``None`` for a :class:`Linear`
        without bias, or for a :class:`SignedWLinear` with ``COBA``: conductances must not be negative (nor ``x``),
        else the membrane runs away.

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
        W: Layer | None = None,
        key: Array | None = None,
    ) -> None:
        super().__init__(in_size, neuron.out_size, neuron.dtype)
        size_in, size = matrix_shape(self)
        sources = size_in + size if recurrent else size_in
        if W is None:
            if isinstance(output, COBA):
                W = SignedWLinear(sources, size, dtype=self.dtype, key=key)
            else:
                W = Linear(sources, size, b_init=None, dtype=self.dtype, key=key)
        _check_part(self, "W", W, (sources,))
        if synapse is not None:
            _check_part(self, "synapse", synapse, (size,))
        self.W = W
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
        check_batch(self, x, self.neuron.batch_shape)
        s = self.W(jnp.concatenate([x, self.neuron.spikes()], -1) if self.recurrent else x)
        if self.synapse is None:
            return self.neuron(delta=s)
        g, output = self.synapse(s), self.output
        return self.neuron(output(g) if isinstance(output, CUBA) else lambda V: output(g, V))


def _check_part(layer: SpikingLayer, name: str, part: Layer, in_size: tuple[int, ...]) -> None:
    found = (tuple(part.in_size), tuple(part.out_size), part.dtype)
    expected = (in_size, tuple(layer.out_size), layer.dtype)
    if found != expected:
        raise ValueError(
            f"SpikingLayer needs {name} from {expected[0]} to {expected[1]} of dtype {expected[2].name}, "
            f"got {found[0]} to {found[1]} of dtype {found[2].name}."
        )
