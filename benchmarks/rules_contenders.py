"""What runs in the rules' benchmark, the peer aside: ours, back-propagation, hand-written floors, the memory bound."""

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from rules_nets import Net, Run, back_propagation, losses

import braintrace_core
from braintrace_core.rules import DRTRL, PPProp, RulePlan, online_gradient, step_online_gradient

RULES = {"window": (DRTRL(), online_gradient), "step": (DRTRL(), step_online_gradient)}
RULES["pp"] = (PPProp(0.9), step_online_gradient)
PASSES = 16


# Ours


def plan_of(net: Net) -> RulePlan:
    example = jnp.zeros(net.inputs, jnp.float32)
    return RulePlan.of(braintrace_core.compile_step_graph(net.step, net.params(), net.carry(), example))


def ours(net: Net, plan: RulePlan, name: str, window: int, data: Any) -> Run:
    rule, run = RULES[name]
    params, batch = net.params(), data[0].shape[1]
    tree = jax.tree.structure(params)

    def function(carry: Any, params: Any, inputs: Any, targets: Any) -> Any:
        leaves = jax.tree.leaves(params)

        def body(carry: Any, now: Any) -> Any:
            states, traces, total = carry
            inputs, targets = now
            loss = lambda found: (losses(found.outputs[0], targets), None)  # noqa: E731
            found = run(plan, rule, loss, leaves, states, traces, [inputs])
            return (found.states, found.traces, [a + b for a, b in zip(total, found.gradients, strict=True)]), None

        start = (*carry, [jnp.zeros_like(leaf) for leaf in leaves])
        (states, traces, total), _ = lax.scan(body, start, (inputs, targets))
        return (states, traces), jax.tree.unflatten(tree, total)

    # Cut outside of the function: inside, XLA copies the whole sequence when a window is a single step.
    cut = [value.reshape(-1, window, *value.shape[1:]) for value in data]
    return function, (jax.tree.leaves(net.carry(batch)), rule.init(plan, batch)), (params, *cut)


def trace_bytes(plan: RulePlan, batch: int) -> tuple[int, int]:
    """Of D-RTRL: the traces of weights, and all."""
    shapes = jax.eval_shape(lambda: DRTRL().init(plan, batch))
    sizes = {name: math.prod(leaf.shape) * leaf.dtype.itemsize for name, leaf in shapes.items()}
    return sum(sizes[name] for name, leaf in shapes.items() if leaf.ndim > 2), sum(sizes.values())


def passes(plan: RulePlan, batch: int) -> Run:
    """Read and write the traces of D-RTRL some times: what any advance of them takes at least."""

    def function(traces: Any) -> Any:
        scale = lambda traces, _: (jax.tree.map(lambda a: 0.9999 * a, traces), None)  # noqa: E731
        return lax.scan(scale, traces, length=PASSES)[0], None

    return function, jax.tree.map(jnp.ones_like, DRTRL().init(plan, batch)), ()


# Back-propagation


def bptt(net: Net, data: Any, sqrt: bool = False) -> Run:
    """Over the whole sequence; with `sqrt`, storing the carries of about the root of its steps."""
    steps, batch = data[0].shape[:2]
    near = [n for n in range(1, steps + 1) if steps % n == 0]
    segments = min(near, key=lambda n: abs(n - math.sqrt(steps))) if sqrt else 1
    return back_propagation(net, segments), net.carry(batch), (net.params(), *data)


# Floors


def load_floors(folder: Path) -> tuple[Any, Any, Any]:
    """The hand-written kernels: cells, step by step and in chunks, in windows."""
    sys.path.insert(0, str(folder))
    common, handwritten, windows = (importlib.import_module(name) for name in ("common", "handwritten", "bench_window"))
    return common, handwritten, windows


def floors(modules: tuple[Any, Any, Any], net: Net, name: str, window: int, data: Any) -> Iterator[Run]:
    """Candidates for the floor of one of ours, of which the fastest counts; none where nothing is written."""
    common, handwritten, windows = modules
    kind, units, batch, params = net.kind, net.units, data[0].shape[1], net.params()
    if net.layers > 1 or kind not in handwritten.LIN:
        return

    def run(function: Any, *carry: Any) -> Run:
        def reordered(carry: Any, params: Any, inputs: Any, targets: Any) -> Any:
            carry, _, gradients = function(params, carry, inputs, targets)
            return carry, gradients

        return reordered, (common.cell_init(kind, units, batch), *carry), (params, *data)

    traces = lambda layout: handwritten.trace_init(kind, params, batch, layout=layout)  # noqa: E731
    if name == "window" and kind in ("gru", "lstm", "lif"):
        last = windows.last_init(kind, params, batch, units, net.inputs)
        yield run(windows.window_seq(kind, window), traces("BIO"), last)
    if name == "step":
        yield run(handwritten.drtrl_seq_chunk(kind, window), traces("BIO"))
        if window == 1:
            yield run(handwritten.drtrl_seq_step(kind), traces("OBI"))
    if name == "pp":
        yield run(handwritten.pp_seq(kind, window), handwritten.pp_init(kind, params, batch))
