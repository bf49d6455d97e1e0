"""Models of the peer library (braintrace 0.2.6) and of ours with the same parameters, and their gradients."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_core import compile_etrace_graph, nn
from braintrace_core.rules import Rule, RulePlan, online_gradient, step_online_gradient

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    braintrace = pytest.importorskip("braintrace", reason="the peer library is not installed here")

INPUTS, UNITS, OUTPUTS, BATCH, STEPS = 3, 4, 2, 3, 12
TAU = 4.0  # of a synapse and its neuron
LENGTH, ROWS = 3, 5  # of a convolution's input; of an embedding's table
# Compiling takes most of the time.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_llvm_disable_expensive_passes": True,
}
if jax.__version_info__ < (0, 11):  # later ones do not know it
    QUICK["xla_cpu_use_fusion_emitters"] = False


class Stack(brainstate.nn.Module):
    """Some cells and a linear readout, of either library."""

    def __init__(self, library, cells, width=UNITS):
        super().__init__()
        self.cells = cells
        self.out = library.Linear(width, OUTPUTS, w_init=np.zeros((width, OUTPUTS)))

    def update(self, x):
        for cell in self.cells:
            x = cell(x)
        return self.out(x)


class Leaky(brainstate.nn.Module):
    """``h' = h / 2 + tanh(layer(x, h))``, flat; the layer sees both, or the input alone."""

    def __init__(self, layer, size, sees_state=True):
        super().__init__()
        self.layer, self.size, self.sees_state = layer, size, sees_state

    def init_state(self, batch_size=None):
        self.h = brainstate.HiddenState(jnp.zeros((*(() if batch_size is None else (batch_size,)), *self.size)))

    def update(self, x):
        seen = jnp.concatenate([x, self.h.value], -1) if self.sees_state else x
        self.h.value = 0.5 * self.h.value + jnp.tanh(self.layer(seen))
        return self.h.value.reshape(*self.h.value.shape[: -len(self.size)], -1)


class Spiking(brainstate.nn.Module):
    """Neurons that see the input and their own last spikes, at once or through a synapse."""

    def __init__(self, library, neuron, synapse=None):
        super().__init__()
        self.W = library.Linear(INPUTS + UNITS, UNITS, w_init=np.zeros((INPUTS + UNITS, UNITS)))
        self.neuron, self.synapse = neuron, synapse

    def update(self, x):
        s = self.W(jnp.concatenate([x, self.neuron.spikes()], -1))
        return self.neuron(delta=s) if self.synapse is None else self.neuron(self.synapse(s))


def cell(library, name, inputs=INPUTS, **options):
    """A cell of a library, its weights yet to be drawn."""
    return getattr(library, name)(inputs, UNITS, w_init=np.zeros((inputs + UNITS, UNITS)), **options)


MODELS = {
    "vanilla": lambda lib: Stack(lib, [cell(lib, "ValinaRNNCell", activation=jnp.tanh)]),
    "GRU": lambda lib: Stack(lib, [cell(lib, "GRUCell")]),
    "LSTM": lambda lib: Stack(lib, [cell(lib, "LSTMCell")]),
    "LIF": lambda lib: Stack(lib, [Spiking(lib, nn.LIF(UNITS, tau=5.0))]),
    "ALIF": lambda lib: Stack(lib, [Spiking(lib, nn.ALIF(UNITS, tau=5.0, tau_a=8.0, beta=0.5))]),
    "CUBA": lambda lib: Stack(lib, [Spiking(lib, nn.LIF(UNITS, tau=TAU), nn.Expon(UNITS, tau=TAU))]),
    "LRU": lambda lib: Stack(lib, [lib.LRUCell(INPUTS, UNITS)], INPUTS),
    "two MGUs": lambda lib: Stack(lib, [cell(lib, "MGUCell"), cell(lib, "MGUCell", UNITS)]),
    "LoRA": lambda lib: Stack(lib, [Leaky(lib.LoRA(INPUTS + UNITS, 2, UNITS), (UNITS,))]),
    "conv": lambda lib: Stack(
        lib, [Leaky(lib.Conv1d((LENGTH, INPUTS + 2), 2, 3, b_init=None), (LENGTH, 2))], LENGTH * 2
    ),
    "embedding": lambda lib: Stack(lib, [Leaky(lib.Embedding(ROWS, UNITS), (UNITS,), sees_state=False)]),
}
SPIKING = ("LIF", "ALIF", "CUBA")
READERS = {"LSTM": ("c", "h"), "CUBA": ("g", "V")}  # a state, and the one that reads it within the step


@functools.cache
def data(model):
    """Inputs and targets, ``(time, batch, ...)``."""
    rng = np.random.default_rng(1)
    targets = rng.normal(size=(STEPS, BATCH, OUTPUTS))
    if model == "embedding":
        return rng.integers(ROWS, size=(STEPS, BATCH)), targets
    lead = (STEPS, BATCH, LENGTH) if model == "conv" else (STEPS, BATCH)
    return rng.normal(size=(*lead, INPUTS)) * (2.0 if model in SPIKING else 1.0), targets


def parameters(module, of=lambda state: state):
    """The parameters of a module by path."""
    return {tuple(map(str, path)): of(state) for path, state in module.states(brainstate.ParamState).items()}


@functools.cache
def values(model):
    """Random parameters by path, as either library's model has them."""
    rng = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(0.5 * rng.normal(size=leaf.shape))  # noqa: E731
    return jax.tree.map(draw, parameters(MODELS[model](nn), lambda state: state.value))


def build(model, library):
    """The model of a library, with the same parameters as the other's."""
    module = MODELS[model](library)
    states = parameters(module)
    assert set(states) == set(values(model))
    for path, state in states.items():
        assert jax.tree.map(jnp.shape, state.value) == jax.tree.map(jnp.shape, values(model)[path])
        state.value = values(model)[path]
    return module


def squared_error(outputs, targets):
    """One number a step."""
    return jnp.mean((outputs - targets) ** 2, axis=(-2, -1))


class Theirs:
    """A model and an algorithm of the peer."""

    def __init__(self, model, algorithm, multi_step, **options):
        self.model = model
        options["vjp_method"] = "multi-step" if multi_step else "single-step"
        x = data(model)[0][0]
        self.learner = braintrace.compile(build(model, braintrace.nn), algorithm, x, batch_size=BATCH, **options)
        self.start = [(state, state.value) for state in self.learner.states().values()]

    def gradients(self, window=1, modulator=None):
        """The sum over all windows, by path."""
        sequences = data(self.model) if modulator is None else (*data(self.model), modulator)

        def loss(x, y, *signal):
            options = {"modulator": signal[0]} if signal else {}
            return squared_error(self.learner(braintrace.MultiStepData(x) if window > 1 else x, **options), y)

        for state, value in self.start:
            state.value = value
        run = functools.partial(self.learner.etrace_grad, step_fn=loss, reduction="sum", chunk_size=window)
        found = brainstate.transform.jit(run, compiler_options=QUICK)(*sequences)
        return {tuple(map(str, path)): jax.tree.map(np.asarray, value) for path, value in found.items()}


@functools.cache
def compiled(model):
    """Our model, compiled for one example, and its parameters by path."""
    module = build(model, nn)
    brainstate.nn.init_all_states(module)
    graph = compile_etrace_graph(module, data(model)[0][0, 0])
    return RulePlan.of(graph), {path: values(model)[path] for path in graph.module_info.weight_path_to_invars}


@functools.cache
def ours(model, rule, window, credit="window"):
    """A model and a rule of ours, run once however often asked for."""
    return Ours(model, rule, window, credit)


class Ours:
    """A model and a rule of ours, run over the data window by window.

    Attributes:
      traces: those before each window.
    """

    def __init__(self, model, rule, window, credit="window", modulator=None):
        self.plan, self.parameters = compiled(model)
        leaves, self.tree = jax.tree.flatten(list(self.parameters.values()))

        @functools.partial(jax.jit, compiler_options=QUICK)
        def step(states, traces, x, y, modulator):
            loss = lambda w: (squared_error(w.outputs[0], y).sum(), None)  # noqa: E731
            if credit == "window":
                return online_gradient(self.plan, rule, loss, leaves, states, traces, [x])
            return step_online_gradient(self.plan, rule, loss, leaves, states, traces, [x], modulator=modulator)

        self.step = step
        self.windows, self.traces = [], []
        sequences = (*data(model), modulator)
        states = [np.zeros((BATCH, *v.aval.shape), v.aval.dtype) for v in self.plan.program.state_invars]
        traces = rule.init(self.plan, BATCH)
        for start in range(0, STEPS, window):
            now = jax.tree.map(lambda each, start=start: each[start : start + window], sequences)
            self.windows.append((states, now))
            self.traces.append(traces)
            result = step(states, traces, *now)
            states, traces = result.states, result.traces

    def gradients(self, traces=None):
        """The sum over all windows, by path; as if ``traces`` had been those before each window."""
        return self.total(enumerate(self.traces if traces is None else traces))

    def total(self, windows):
        """The same over pairs of a window's index and traces."""
        found = [self.step(self.windows[i][0], traces, *self.windows[i][1]).gradients for i, traces in windows]
        sums = [sum(map(np.asarray, each)) for each in zip(*found, strict=True)]
        return dict(zip(self.parameters, jax.tree.unflatten(self.tree, sums), strict=True))


def forward(model):
    """Our model after each step of the data."""
    module = build(model, nn)
    brainstate.nn.init_all_states(module, batch_size=BATCH)
    for x in data(model)[0]:
        module(x)
        yield module


class CountedTwice(Rule):
    """A rule on a wrong signal: that of a state goes by way of its reader too, though the reader's trace has it.

    For windows of all steps.
    """

    def __init__(self, model, rule):
        self.rule, self.names = rule, READERS[model]
        if model == "CUBA":
            self.slope = 1 - np.exp(-1 / TAU)
        else:
            states = [(module.cells[0].c.value, module.cells[0].h.value) for module in forward(model)]
            c, h = map(jnp.stack, zip(*states, strict=True))
            self.slope = h / jnp.tanh(c) * (1 - jnp.tanh(c) ** 2)

    def init(self, graph, batch_size, dtype=None):
        return self.rule.init(graph, batch_size, dtype)

    def advance(self, traces, factors):
        raise AssertionError

    gradient = advance

    def step_gradient_and_advance(self, traces, factors, signals, start=None):
        assert start is None
        (group,), (now,) = signals.plan.graph.hidden_groups, signals.groups
        state, reader = ([path[-1] for path in group.hidden_paths].index(name) for name in self.names)
        now = [s + self.slope * now[reader] if a == state else s for a, s in enumerate(now)]
        return self.rule.step_gradient_and_advance(traces, factors, replace(signals, groups=(tuple(now),)))


def bptt_of_blind_operators(model):
    """The gradient of all steps if operators' inputs from the states are taken as given."""

    def dense(p, name, x, h):
        weight = p["cells", "0", name, "weight"]
        return jnp.concatenate([x, jax.lax.stop_gradient(h)], -1) @ weight["weight"] + weight["bias"]

    def lstm(p, states, x):
        c, h = states
        i, f, o = (jax.nn.sigmoid(dense(p, name, x, h) + open_) for name, open_ in (("Wi", 0), ("Wf", 1), ("Wo", 0)))
        c = f * c + i * jnp.tanh(dense(p, "Wg", x, h))
        h = o * jnp.tanh(c)
        return (c, h), h

    def cuba(p, states, x):
        g, V = states
        spike, keep = nn.surrogate.Triangular(), np.exp(-1 / TAU)
        g = keep * g + dense(p, "W", x, spike(V - 1))
        V = keep * (V - spike(V - 1)) + (1 - keep) * g
        return (g, V), spike(V - 1)

    def loss(p):
        zeros = jnp.zeros((BATCH, UNITS))
        xs, ys = data(model)
        _, h = jax.lax.scan(lambda states, x: {"LSTM": lstm, "CUBA": cuba}[model](p, states, x), (zeros, zeros), xs)
        out = p["out", "weight"]
        return squared_error(h @ out["weight"] + out["bias"], ys).sum()

    return jax.jit(jax.grad(loss))(values(model))
