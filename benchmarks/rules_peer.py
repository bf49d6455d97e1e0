"""The peer (`pip install braintrace==0.2.6`) in the rules' benchmark: the same nets of its cells, in its two modes."""

import importlib
import warnings
from typing import Any

import jax.numpy as jnp
from rules_nets import OUTPUTS, Net, Run, spiking

ALGORITHMS = {"window": "D_RTRL", "step": "D_RTRL", "pp": "pp_prop"}
CELLS = {"rnn": "ValinaRNNCell", "gru": "GRUCell", "lstm": "LSTMCell", "lru": "LRUCell"}
NAMES = {"w": "weight", "b": "bias"}


def load_peer() -> Any:
    """The peer's package, or the reason why it does not run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("braintrace")
        except ImportError as error:
            return f"not installed ({error})"


def peer_net(braintrace: Any, net: Net, params: Any) -> Any:
    """The same net of the peer's cells, with these parameters."""
    import brainstate

    class Spiking(brainstate.nn.Module):
        def __init__(self, inputs: int, units: int) -> None:
            super().__init__()
            self.units = units
            self.W = braintrace.nn.Linear(inputs + units, units)

        def init_state(self, batch_size: int | None = None, **_: Any) -> None:
            zeros = lambda: brainstate.HiddenState(jnp.zeros((batch_size, self.units), jnp.float32))  # noqa: E731
            self.v = zeros()
            self.a = zeros() if net.kind == "alif" else None

        def update(self, x: Any) -> Any:
            held = [state for state in (self.v, self.a) if state is not None]
            new, out = spiking(self.W, tuple(state.value for state in held), x, axis=-1)
            for state, value in zip(held, new, strict=True):
                state.value = value
            return out

    class Stack(brainstate.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            cell = getattr(braintrace.nn, CELLS[net.kind]) if net.kind in CELLS else Spiking
            options = {"activation": "tanh"} if net.kind == "rnn" else {}
            widths = [net.inputs] + [net.width] * (net.layers - 1)
            self.cells = [cell(width, net.units, **options) for width in widths]
            self.out = braintrace.nn.Linear(net.width, OUTPUTS)

        def update(self, x: Any) -> Any:
            for cell in self.cells:
                x = cell(x)
            return self.out(x)

    stack = Stack()
    for holder, values in [*zip(stack.cells, params["cells"], strict=True), (stack, {"out": params["out"]})]:
        for name, value in values.items():
            target = getattr(holder, name)
            if isinstance(value, dict):
                target.weight.value = {NAMES[leaf]: array for leaf, array in value.items()}
            else:
                target.value = value
    return stack


def peer(braintrace: Any, net: Net, algorithm: str, window: int | None, data: Any) -> Run:
    """The peer's default mode (each step's own signal), or with a window its multi-step mode."""
    import brainstate

    batch = data[0].shape[1]
    options: dict[str, Any] = {"decay_or_rank": 0.9} if algorithm == "pp_prop" else {}
    options |= {} if window is None else {"vjp_method": "multi-step"}
    chunks = {} if window is None else {"chunk_size": window}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stack = peer_net(braintrace, net, net.params())
        learner = braintrace.compile(stack, algorithm, data[0][0], batch_size=batch, **options)

        def loss(x: Any, y: Any) -> Any:
            out = learner(x if window in (None, 1) else braintrace.MultiStepData(x))
            return jnp.mean((out - y) ** 2, axis=(-2, -1))

        def sequence(inputs: Any, targets: Any) -> Any:
            return learner.etrace_grad(inputs, targets, step_fn=loss, reduction="sum", **chunks)

        stateful = brainstate.transform.StatefulFunction(sequence, return_only_write=False)
        stateful.make_jaxpr(*data)
        values = tuple(state.value for state in stateful.get_states(*data))

    def function(carry: Any, inputs: Any, targets: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            carry, found = stateful.jaxpr_call(carry, inputs, targets)
        return carry, as_params(net, found)

    return function, values, data


def as_params(net: Net, found: Any) -> Any:
    """The peer's gradients in the tree of our parameters; None for a parameter that it does not mention."""
    named = {tuple(map(str, path)): value for path, value in found.items()}

    def pick(value: Any, *path: str) -> Any:
        if not isinstance(value, dict):
            return named.get(path)
        gradients = named.get((*path, "weight"), {})
        return {leaf: gradients.get(NAMES[leaf]) for leaf in value}

    params = net.params()
    cells = [
        {name: pick(value, "cells", str(i), name) for name, value in cell.items()}
        for i, cell in enumerate(params["cells"])
    ]
    return {"cells": cells, "out": pick(params["out"], "out")}
