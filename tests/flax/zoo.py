"""Stock cells of every framework, alone and as two layers with a read-out, and what their gradients are.

Each case has a loop of its own: it calls the module as its framework does, and knows nothing of a compiled model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import lax

import braintrace_core.nn as own
import braintrace_flax as braintrace
from tests.core.rules.zoo import hurried

FEATURES, UNITS, CLASSES, BATCH, STEPS, TOKENS = 3, 4, 2, 2, 8, 5
IMAGE = (3, 3, 1)
DOUBLE = {"dtype": jnp.float64, "param_dtype": jnp.float64}


class Case(NamedTuple):
    """A module, the shape of an example's input, and ``bptt(params, inputs, targets) -> gradient`` of a sequence."""

    module: Any
    shape: tuple[int, ...]
    bptt: Callable[..., Any]
    carry: Any = None

    def compile(self, **options: Any) -> braintrace.Model:
        return braintrace.compile(self.module, jnp.zeros((BATCH, *self.shape)), carry=self.carry, **options)


class LinenLayers(linen.Module):
    """Two cells, one above the other, and a dense read-out; the carry is a dict."""

    lower: linen.Module
    upper: linen.Module
    axes: int = 1

    @linen.compact
    def __call__(self, carry, x):
        lower, h = self.lower(carry["lower"], x)
        upper, h = self.upper(carry["upper"], h)
        readout = linen.DenseGeneral(CLASSES, axis=tuple(range(-self.axes, 0)), name="readout", **DOUBLE)
        return {"lower": lower, "upper": upper}, readout(h)


LINEN = {
    "SimpleCell": (lambda: linen.SimpleCell(UNITS, **DOUBLE), (FEATURES,)),
    "GRUCell": (lambda: linen.GRUCell(UNITS, **DOUBLE), (FEATURES,)),
    "MGUCell": (lambda: linen.MGUCell(UNITS, **DOUBLE), (FEATURES,)),
    "LSTMCell": (lambda: linen.LSTMCell(UNITS, **DOUBLE), (FEATURES,)),
    "OptimizedLSTMCell": (lambda: linen.OptimizedLSTMCell(UNITS, **DOUBLE), (FEATURES,)),
    "ConvLSTMCell": (lambda: linen.ConvLSTMCell(1, (2, 2), **DOUBLE), IMAGE),
}


def linen_case(name: str, layers: int) -> Case:
    build, shape = LINEN[name]
    if layers == 1:
        module, carry = build(), None
        first = module.initialize_carry(jax.random.key(0), (BATCH, *shape))
    else:
        module = LinenLayers(build(), build(), len(shape))
        inner = shape if len(shape) > 1 else (UNITS,)
        first = {
            "lower": build().initialize_carry(jax.random.key(0), (BATCH, *shape)),
            "upper": build().initialize_carry(jax.random.key(0), (BATCH, *inner)),
        }
        carry = first
    return Case(module, shape, bptt(linen_loop(module, first)), carry)


def linen_loop(module: linen.Module, carry: Any) -> Callable[[Any, Any], Any]:
    def unroll(params: Any, inputs: Any) -> Any:
        return lax.scan(lambda c, x: module.apply({"params": params}, c, x), carry, inputs)[1]

    return unroll


class NnxLayers(nnx.Module):
    """The same in NNX; it has ``initialize_carry``, as stock cells do."""

    def __init__(self, lower: nnx.Module, upper: nnx.Module, rngs: nnx.Rngs):
        self.lower, self.upper = lower, upper
        self.readout = nnx.Linear(UNITS, CLASSES, rngs=rngs, **DOUBLE)

    def initialize_carry(self, input_shape, rngs=None):
        between = (*input_shape[:-1], UNITS)
        return self.lower.initialize_carry(input_shape, rngs), self.upper.initialize_carry(between, rngs)

    def __call__(self, carry, x):
        lower, h = self.lower(carry[0], x)
        upper, h = self.upper(carry[1], h)
        return (lower, upper), self.readout(h)


NNX = {name: getattr(nnx, name) for name in ("SimpleCell", "GRUCell", "LSTMCell", "OptimizedLSTMCell")}


def nnx_case(name: str, layers: int) -> Case:
    rngs = nnx.Rngs(0)
    module = NNX[name](FEATURES, UNITS, rngs=rngs, **DOUBLE)
    if layers == 2:
        module = NnxLayers(module, NNX[name](UNITS, UNITS, rngs=rngs, **DOUBLE), rngs)
    return Case(module, (FEATURES,), bptt(nnx_loop(module)))


def nnx_loop(module: nnx.Module) -> Callable[[Any, Any], Any]:
    graph = nnx.graphdef(module)

    def unroll(params: Any, inputs: Any) -> Any:
        carry = module.initialize_carry(inputs.shape[1:], nnx.Rngs(0))
        return lax.scan(lambda c, x: nnx.merge(graph, params)(c, x), carry, inputs)[1]

    return unroll


class BrainstateLayers(brainstate.nn.Module):
    """The same in brainstate."""

    def __init__(self, lower: Any, upper: Any, readout: Any):
        super().__init__()
        self.lower, self.upper, self.readout = lower, upper, readout

    def update(self, x):
        return self.readout(self.upper(self.lower(x)))


BRAINSTATE = {name: getattr(brainstate.nn, name) for name in ("ValinaRNNCell", "GRUCell", "MGUCell", "LSTMCell")}
OWN = {name: getattr(own, name) for name in ("GRUCell", "LRUCell")}


def brainstate_case(name: str, layers: int) -> Case:
    """Needs ``brainstate.environ.context(precision=64)``."""
    smooth = {"activation": "tanh"} if name == "ValinaRNNCell" else {}
    module = BRAINSTATE[name](FEATURES, UNITS, **smooth)
    if layers == 2:
        upper = BRAINSTATE[name](UNITS, UNITS, **smooth)
        module = BrainstateLayers(module, upper, brainstate.nn.Linear(UNITS, CLASSES))
    return Case(module, (FEATURES,), brainstate_bptt(module))


def own_case(name: str, layers: int) -> Case:
    keys = jax.random.split(jax.random.key(0), 3)
    module = OWN[name](FEATURES, UNITS, key=keys[0])
    if layers == 2:
        upper = OWN[name](UNITS, UNITS, key=keys[1])
        module = BrainstateLayers(module, upper, own.Linear(UNITS, CLASSES, key=keys[2]))
    return Case(module, (FEATURES,), brainstate_bptt(module))


def brainstate_bptt(module: Any) -> Callable[..., Any]:
    """The same as :func:`bptt`, by brainstate's own transformations: a module's states know no others."""

    def gradient(params: Any, inputs: Any, targets: Any) -> Any:
        brainstate.nn.init_all_states(module, batch_size=BATCH)
        states = {"/".join(map(str, path)): state for path, state in module.states(brainstate.ParamState).items()}
        for name, state in states.items():
            state.value = params[name]

        def loss() -> Any:
            outputs = brainstate.transform.for_loop(module, inputs)
            return jax.vmap(squared_error)(outputs, targets).sum()

        return brainstate.transform.jit(brainstate.transform.grad(loss, states))()

    return gradient


FRAMEWORKS = {
    "linen": (LINEN, linen_case),
    "nnx": (NNX, nnx_case),
    "brainstate": (BRAINSTATE, brainstate_case),
    "own": (OWN, own_case),
}


def squared_error(outputs: Any, targets: Any) -> Any:
    """The loss of one step."""
    return jnp.mean(jnp.square(outputs - targets))


def data(model: braintrace.Model, seed: int, steps: int = STEPS) -> tuple[Any, Any, Any]:
    """Random parameters, inputs and targets for a compiled model."""
    rng = np.random.default_rng(seed)

    def draw(leaf: Any, *lead: int, scale: float = 1.0) -> Any:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(rng.integers(TOKENS, size=(*lead, *leaf.shape)), leaf.dtype)
        return jnp.asarray(scale * rng.standard_normal((*lead, *leaf.shape)), leaf.dtype)

    params = jax.tree.map(lambda leaf: draw(leaf, scale=0.6), model.params_shape)
    return params, draw(model.inputs_shape[0], steps), draw(model.output_shape, steps)


def bptt(unroll: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """``f(params, inputs, targets) -> gradient`` of the whole sequence, through the module's own calls."""

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        return jax.vmap(squared_error)(unroll(params, inputs), targets).sum()

    return hurried(jax.grad(loss))


def online(model: braintrace.Model, rule: Any, window: int) -> Callable[..., tuple[Any, Any]]:
    """``f(params, inputs, targets)``: the sum of a rule's gradients over a sequence, and that of truncated ones."""
    tx = braintrace.online_grad(model, rule=rule)
    of_window = braintrace.value_and_grad(model, squared_error, rule=rule)

    @hurried
    def run(params: Any, inputs: Any, targets: Any) -> tuple[Any, Any]:
        def at(before: Any, now: Any) -> tuple[Any, Any]:
            carry, state = before
            (_, carry), grads, seen = of_window(params, carry, *now)
            updates, state = tx.update(grads, state, params, online=seen)
            return (carry, state), (updates, grads)

        start = model.initial_carry(), tx.init(params)
        pieces = jax.tree.map(lambda a: a.reshape(-1, window, *a.shape[1:]), (inputs, targets))
        _, gradients = lax.scan(at, start, pieces)
        return jax.tree.map(lambda g: g.sum(0), gradients)

    return run


def leaves(tree: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def assert_same(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    """Leaf by leaf, relative to its largest entry; leaves of zeros are refused."""
    found, expected = leaves(found), leaves(expected)
    assert [a.shape for a in found] == [b.shape for b in expected]
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        scale = np.abs(b).max()
        assert scale > 0, f"leaf {i} is zero, there is nothing to compare"
        assert np.abs(a - b).max() <= tolerance * scale, f"leaf {i} is off by {np.abs(a - b).max() / scale:.1e}"


def cosine(found: Any, expected: Any) -> float:
    a, b = map(_flat, (found, expected))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def distance(found: Any, expected: Any) -> float:
    return float(np.linalg.norm(_flat(found) - _flat(expected)))


def _flat(tree: Any) -> Any:
    return np.concatenate([leaf.ravel() for leaf in leaves(tree)])
