"""The networks of the rules' benchmark: cells as plain functions of one example, a linear readout, data.

A net is named by kind, units and layers: `gru256`, `gru256x2`. The loss of a step is the mean squared error over batch
and outputs; that of a sequence is the sum over its steps. All is float32.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from braintrace_core.nn.surrogate import Triangular

Run = tuple[Callable[..., Any], Any, tuple[Any, ...]]
"""A function, its carry and its arguments: `function(carry, *arguments) -> (carry, gradients)`."""

OUTPUTS = 10
KEEP, KEEP_ADAPTATION, ADAPTATION = math.exp(-1 / 10), math.exp(-1 / 100), 0.1
DENSE = {
    "rnn": ["W"],
    "gru": ["Wz", "Wr", "Wh"],
    "lstm": ["Wi", "Wg", "Wf", "Wo"],
    "lif": ["W"],
    "alif": ["W"],
    "lru": ["B_re", "B_im", "C_re", "C_im"],
}
STATES = {"rnn": 1, "gru": 1, "lstm": 2, "lif": 1, "alif": 2, "lru": 2}
# How many traces of the size of a weight a cell needs: for each dense operator that feeds a state which itself feeds
# the next step, the number of such states that it reaches. An LRU's second weight has those of its first.
TRACES = {"rnn": 0, "gru": 2, "lstm": 3, "lif": 1, "alif": 2, "lru": 2}

spike = Triangular(height=0.3)


def dense(p: Any, x: Any) -> Any:
    y = x @ p["w"]
    return y + p["b"] if "b" in p else y


def rnn(p: Any, states: Any, x: Any) -> Any:
    h = jnp.tanh(dense(p["W"], jnp.concatenate([x, states[0]])))
    return (h,), h


def gru(p: Any, states: Any, x: Any) -> Any:
    (h,) = states
    both = jnp.concatenate([x, h])
    z, r = jax.nn.sigmoid(dense(p["Wz"], both)), jax.nn.sigmoid(dense(p["Wr"], both))
    new = jnp.tanh(dense(p["Wh"], jnp.concatenate([x, r * h])))
    h = (1 - z) * h + z * new
    return (h,), h


def lstm(p: Any, states: Any, x: Any) -> Any:
    h, c = states
    i, g, f, o = (dense(p[name], jnp.concatenate([x, h])) for name in DENSE["lstm"])
    c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def spiking(weights: Callable[[Any], Any], states: Any, x: Any, axis: int = 0) -> Any:
    """Leaky units with a soft reset; with two states the threshold adapts."""
    v, *adaptation = states
    threshold = 1.0 + ADAPTATION * adaptation[0] if adaptation else 1.0
    fired = spike(v - threshold)
    v = KEEP * (v - fired) + weights(jnp.concatenate([x, fired], axis))
    if not adaptation:
        return (v,), spike(v - 1.0)
    a = KEEP_ADAPTATION * (adaptation[0] + fired)
    return (v, a), spike(v - 1.0 - ADAPTATION * a)


def lif(p: Any, states: Any, x: Any) -> Any:
    return spiking(partial(dense, p["W"]), states, x)


def lru(p: Any, states: Any, x: Any) -> Any:
    re, im = states
    size, angle, gain = jnp.exp(-jnp.exp(p["nu_log"])), jnp.exp(p["theta_log"]), jnp.exp(p["gamma_log"])
    cos, sin = size * jnp.cos(angle), size * jnp.sin(angle)
    re, im = (
        cos * re - sin * im + gain * dense(p["B_re"], x),
        sin * re + cos * im + gain * dense(p["B_im"], x),
    )
    return (re, im), dense(p["C_re"], re) - dense(p["C_im"], im) + p["D"] * x


CELLS = {"rnn": rnn, "gru": gru, "lstm": lstm, "lif": lif, "alif": lif, "lru": lru}


@dataclass(frozen=True)
class Net:
    """Stacked cells of one kind and a readout."""

    kind: str
    units: int
    layers: int = 1
    inputs: int = 128

    @staticmethod
    def named(name: str, inputs: int) -> "Net":
        match = re.fullmatch(r"([a-z]+)(\d+)(?:x(\d+))?", name)
        if match is None or match[1] not in CELLS:
            raise SystemExit(f"No net {name!r}: give a kind ({', '.join(CELLS)}) and units, like gru256 or gru256x2.")
        return Net(match[1], int(match[2]), int(match[3] or 1), inputs)

    @property
    def name(self) -> str:
        return f"{self.kind}{self.units}" + (f"x{self.layers}" if self.layers > 1 else "")

    @property
    def width(self) -> int:
        """What a cell hands to the next one, or to the readout."""
        return self.inputs if self.kind == "lru" else self.units

    def params(self) -> Any:
        rng = np.random.default_rng(0)
        strength = 2.0 if self.kind in ("lif", "alif") else 1.0

        def linear(rows: int, columns: int, bias: bool = True) -> Any:
            w = strength * rng.standard_normal((rows, columns)) / math.sqrt(rows)
            return {"w": _f32(w)} | ({"b": _f32(np.zeros(columns))} if bias else {})

        def cell(width: int) -> Any:
            n = self.units
            if self.kind != "lru":
                return {name: linear(width + n, n) for name in DENSE[self.kind]}
            size = rng.uniform(0.5, 0.99, n)
            diagonal = {
                "nu_log": np.log(-np.log(size)),
                "theta_log": np.log(rng.uniform(0.1, 6.2, n)),
                "gamma_log": 0.5 * np.log(1 - size**2),
                "D": rng.standard_normal(width),
            }
            into = {name: linear(width, n, bias=False) for name in ("B_re", "B_im")}
            out = {name: linear(n, width, bias=False) for name in ("C_re", "C_im")}
            return {name: _f32(value) for name, value in diagonal.items()} | into | out

        widths = [self.inputs] + [self.width] * (self.layers - 1)
        return {"cells": [cell(width) for width in widths], "out": linear(self.width, OUTPUTS)}

    def carry(self, *batch: int) -> Any:
        zeros = lambda: jnp.zeros((*batch, self.units), jnp.float32)  # noqa: E731
        return tuple(tuple(zeros() for _ in range(STATES[self.kind])) for _ in range(self.layers))

    def step(self, params: Any, carry: Any, x: Any) -> Any:
        """One step of one example."""
        states = []
        for p, state in zip(params["cells"], carry, strict=True):
            state, x = CELLS[self.kind](p, state, x)
            states.append(state)
        return tuple(states), dense(params["out"], x)

    def data(self, steps: int, batch: int) -> tuple[Any, Any]:
        """Inputs and targets, `(steps, batch, ...)`; spiking cells get spikes."""
        rng = np.random.default_rng(1)
        shape = (steps, batch, self.inputs)
        x = rng.random(shape) < 0.1 if self.kind in ("lif", "alif") else rng.standard_normal(shape)
        return _f32(x), _f32(rng.standard_normal((steps, batch, OUTPUTS)))

    def demanded_trace_bytes(self, batch: int) -> int:
        """The traces of weights that no D-RTRL on float32 can do without."""
        widths = [self.inputs] + [self.width] * (self.layers - 1)
        rows = [width if self.kind == "lru" else width + self.units for width in widths]
        return 4 * batch * TRACES[self.kind] * self.units * sum(rows)


def losses(outputs: Any, targets: Any) -> Any:
    """The sum over steps of the mean squared error."""
    return jnp.sum(jnp.mean((outputs - targets) ** 2, axis=(1, 2)))


def back_propagation(net: Net, segments: int = 1) -> Callable[..., Any]:
    """`f(carry, params, inputs, targets) -> (carry, gradients)` by differentiating the scan over the whole sequence.

    With several segments, only the carries at their starts are kept, and each is run again on the way back.
    """
    step = jax.vmap(net.step, (None, 0, 0))

    def loss(params: Any, carry: Any, inputs: Any, targets: Any) -> Any:
        def run(carry: Any, segment: Any) -> Any:
            inputs, targets = segment
            carry, outputs = lax.scan(lambda carry, x: step(params, carry, x), carry, inputs)
            return carry, losses(outputs, targets)

        if segments == 1:
            carry, value = run(carry, (inputs, targets))
            return value, carry
        cut = [a.reshape(segments, -1, *a.shape[1:]) for a in (inputs, targets)]
        carry, values = lax.scan(jax.checkpoint(run), carry, tuple(cut))
        return jnp.sum(values), carry

    def run(carry: Any, params: Any, inputs: Any, targets: Any) -> Any:
        gradients, carry = jax.grad(loss, has_aux=True)(params, carry, inputs, targets)
        return carry, gradients

    return run


def activity(net: Net, inputs: Any) -> float:
    """The mean magnitude of what the first cell hands on: of spikes, their rate."""
    cell = jax.vmap(partial(CELLS[net.kind], net.params()["cells"][0]))
    _, outputs = lax.scan(cell, net.carry(inputs.shape[1])[0], inputs)
    return float(jnp.mean(jnp.abs(outputs)))


def _f32(value: Any) -> Any:
    return jnp.asarray(np.asarray(value, np.float32))
