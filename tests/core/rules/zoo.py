"""Small step functions for the rules' tests, and the loop that defines what their gradients are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import braintrace_core as bc
from braintrace_core.nn.surrogate import Triangular
from braintrace_core.rules import RulePlan, online_gradient, step_online_gradient
from tests.core.compiler.zoo import gain_p

UNITS, FEATURES, STEPS, BATCH = 5, 3, 8, 3
SPIKING = ("lif", "lif_with_synapse", "alif")

spike = Triangular(0.8)


# Most functions of the tests run a few times only.
hurried = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


class Case(NamedTuple):
    """A step function with parameters and an initial carry for one example."""

    step: Callable[..., Any]
    params: Any
    carry: Any


def random(seed: int) -> Callable[..., Any]:
    generator = np.random.default_rng(seed)
    return lambda *shape: jnp.asarray(0.7 * generator.standard_normal(shape))


def cases() -> tuple[dict[str, Case], dict[str, Case]]:
    """Models whose recurrence is unit by unit, and models whose recurrence mixes units."""
    r, n, f = random(0), UNITS, FEATURES
    complex_ = lambda *s: jax.lax.complex(r(*s), r(*s))  # noqa: E731

    def out(h: Any, y: Any = None) -> Any:
        return h, h if y is None else y

    def conv(x: Any, kernel: Any, groups: int = 1) -> Any:
        dims = ("NWC", "WIO", "NWC")
        x = x[None]
        return jax.lax.conv_general_dilated(
            x, kernel, (1,), "SAME", dimension_numbers=dims, feature_group_count=groups
        )[0]

    def channels(x: Any, count: int) -> Any:
        return x[:, None] * jnp.ones((1, count), x.dtype)

    def two_states(p: Any, c: Any, x: Any) -> Any:
        v, a = c
        new_v = jnp.tanh(v - a) * p["d"] + x @ (p["w"] * 2)
        return (new_v, 0.9 * a + 0.1 * jnp.tanh(v)), new_v @ p["r"]

    def fused(p: Any, h: Any, x: Any) -> Any:
        i, g, o = jnp.split(x @ p["w"] + p["b"], 3)
        return out(jax.nn.sigmoid(i) * h + jnp.tanh(g) * jax.nn.sigmoid(o))

    def complex_lru(p: Any, h: Any, x: Any) -> Any:
        h = jnp.exp(jax.lax.complex(-jnp.exp(p["nu"]), p["theta"])) * h + jax.lax.complex(x @ p["br"], x @ p["bi"])
        return out(h, jnp.real(h) @ p["r"])

    def not_holomorphic(p: Any, h: Any, x: Any) -> Any:
        h = 0.5 * jnp.conj(h) * p["d"].astype(h.dtype) + jnp.tanh(jnp.abs(h)).astype(h.dtype) * (
            x.astype(h.dtype) @ p["w"]
        )
        return out(h, jnp.real(h) * jnp.imag(h))

    def lif(p: Any, v: Any, x: Any) -> Any:
        v = p["d"] * v * (1 - spike(v - 0.5)) + x @ p["w"]
        return v, spike(v - 0.5) @ p["r"]

    def lif_with_synapse(p: Any, c: Any, x: Any) -> Any:
        g, v = c
        g = 0.7 * g + x @ p["w"]
        v = 0.8 * v * (1 - spike(v - 0.5)) + g + p["b"]
        return (g, v), spike(v - 0.5) @ p["r"]

    def side_by_side(p: Any, h: Any, x: Any) -> Any:
        """Two layers in one array."""
        left, right = h[:n], h[n:]
        left, right = 0.5 * left + jnp.tanh(x @ p["a"]), p["d"] * right + jnp.tanh(x @ p["b"])
        return out(jnp.concatenate([left, right]))

    def gain(p: Any, h: Any, x: Any) -> Any:
        """An operator behind another one, through which credit may pass."""
        return out(0.6 * h + jnp.tanh(gain_p.bind(x @ p["w"], p["g"])))

    s, t = random(3), random(4)  # apart, so that the draws of the other models stay what they are
    rows, cols = jnp.array([0, 0, 1, 2, 2]), jnp.array([0, 3, 1, 2, 4])
    unit_wise = {
        "indrnn": Case(
            lambda p, h, x: (lambda h: out(h, h @ p["r"]))(jnp.tanh(x @ p["w"] + p["d"] * h + p["b"])),
            {"w": r(f, n), "d": r(n), "b": r(n), "r": r(n, 2)},
            r(n),
        ),
        "complex_lru": Case(
            complex_lru, {"nu": r(n), "theta": r(n), "br": r(f, n), "bi": r(f, n), "r": r(n, 2)}, complex_(n)
        ),
        "not_holomorphic": Case(not_holomorphic, {"w": complex_(f, n), "d": r(n)}, complex_(n)),
        "two_states": Case(two_states, {"w": r(f, n), "d": r(n), "r": r(n, 2)}, (r(n), r(n))),
        "fused_gates": Case(fused, {"w": r(f, 3 * n), "b": r(3 * n)}, r(n)),
        "conv": Case(
            lambda p, h, x: out(0.5 * h + jnp.tanh(conv(channels(x, 2), p["k"]) + p["b"][None])),
            {"k": r(3, 2, 4), "b": r(4)},
            r(f, 4),
        ),
        "grouped_conv": Case(
            lambda p, h, x: out(0.5 * h + jnp.tanh(conv(channels(x, 4), p["k"], 2))), {"k": r(3, 2, 6)}, r(f, 6)
        ),
        "embedding": Case(
            lambda p, h, x: out(0.5 * h * p["d"] + jnp.tanh(p["e"][jnp.argmax(x)])), {"e": r(7, n), "d": r(n)}, r(n)
        ),
        "embedding_of_many": Case(
            lambda p, h, x: out(0.5 * h * p["d"][None] + jnp.tanh(p["e"][(3 * x).astype(int) % 7])),
            {"e": r(7, n), "d": r(n)},
            r(f, n),
        ),
        "leading_axis": Case(
            lambda p, h, x: out(0.5 * h + jnp.tanh(channels(x, 2) @ p["w"] + p["b"][None])),
            {"w": r(2, 4), "b": r(4)},
            r(f, 4),
        ),
        "lora": Case(
            lambda p, h, x: out(0.5 * h + jnp.tanh(bc.lora_matmul(x, p["B"], p["A"], p["b"], alpha=0.7))),
            {"B": r(f, 2), "A": r(2, n), "b": r(n)},
            r(n),
        ),
        "sparse": Case(
            lambda p, h, x: out(
                0.5 * h + jnp.tanh(bc.sparse_matmul(x, p["w"], structure=(rows, cols, (f, n)), bias=p["b"]))
            ),
            {"w": r(5), "b": r(n)},
            r(n),
        ),
        "grouped": Case(
            lambda p, h, x: out(0.5 * h + jnp.tanh(bc.grouped_matmul(jnp.stack([x, 2 * x]), p["w"], p["b"]))),
            {"w": r(2, f, n), "b": r(2, n)},
            r(2, n),
        ),
        "einsum": Case(
            lambda p, h, x: out(0.5 * h + jnp.tanh(jnp.einsum("ioq,i->qo", p["w"], x))), {"w": r(f, n, 2)}, r(2, n)
        ),
        "summed_weights": Case(
            lambda p, h, x: out(0.5 * h + jnp.tanh(x @ (p["a"] + 2 * jnp.abs(p["b"])))),
            {"a": r(f, n), "b": r(f, n)},
            r(n),
        ),
        "lif": Case(lif, {"w": s(f, n), "d": s(n), "r": s(n, 2)}, s(n)),
        "lif_with_synapse": Case(lif_with_synapse, {"w": s(f, n), "b": jnp.abs(s(n)), "r": s(n, 2)}, (s(n), s(n))),
        "gain": Case(gain, {"w": t(f, n), "g": t(n)}, t(n)),
        "side_by_side": Case(side_by_side, {"a": t(f, n), "b": t(f, 4), "d": t(4)}, t(n + 4)),
    }

    def lstm(p: Any, c: Any, x: Any) -> Any:
        h, s = c
        i, f_, g, o = jnp.split(x @ p["w"] + h @ p["u"] + p["b"], 4)
        s = jax.nn.sigmoid(f_) * s + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(s)
        return (h, s), jax.nn.relu(h @ p["r1"]) @ p["r2"]

    def gru(p: Any, h: Any, x: Any) -> Any:
        z, g = jax.nn.sigmoid(x @ p["wz"] + h @ p["uz"]), jax.nn.sigmoid(x @ p["wr"] + h @ p["ur"])
        return out((1 - z) * h + z * jnp.tanh(x @ p["wh"] + (g * h) @ p["uh"]))

    def normalised(p: Any, h: Any, x: Any) -> Any:
        z = (x * p["q"]) @ p["w"] + h @ p["u"]
        z = (z - z.mean()) / jnp.sqrt(z.var() + 1e-3)
        return out(jnp.tanh(p["s"] * z + p["b"]))

    def stack(p: Any, c: Any, x: Any) -> Any:
        first, second = c
        first = 0.6 * first + jnp.tanh(x @ p["w1"] + first @ p["u1"])
        second = 0.4 * second + jnp.tanh(first @ p["w2"] + second @ p["u2"])
        return (first, second), second @ p["r"]

    def complex_dense(p: Any, h: Any, x: Any) -> Any:
        h = jnp.tanh(jnp.abs(h)).astype(h.dtype) * (x.astype(h.dtype) @ p["w"]) + 0.3 * (h @ p["u"])
        return out(h, jnp.real(h) * jnp.imag(h))

    def alif(p: Any, c: Any, x: Any) -> Any:
        v, a = c
        z = spike(v - 0.3 - 0.4 * a)
        v, a = 0.8 * v - 0.5 * z + x @ p["w"] + z @ p["u"], 0.9 * a + 0.1 * z
        return (v, a), spike(v - 0.3 - 0.4 * a) @ p["r"]

    def layers_by_scan(p: Any, hs: Any, x: Any) -> Any:
        def layer(below: Any, now: Any) -> Any:
            w, u, h = now
            h = 0.5 * h + jnp.tanh(below @ w + h @ u)
            return below + h, h

        above, hs = jax.lax.scan(layer, x @ p["e"], (p["w"], p["u"], hs))
        return hs, above

    gates = {k: r(f, n) for k in ("wz", "wr", "wh")} | {k: r(n, n) for k in ("uz", "ur", "uh")}
    mixing = {
        "lstm": Case(
            lstm, {"w": r(f, 4 * n), "u": r(n, 4 * n), "b": r(4 * n), "r1": r(n, 6), "r2": r(6, 2)}, (r(n), r(n))
        ),
        "gru": Case(gru, gates, r(n)),
        "layer_norm": Case(normalised, {"w": r(f, n), "u": r(n, n), "s": r(n), "b": r(n), "q": r(f)}, r(n)),
        "stack": Case(stack, {"w1": r(f, n), "u1": r(n, n), "w2": r(n, 4), "u2": r(4, 4), "r": r(4, 2)}, (r(n), r(4))),
        "complex_dense": Case(complex_dense, {"w": complex_(f, n), "u": complex_(n, n)}, complex_(n)),
        "alif": Case(alif, {"w": s(f, n), "u": s(n, n), "r": s(n, 2)}, (s(n), s(n))),
        "layers_by_scan": Case(layers_by_scan, {"e": t(f, n), "w": t(2, n, n), "u": t(2, n, n)}, t(2, n)),
    }
    return unit_wise, mixing


def batch_of(case: Case) -> tuple[Any, Any]:
    """A carry for a batch, and inputs ``(time, batch, features)``."""
    r = random(1)
    carry = jax.tree.map(
        lambda a: jnp.broadcast_to(a, (BATCH, *a.shape)) + r(BATCH, *a.shape).astype(a.dtype), case.carry
    )
    return carry, r(STEPS, BATCH, FEATURES)


def spikes(case: Case, carry: Any, inputs: Any) -> Any:
    """The spikes of a spiking case, ``(time, batch, units)``: its outputs with a readout that changes nothing."""
    params = {**case.params, "r": jnp.eye(UNITS)}
    return jax.lax.scan(lambda c, x: jax.vmap(lambda c, x: case.step(params, c, x))(c, x), carry, inputs)[1]


def some_resets() -> Any:
    """Where new sequences start: some rows, part-way."""
    return jnp.asarray(np.random.default_rng(2).random((STEPS, BATCH)) < 0.2)


def loss_of(outputs: list[Any]) -> Any:
    """A loss that is a sum over steps."""
    return sum(jnp.sum(jnp.sin(jnp.real(o))) for o in outputs)


def sequence_loss(case: Case, params: Any, carry: Any, inputs: Any, reset: Any = None) -> Any:
    """The loss of a whole sequence, by the loop that defines it."""

    def step(state: Any, now: Any) -> Any:
        x, fresh = now
        if fresh is not None:
            state = jax.tree.map(
                lambda a, b: jnp.where(fresh.reshape(-1, *[1] * (a.ndim - 1)), b[None], a), state, case.carry
            )
        state, y = jax.vmap(lambda c, x: case.step(params, c, x))(state, x)
        return state, loss_of(jax.tree.leaves(y))

    return jax.lax.scan(step, carry, (inputs, reset))[1].sum()


def bptt(case: Case, carry: Any, inputs: Any, reset: Any = None) -> Any:
    """The gradient of the whole sequence, by differentiating that loop."""
    return hurried(jax.grad(lambda params: sequence_loss(case, params, carry, inputs, reset)))(case.params)


def fresh(rule: Any, plan: RulePlan, dtype: Any = None) -> Any:
    """Traces before the first step, made in one go."""
    return hurried(lambda: rule.init(plan, BATCH, dtype))()


def online(
    case: Case,
    rule: Any,
    window: int,
    carry: Any,
    inputs: Any,
    reset: Any = None,
    credit: str = "window",
    trace_dtype: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """The sum of a rule's gradients over a sequence cut into windows, and the traces after it."""
    graph = bc.compile_step_graph(case.step, case.params, case.carry, inputs[0, 0])
    plan = RulePlan.of(graph)
    leaves, initial = jax.tree.leaves(case.params), jax.tree.leaves(case.carry)
    run = online_gradient if credit == "window" else step_online_gradient

    @hurried
    def step(states: Any, traces: Any, x: Any, reset: Any) -> Any:
        return run(
            plan, rule, lambda w: (loss_of(w.outputs), None), leaves, states, traces, [x], reset, initial, **options
        )

    states, traces = jax.tree.leaves(carry), fresh(rule, plan, trace_dtype)
    total = [jnp.zeros_like(leaf) for leaf in leaves]
    for start in range(0, inputs.shape[0], window):
        now = slice(start, start + window)
        result = step(states, traces, inputs[now], None if reset is None else reset[now])
        assert jax.tree.map(jax.typeof, traces) == jax.tree.map(jax.typeof, result.traces)
        states, traces = result.states, result.traces
        total = [a + b for a, b in zip(total, result.gradients, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(case.params), total), traces


def assert_close(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """Relative to the largest entry of each leaf; leaves of zeros are refused."""
    paths = jax.tree_util.tree_leaves_with_path(expected)
    for (path, want), got in zip(paths, jax.tree.leaves(found), strict=True):
        scale = float(jnp.abs(want).max())
        assert scale > 0, f"nothing to compare at {jax.tree_util.keystr(path)}"
        error = float(jnp.abs(want - got).max()) / scale
        assert error < tolerance, f"{jax.tree_util.keystr(path)}: {error:.1e}"
