"""Networks of the configs: small recurrent and spiking models as plain step functions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

FLOAT = jnp.float32
DTYPES = ("float32", "bfloat16", "float16")

__all__ = ["ALIF", "GRU", "LRU", "Network", "Parts"]


class Parts(NamedTuple):
    """A network ready to be compiled.

    Attributes:
      init: ``init(key) -> params``.
      step: ``step(params, carry, x) -> (carry, out)``, of one example.
      carry: the initial carry of one example.
    """

    init: Callable[[Array], Any]
    step: Callable[[Any, Any, Array], tuple[Any, Array]]
    carry: Any


@dataclass(frozen=True)
class Network(ABC):
    """A network of some sizes; :meth:`build` makes it for so many inputs and outputs."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{type(self).__name__} needs {field.name} of at least 1, got {value}.")
            if field.name == "dtype" and value not in DTYPES:
                raise ValueError(f"{type(self).__name__} needs dtype to be {' or '.join(DTYPES)}, got {value!r}.")

    @abstractmethod
    def build(self, num_inputs: int, num_outputs: int, tokens: bool = False) -> Parts:
        """The network for these inputs and outputs; ``tokens`` says that the input is one whole number a step."""


@dataclass(frozen=True)
class LRU(Network):
    """Linear recurrent units (Orvieto et al., 2023): complex diagonal recurrences between small dense layers.

    The recurrence is unit by unit, so D-RTRL is exact for the parameters of each layer as to that layer's states.

    Attributes:
      units: complex states of a layer.
      width: features between layers.
      layers: how many.
      slowest, fastest: the magnitudes of the recurrences at first lie between these.
      dtype: of matrix products, ``"bfloat16"`` for speed; parameters and states are float32.
    """

    units: int = 64
    width: int = 64
    layers: int = 2
    slowest: float = 0.999
    fastest: float = 0.8
    dtype: str = "float32"

    def build(self, num_inputs: int, num_outputs: int, tokens: bool = False) -> Parts:
        """As every network."""
        mix = partial(_mix, dtype=jnp.dtype(self.dtype))

        def layer(key: Array) -> dict[str, Array]:
            k = jax.random.split(key, 6)
            low, high = math.log(-math.log(self.slowest)), math.log(-math.log(self.fastest))
            size = jax.random.uniform(k[0], (self.units,), FLOAT, low, high)
            return {
                "size": size,
                "angle": jax.random.uniform(k[1], (self.units,), FLOAT, 0.0, math.pi / 4),
                "in_re": _matrix(k[2], self.width, self.units),
                "in_im": _matrix(k[3], self.width, self.units),
                "out_re": _matrix(k[4], self.units, self.width),
                "out_im": _matrix(k[5], self.units, self.width),
                "bias": jnp.zeros(self.width, FLOAT),
            }

        def init(key: Array) -> Any:
            first, last, *rest = jax.random.split(key, 2 + self.layers)
            return {
                "in": _front(first, num_inputs, self.width, tokens),
                "layers": [layer(k) for k in rest],
                "out": {"bias": jnp.zeros(num_outputs, FLOAT), "kernel": _matrix(last, self.width, num_outputs)},
            }

        def step(params: Any, carry: Any, x: Array) -> tuple[Any, Array]:
            signal, states = _enter(params["in"], x), []
            for own, h in zip(params["layers"], carry, strict=True):
                size = jnp.exp(-jnp.exp(own["size"]))
                turn = jax.lax.complex(size * jnp.cos(own["angle"]), size * jnp.sin(own["angle"]))
                scale = jnp.sqrt(1 - size**2)
                drive = jax.lax.complex(scale * mix(signal, own["in_re"]), scale * mix(signal, own["in_im"]))
                h = turn * h + drive
                read = mix(jnp.real(h), own["out_re"]) - mix(jnp.imag(h), own["out_im"]) + own["bias"]
                signal = signal + jax.nn.gelu(read)
                states.append(h)
            return tuple(states), mix(signal, params["out"]["kernel"]) + params["out"]["bias"]

        return Parts(init, step, tuple(jnp.zeros(self.units, jnp.complex64) for _ in range(self.layers)))


@dataclass(frozen=True)
class GRU(Network):
    """Gated recurrent units.

    Weights are ``(from, gate, to)``, so that a mesh can divide the units of all gates alike.

    Attributes:
      units: of a layer.
      layers: how many.
      dtype: of matrix products, ``"bfloat16"`` for speed; parameters and states are float32.
    """

    units: int = 128
    layers: int = 1
    dtype: str = "float32"

    def build(self, num_inputs: int, num_outputs: int, tokens: bool = False) -> Parts:
        """As every network."""
        n, mix = self.units, partial(_mix, dtype=jnp.dtype(self.dtype))

        def init(key: Array) -> Any:
            first, last, *rest = jax.random.split(key, 2 + self.layers)
            layers = []
            for k in rest:
                into, back = jax.random.split(k)
                kernel = jnp.stack([_orthogonal(b, n) for b in jax.random.split(back, 3)], axis=1)
                given = _matrix(into, n, 3 * n).reshape(n, 3, n)
                layers.append({"in": given, "back": kernel, "bias": jnp.zeros((3, n), FLOAT)})
            return {
                "in": _front(first, num_inputs, n, tokens),
                "layers": layers,
                "out": {"bias": jnp.zeros(num_outputs, FLOAT), "kernel": _matrix(last, n, num_outputs)},
            }

        def step(params: Any, carry: Any, x: Array) -> tuple[Any, Array]:
            signal, states = _enter(params["in"], x), []
            for own, h in zip(params["layers"], carry, strict=True):
                given, fed = mix(signal, own["in"]) + own["bias"], mix(h, own["back"])
                keep, reset = jax.nn.sigmoid(given[0] + fed[0] + 1.0), jax.nn.sigmoid(given[1] + fed[1])
                h = keep * h + (1 - keep) * jnp.tanh(given[2] + reset * fed[2])
                signal = h
                states.append(h)
            return tuple(states), mix(signal, params["out"]["kernel"]) + params["out"]["bias"]

        return Parts(init, step, tuple(jnp.zeros(n, FLOAT) for _ in range(self.layers)))


@dataclass(frozen=True)
class ALIF(Network):
    """Spiking neurons with thresholds that adapt (Bellec et al., 2020), recurrent, and a leaky readout.

    Attributes:
      units: neurons; the first ``adaptive`` part of them adapt.
      adaptive: the part of neurons whose threshold rises with their own spikes.
      decay: of the membrane, in a step.
      memory: decay of the threshold, in a step.
      readout: decay of the readout, in a step.
      strength: how much a spike raises the threshold.
    """

    units: int = 100
    adaptive: float = 0.5
    decay: float = 0.95
    memory: float = 0.995
    readout: float = 0.95
    strength: float = 1.7

    def build(self, num_inputs: int, num_outputs: int, tokens: bool = False) -> Parts:
        """As every network."""
        n = self.units
        raised = jnp.where(jnp.arange(n) < self.adaptive * n, self.strength * (1 - self.memory), 0.0).astype(FLOAT)

        def init(key: Array) -> Any:
            first, middle, last = jax.random.split(key, 3)
            return {
                "in": _front(first, num_inputs, n, tokens),
                "back": _matrix(middle, n, n) * (1 - jnp.eye(n, dtype=FLOAT)),
                "out": {"bias": jnp.zeros(num_outputs, FLOAT), "kernel": _matrix(last, n, num_outputs)},
            }

        def step(params: Any, carry: Any, x: Array) -> tuple[Any, Array]:
            v, a, y = carry
            z = spike(v - 1.0 - a)
            others = params["back"] * (1 - jnp.eye(n, dtype=FLOAT))
            v = self.decay * v + _enter(params["in"], x) + z @ others - jax.lax.stop_gradient(z)
            a = self.memory * a + raised * z
            out = self.readout * y + spike(v - 1.0 - a) @ params["out"]["kernel"] + params["out"]["bias"]
            return (v, a, out), out

        return Parts(init, step, (jnp.zeros(n, FLOAT), jnp.zeros(n, FLOAT), jnp.zeros(num_outputs, FLOAT)))


@jax.custom_jvp
def spike(v: Array) -> Array:
    """One where the membrane is above threshold; its derivative is a triangle around it."""
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _spike_jvp(primals: Any, tangents: Any) -> Any:
    (v,), (dv,) = primals, tangents
    return spike(v), 0.3 * jnp.maximum(0.0, 1 - jnp.abs(v)) * dv


def _front(key: Array, num_inputs: int, width: int, tokens: bool) -> dict[str, Array]:
    if tokens:
        return {"table": jax.random.normal(key, (num_inputs, width), FLOAT) / math.sqrt(width)}
    return {"bias": jnp.zeros(width, FLOAT), "kernel": _matrix(key, num_inputs, width)}


def _enter(own: dict[str, Array], x: Array) -> Array:
    return own["table"][x] if "table" in own else x @ own["kernel"] + own["bias"]


def _mix(x: Array, weight: Array, dtype: Any) -> Array:
    """``x @ weight`` in a dtype, as float32; the first axis of a weight is the one that is summed over."""
    return jnp.tensordot(x.astype(dtype), weight.astype(dtype), 1).astype(FLOAT)


def _matrix(key: Array, rows: int, columns: int) -> Array:
    return jax.random.normal(key, (rows, columns), FLOAT) / math.sqrt(rows)


def _orthogonal(key: Array, size: int) -> Array:
    return jnp.linalg.qr(jax.random.normal(key, (size, size), FLOAT))[0]
