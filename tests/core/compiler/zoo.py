"""Step functions that between them use everything the compiler knows how to read.

A model says where its operators are by passing their results through ``op``: ``op.cut`` for operators that mix units,
``op.mark`` for parameters that act unit by unit. Compiled, these calls do nothing; the oracle differentiates at them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, nn

from braintrace_core import lora_matmul, register_primitive, sparse_matmul
from tests.core.compiler.oracle import PLAIN

N = 5  # units
IN = 3  # inputs


@dataclass(frozen=True)
class Model:
    """A step function, values to run it on, and what the compiler must find in it.

    ``operators`` names for each ``op.cut`` or ``op.mark`` the primitive and the parameters behind it, in the order of
    its operands; ``passes`` is how many passes of reverse differentiation the factors take. ``written`` is the step as
    a user would write it, where that differs (``step`` is then its straight-line equivalent). ``home`` gives the unit
    that the elements of a result belong to where they act on several. ``groups`` lists the leaves of the carry that
    belong together. ``partial`` are parameters that also act otherwise than through their relations.
    """

    step: Callable[..., Any]
    params: Any
    carry: Any
    inputs: tuple[Any, ...]
    operators: dict[str, str]
    passes: int = 1
    written: Callable[..., Any] | None = None
    home: dict[str, Any] = field(default_factory=dict)
    groups: tuple[tuple[int, ...], ...] = ((0,),)
    partial: frozenset[str] = frozenset()
    tolerance: float = 1e-12

    @property
    def function(self) -> Callable[..., Any]:
        """``step(params, carry, *inputs)`` as it is compiled."""
        if self.written is not None:
            return self.written
        return lambda params, carry, *inputs: self.step(params, carry, *inputs, PLAIN)

    def values(self, seed: int = 0) -> tuple[Any, tuple[Any, ...]]:
        """Another carry and other inputs of the same kind; those of ``seed=0`` are the model's own."""
        if seed == 0:
            return self.carry, self.inputs
        rng = np.random.default_rng(seed)

        def other(leaf):
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                return jnp.asarray(rng.normal(size=leaf.shape) + 1j * rng.normal(size=leaf.shape), leaf.dtype)
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                return jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)
            return leaf

        return jax.tree.map(other, (self.carry, self.inputs))


class Numbers:
    """Reproducible numbers, of a size at which nothing saturates."""

    def __init__(self, seed: int = 7) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, *shape: int, dtype: Any = jnp.float64) -> jax.Array:
        if jnp.issubdtype(dtype, jnp.complexfloating):
            return jnp.asarray(self.rng.normal(size=shape) + 1j * self.rng.normal(size=shape), dtype) * 0.5
        return jnp.asarray(0.7 * self.rng.normal(size=shape), dtype)


ZOO: dict[str, Model] = {}


def model(operators: dict[str, str], **expected: Any) -> Callable[..., Any]:
    """Enter a builder ``make(numbers) -> (step, params, carry)`` or ``(..., inputs)`` into the zoo.

    ``step.written``, if there is one, is the step as a user would write it.
    """

    def enter(make):
        step, params, carry, *rest = make(Numbers())
        inputs = rest[0] if rest else (Numbers(8)(IN),)
        written = getattr(step, "written", None)
        ZOO[make.__name__] = Model(step, params, carry, inputs, operators, written=written, **expected)
        return make

    return enter


def both(h):
    """``(carry, out)`` of a cell whose output is its state."""
    return h, h


def normed(z):
    centred = z - z.mean()
    return centred / jnp.sqrt((centred * centred).mean() + 1e-3)


# Dense layers, gates


@model({"w": "etp_mv w", "u": "etp_mv u", "b": "etp_elemwise b"})
def vanilla(r):
    def step(p, h, x, op):
        drive = op.cut("w", x @ p["w"]) + op.cut("u", h @ p["u"])
        return both(jnp.tanh(drive + op.mark("b", p["b"])))

    return step, {"w": r(IN, N), "u": r(N, N), "b": r(N)}, r(N)


@model({"w": "etp_mv w b", "u": "etp_mv u"})
def bias_joins_its_product(r):
    def step(p, h, x, op):
        return both(0.3 * h + jnp.tanh(op.cut("w", x @ p["w"] + p["b"]) + op.cut("u", h @ p["u"])))

    return step, {"w": r(IN, N), "u": r(N, N), "b": r(N)}, r(N)


@model({"w": "etp_mv w", "t": "etp_elemwise t"})
def threshold_is_subtracted(r):
    def step(p, h, x, op):
        return both(0.3 * h + jnp.tanh(op.cut("w", x @ p["w"]) - op.mark("t", p["t"])))

    return step, {"w": r(IN, N), "t": r(N)}, r(N)


@model({"w": "etp_mv w", "v": "etp_mv v"})
def weight_on_the_left(r):
    def step(p, h, x, op):
        return both(0.3 * h + jnp.tanh(op.cut("w", p["w"] @ x) + op.cut("v", x @ p["v"].T)))

    return step, {"w": r(N, IN), "v": r(N, IN)}, r(N)


@model({"w": "etp_mv w", "u": "etp_mv u", "b": "etp_elemwise b"}, passes=2, groups=((0, 1),))
def lstm_fused(r):
    def step(p, carry, x, op):
        h, c = carry
        drive = op.cut("w", x @ p["w"]) + op.cut("u", h @ p["u"]) + op.mark("b", p["b"])
        i, f, g, o = jnp.split(drive, 4)
        c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
        h = nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return step, {"w": r(IN, 4 * N), "u": r(N, 4 * N), "b": r(4 * N)}, (r(N), r(N))


@model({k: f"etp_mv {k} b{k}" for k in "ifgo"}, passes=2, groups=((0, 1),))
def lstm_split(r):
    def step(p, carry, x, op):
        h, c = carry
        both_ = jnp.concatenate([x, h])
        i, f, g, o = (op.cut(k, both_ @ p[k] + p["b" + k]) for k in "ifgo")
        c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
        h = nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return step, {k: r(IN + N, N) for k in "ifgo"} | {"b" + k: r(N) for k in "ifgo"}, (r(N), r(N))


@model({"w": "etp_mv w b", "u": "etp_mv u d"})
def gru_reset_after(r):
    def step(p, h, x, op):
        a, b = op.cut("w", x @ p["w"] + p["b"]), op.cut("u", h @ p["u"] + p["d"])
        (ar, az, an), (br, bz, bn) = jnp.split(a, 3), jnp.split(b, 3)
        z = nn.sigmoid(az + bz)
        return both((1 - z) * jnp.tanh(an + nn.sigmoid(ar + br) * bn) + z * h)

    return step, {"w": r(IN, 3 * N), "u": r(N, 3 * N), "b": r(3 * N), "d": r(3 * N)}, r(N)


@model({"z": "etp_mv z", "h": "etp_mv h"}, partial=frozenset({"r"}))
def gru_reset_before(r):
    def step(p, h, x, op):
        z = nn.sigmoid(op.cut("z", jnp.concatenate([x, h]) @ p["z"]))
        reset = nn.sigmoid(jnp.concatenate([x, h]) @ p["r"])
        return both((1 - z) * h + z * jnp.tanh(op.cut("h", jnp.concatenate([x, reset * h]) @ p["h"])))

    return step, {k: r(IN + N, N) for k in "zrh"}, r(N)


@model({"w": "etp_mv w", "v": "etp_mv v"}, passes=2, groups=((0,), (1,)))
def two_layers(r):
    def step(p, carry, x, op):
        a, b = carry
        a = jnp.tanh(op.cut("w", x @ p["w"]) + 0.5 * a)
        b = jnp.tanh(op.cut("v", a @ p["v"]) + 0.5 * b)
        return (a, b), b

    return step, {"w": r(IN, N), "v": r(N, N)}, (r(N), r(N))


@model({"w": "etp_mv w", "v": "etp_mv v"}, passes=2, groups=((0, 1),), partial=frozenset({"w"}))
def residual_layers(r):
    def step(p, carry, x, op):
        a, b = carry
        a = jnp.tanh(op.cut("w", x @ p["w"]))
        b = jnp.tanh(op.cut("v", a @ p["v"]) + 0.5 * b) + a
        return (a, b), b

    return step, {"w": r(IN, N), "v": r(N, N)}, (r(N), r(N))


@model({"w": "etp_mv w"}, passes=1)
def result_is_the_state(r):
    def step(p, h, x, op):
        h = op.cut("w", jnp.concatenate([x, h]) @ p["w"])
        return h, jnp.tanh(h)

    return step, {"w": r(IN + N, N)}, r(N)


@model({"w": "etp_mv w"}, passes=2, groups=((0, 1),))
def two_names_for_one_value(r):
    def step(p, carry, x, op):
        h = jnp.tanh(op.cut("w", jnp.concatenate([x, carry[0], carry[1]]) @ p["w"]))
        return (h, h), h

    return step, {"w": r(IN + 2 * N, N)}, (r(N), r(N))


# Tails


@model({"w": "etp_mv w"})
def rolled(r):
    return lambda p, h, x, op: both(jnp.tanh(jnp.roll(op.cut("w", x @ p["w"]), 2) + 0.5 * h)), {"w": r(IN, N)}, r(N)


PERMUTATION = np.array([3, 1, 4, 0, 2])


@model({"w": "etp_mv w"})
def permuted(r):
    def step(p, h, x, op):
        return both(jnp.tanh(op.cut("w", x @ p["w"])[PERMUTATION] + 0.5 * h))

    return step, {"w": r(IN, N)}, r(N)


@model({"w": "etp_mv w"})
def reversed_and_transposed(r):
    def step(p, h, x, op):
        y = op.cut("w", x @ p["w"]).reshape(2, 3).T[::-1, :]
        return both(jnp.tanh(y + 0.5 * h))

    return step, {"w": r(IN, 6)}, r(3, 2)


@model({"a": "etp_mv a", "b": "etp_mv b"})
def concatenated_results(r):
    def step(p, h, x, op):
        y = jnp.concatenate([op.cut("a", x @ p["a"]), op.cut("b", x @ p["b"])])
        return both(jnp.tanh(y + 0.5 * h))

    return step, {"a": r(IN, 2), "b": r(IN, 3)}, r(N)


@model({"w": "etp_mv w"})
def padded(r):
    def step(p, h, x, op):
        return both(jnp.tanh(jnp.pad(op.cut("w", x @ p["w"]), (1, 2)) + 0.5 * h))

    return step, {"w": r(IN, 2)}, r(N)


@model({"w": "etp_mv w"})
def summed_branches(r):
    def step(p, h, x, op):
        return both(jnp.tanh(op.cut("w", x @ p["w"]).reshape(N, 4).sum(-1) + 0.5 * h))

    return step, {"w": r(IN, 4 * N)}, r(N)


@model({"w": "etp_mv w"})
def maxout(r):
    def step(p, h, x, op):
        return both(0.5 * h + op.cut("w", x @ p["w"]).reshape(N, 2).max(-1))

    return step, {"w": r(IN, 2 * N)}, r(N)


@model({"w": "etp_mv w", "v": "etp_mv v"})
def scattered(r):
    def step(p, h, x, op):
        h = (0.5 * h).at[np.array([0, 2])].add(op.cut("w", x @ p["w"]))
        h = h.at[np.array([4, 1])].set(op.cut("v", x @ p["v"]))
        return both(jnp.tanh(h))

    return step, {"w": r(IN, 2), "v": r(IN, 2)}, r(N)


@model({"w": "etp_mv w"})
def updated_in_place(r):
    def step(p, h, x, op):
        return both(lax.dynamic_update_slice(jnp.tanh(h), jnp.tanh(op.cut("w", x @ p["w"])), (1,)))

    return step, {"w": r(IN, 3)}, r(N)


@model({"w": "etp_mv w", "b": "etp_elemwise b"})
def chosen_and_clipped(r):
    def step(p, h, x, op):
        y = op.cut("w", x @ p["w"])
        y = jnp.where(jnp.asarray([True, False, True, False, True]), y, y * h)
        return both(nn.relu(jnp.clip(y, -0.6, 3.0) + 0.5 * h + op.mark("b", p["b"]) + 0.5))

    return step, {"w": r(IN, N), "b": r(N)}, r(N)


@model({"w": "etp_mv w"})
def no_derivative_on_one_path(r):
    def step(p, h, x, op):
        y = op.cut("w", x @ p["w"])
        return both(jnp.tanh(y) * 0.5 + jnp.round(h) + 0.1 * h * lax.stop_gradient(y))

    return step, {"w": r(IN, N)}, r(N)


@model({"w": "etp_mv w"}, passes=2, home={"w": np.arange(N)}, partial=frozenset("w"))
def spread_over_two_units_each(r):
    def step(p, h, x, op):
        return both(0.5 * h + jnp.tile(jnp.tanh(op.cut("w", x @ p["w"])), 2))

    return step, {"w": r(IN, N)}, r(2 * N)


# Units that act on one another


@model({"w": "etp_mv w"}, passes=3)
def rolled_state(r):
    def step(p, h, x, op):
        return both(jnp.tanh(op.cut("w", x @ p["w"]) + 0.5 * h + 0.3 * jnp.roll(h, 1)))

    return step, {"w": r(IN, N)}, r(N)


@model({"w": "etp_mv w"}, passes=3, home={"w": np.arange(N)}, partial=frozenset("w"))
def result_and_its_neighbour(r):
    def step(p, h, x, op):
        y = op.cut("w", x @ p["w"])
        return both(jnp.tanh(jnp.roll(y, 1) + 0.5 * y) + 0.5 * h)

    return step, {"w": r(IN, N)}, r(N)


def _mean(r, n):
    def step(p, h, x, op):
        return both(jnp.tanh(op.cut("w", x @ p["w"]) + 0.5 * h - h.mean()))

    return step, {"w": r(IN, n)}, r(n)


@model({"w": "etp_mv w"}, passes=N)
def mean_over_units(r):
    return _mean(r, N)


@model({"w": "etp_mv w"}, passes=20)
def mean_over_many_units(r):
    return _mean(r, 20)


def _layer_norm(r, n):
    def step(p, h, x, op):
        z = normed(op.cut("w", x @ p["w"]) + op.mark("d", p["d"]) * h)
        return both(jnp.tanh(op.mark("s", p["s"]) * z + op.mark("b", p["b"])))

    return step, {"w": r(IN, n), "d": r(n), "s": r(n), "b": r(n)}, r(n)


LAYER_NORM = {"w": "etp_mv w", "d": "etp_elemwise d", "s": "etp_elemwise s", "b": "etp_elemwise b"}


@model(LAYER_NORM, passes=N, home={"w": np.arange(N), "d": np.arange(N)}, partial=frozenset("wd"))
def layer_norm(r):
    return _layer_norm(r, N)


@model(LAYER_NORM, passes=20, home={"w": np.arange(20), "d": np.arange(20)}, partial=frozenset("wd"))
def layer_norm_of_many_units(r):
    return _layer_norm(r, 20)


@model({"w": "etp_mv w"}, passes=N, home={"w": np.roll(np.arange(N), 2)}, partial=frozenset("w"))
def layer_norm_then_roll(r):
    def step(p, h, x, op):
        return both(jnp.tanh(jnp.roll(normed(op.cut("w", x @ p["w"])), -2) + 0.5 * h))

    return step, {"w": r(IN, N)}, r(N)


def _lstm_normed(r, n):
    def step(p, carry, x, op):
        h, c = carry
        i, f, g, o = jnp.split(normed(op.cut("w", jnp.concatenate([x, h]) @ p["w"])), 4)
        c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
        h = nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return step, {"w": r(IN + n, 4 * n)}, (r(n), r(n))


def _normed_gates(n):
    return {"passes": 2 * n, "groups": ((0, 1),), "home": {"w": np.arange(4 * n) % n}, "partial": frozenset("w")}


@model({"w": "etp_mv w"}, **_normed_gates(3))
def lstm_with_normed_gates(r):
    return _lstm_normed(r, 3)


@model({"w": "etp_mv w"}, **_normed_gates(6))
def lstm_with_more_normed_gates(r):
    return _lstm_normed(r, 6)


@model({"w": "etp_mv w"}, passes=N, home={"w": np.arange(N)}, partial=frozenset("w"))
def softmax_over_units(r):
    return lambda p, h, x, op: both(0.5 * h + nn.softmax(op.cut("w", x @ p["w"]))), {"w": r(IN, N)}, r(N)


@model({"w": "etp_mv w"}, passes=2, home={"w": np.arange(8)}, partial=frozenset("w"))
def softmax_within_pairs(r):
    def step(p, h, x, op):
        return both(0.5 * h + nn.softmax(op.cut("w", x @ p["w"]).reshape(4, 2) * h, axis=-1))

    return step, {"w": r(IN, 8)}, r(4, 2)


@model({"w": "etp_mv w"}, passes=N, home={"w": np.arange(N)}, partial=frozenset("w"))
def running_sum_over_units(r):
    return lambda p, h, x, op: both(0.5 * h + jnp.cumsum(op.cut("w", x @ p["w"]))), {"w": r(IN, N)}, r(N)


# Several states


@model({"w": "etp_mv w"}, passes=2, groups=((0, 1),))
def two_states_in_one_equation(r):
    def step(p, carry, x, op):
        v, a = carry
        new_v = jnp.tanh(v - a) + op.cut("w", x @ p["w"])
        return (new_v, 0.9 * a + 0.1 * jnp.tanh(v)), new_v

    return step, {"w": r(IN, N)}, (r(N), r(N))


@model({"w": "etp_mv w"}, passes=2, groups=((0, 1),))
def synapse_and_membrane(r):
    def step(p, carry, x, op):
        g, v = carry
        g = 0.8 * g + op.cut("w", x @ p["w"])
        v = 0.9 * v + g * (1.0 - v)
        return (g, v), jnp.tanh(v)

    return step, {"w": r(IN, N)}, (r(N), r(N))


@model({"w": "etp_mv w"}, passes=2, groups=((0,), (1,)))
def states_coupled_by_a_mean(r):
    def step(p, carry, x, op):
        a, b = carry
        return (jnp.tanh(op.cut("w", x @ p["w"]) + 0.5 * a - b.mean()), 0.9 * b + 0.1), a

    return step, {"w": r(IN, N)}, (r(N), r(N))


@model({"w": "etp_mv w"}, passes=2, groups=((0, 1),), tolerance=1e-6)
def states_of_two_precisions(r):
    def step(p, carry, x, op):
        h, c = carry
        c = 0.5 * c + op.cut("w", jnp.concatenate([x, h.astype(jnp.float64)]) @ p["w"])
        h = jnp.tanh(c).astype(jnp.float32)
        return (h, c), c

    return step, {"w": r(IN + N, N)}, (r(N, dtype=jnp.float32), r(N))


@model({"w": "etp_mv w"}, groups=((2,),))
def carried_along(r):
    """Leaves of the carry that are no hidden states: a counter and a random key."""

    def step(p, carry, x, op):
        key, use = jax.random.split(carry["key"])
        h = 0.5 * carry["last"] + op.cut("w", x @ p["w"]) + 0.1 * jax.random.normal(use, (N,))
        return {"key": key, "count": carry["count"] + 1, "last": h}, h

    return step, {"w": r(IN, N)}, {"key": jax.random.key(3), "count": jnp.asarray(0), "last": r(N)}


# Parameters that act unit by unit


@model({"d": "etp_elemwise d", "w": "etp_mv w"})
def indrnn(r):
    def step(p, h, x, op):
        return both(jnp.tanh(op.mark("d", p["d"]) * h + op.cut("w", x @ p["w"])))

    return step, {"d": r(N), "w": r(IN, N)}, r(N)


@model({"a": "etp_elemwise a", "w": "etp_mv w"})
def scalar_for_all_units(r):
    def step(p, h, x, op):
        a = op.mark("a", jnp.broadcast_to(nn.sigmoid(p["a"]), h.shape))
        return both(a * h + op.cut("w", x @ p["w"]))

    step.written = lambda p, h, x: both(nn.sigmoid(p["a"]) * h + x @ p["w"])
    return step, {"a": r(), "w": r(IN, N)}, r(N)


@model({"w": "etp_mm w", "b": "etp_elemwise b"})
def bias_with_axes_of_one(r):
    def step(p, h, x, op):
        b = op.mark("b", jnp.broadcast_to(p["b"], h.shape))
        return both(jnp.tanh(op.cut("w", x @ p["w"]) + 0.5 * h + b))

    return step, {"w": r(IN, N), "b": r(1, N)}, r(4, N), (r(4, IN),)


@model({"w": "etp_mm w b"})
def leading_axes(r):
    def step(p, h, x, op):
        y = op.cut("w", x @ p["w"] + jnp.broadcast_to(p["b"], h.shape))
        return both(0.5 * h + jnp.tanh(y))

    return step, {"w": r(IN, N), "b": r(N)}, r(2, 3, N), (r(2, 3, IN),)


@model({"d": "etp_elemwise d", "w": "etp_mv w"}, passes=2, groups=((0, 1),))
def one_parameter_on_two_states(r):
    def step(p, carry, x, op):
        a, b = carry
        d = op.mark("d", p["d"])
        a = d * a + op.cut("w", x @ p["w"])
        return (a, d * b + a), b

    return step, {"d": r(N), "w": r(IN, N)}, (r(N), r(N))


@model({"h0": "etp_elemwise h0", "w": "etp_mv w"})
def learnt_start(r):
    def step(p, h, x, op):
        h = jnp.where(x[0] > 100.0, op.mark("h0", p["h0"]), h)
        return both(jnp.tanh(op.cut("w", x @ p["w"]) + 0.5 * h))

    return step, {"h0": r(N), "w": r(IN, N)}, r(N)


@model({"s": "etp_elemwise s", "w": "etp_mv w"}, passes=2, groups=((0,), (1,)))
def state_made_of_a_parameter(r):
    def step(p, carry, x, op):
        h = 0.5 * carry[0] + op.cut("w", jnp.concatenate([x, carry[1]]) @ p["w"])
        return (h, op.mark("s", jnp.tanh(p["s"]))), h

    return step, {"s": r(2), "w": r(IN + 2, N)}, (r(N), r(2))


gain_p = register_primitive("etp_test_gain", lambda x, gain: x * gain, trainable={"gain": 1}, gradient_enabled=True)


@model({"g": "etp_test_gain g", "w": "etp_mv w"})
def operator_that_lets_credit_pass(r):
    def step(p, h, x, op):
        return both(jnp.tanh(op.mark("g", gain_p.bind(0.5 * h, p["g"])) + op.cut("w", x @ p["w"])))

    return step, {"g": r(N), "w": r(IN, N)}, r(N)


# What stands between a parameter and its operator


@model({"w": "etp_mv w"})
def doubled_weight(r):
    return lambda p, h, x, op: both(0.5 * h + op.cut("w", x @ (2 * p["w"]))), {"w": r(IN, N)}, r(N)


@model({"w": "etp_mv w", "v": "etp_mv v"})
def absolute_and_masked_weights(r):
    mask = jnp.asarray(np.arange(IN * N).reshape(IN, N) % 2, jnp.float64)

    def step(p, h, x, op):
        y = op.cut("w", x @ jnp.abs(p["w"])) + op.cut("v", x @ (p["v"] * mask))
        return both(jnp.tanh(0.5 * h + y))

    return step, {"w": r(IN, N), "v": r(IN, N)}, r(N)


@model({"w": "etp_mv w1 w2"})
def sum_of_weights(r):
    def step(p, h, x, op):
        return both(jnp.tanh(0.5 * h + op.cut("w", x @ (p["w1"] + 2 * p["w2"]))))

    return step, {"w1": r(IN, N), "w2": r(IN, N)}, r(N)


@model({"w": "etp_mv w1 w2"})
def weights_side_by_side(r):
    def step(p, h, x, op):
        y = op.cut("w", x @ jnp.concatenate([p["w1"], p["w2"]], axis=1))
        return both(jnp.tanh(0.5 * h + y))

    return step, {"w1": r(IN, 2), "w2": r(IN, 3)}, r(N)


@model({"w": "etp_mv g v"})
def weight_norm(r):
    def step(p, h, x, op):
        direction = p["v"] / jnp.sqrt((p["v"] ** 2).sum(axis=0, keepdims=True))
        return both(jnp.tanh(0.5 * h + op.cut("w", x @ (jnp.broadcast_to(p["g"], (IN, N)) * direction))))

    return step, {"g": r(N), "v": r(IN, N)}, r(N)


@model({"first": "etp_mv w", "second": "etp_mv w"})
def weight_used_twice(r):
    def step(p, h, x, op):
        y = jnp.tanh(op.cut("first", x @ p["w"])) + op.cut("second", jnp.cos(x) @ p["w"])
        return both(0.5 * h + y)

    return step, {"w": r(IN, N)}, r(N)


@model({"w": "etp_mv a b w"})
def low_rank_correction(r):
    def step(p, h, x, op):
        return both(jnp.tanh(0.5 * h + op.cut("w", x @ (p["w"] + p["a"] @ p["b"]))))

    return step, {"w": r(IN, N), "a": r(IN, 2), "b": r(2, N)}, r(N)


@model({"w": "etp_lora_mv b a c"})
def lora(r):
    def step(p, h, x, op):
        return both(jnp.tanh(0.5 * h + op.cut("w", lora_matmul(x, p["b"], p["a"], p["c"], alpha=0.5))))

    return step, {"b": r(IN, 2), "a": r(2, N), "c": r(N)}, r(N)


@model({"w": "etp_sp_mv w"})
def sparse(r):
    structure = (np.array([0, 2, 1, 0, 2, 1]), np.array([1, 0, 3, 2, 4, 3]), (IN, N))

    def step(p, h, x, op):
        return both(jnp.tanh(0.5 * h + op.cut("w", sparse_matmul(x, p["w"], structure=structure))))

    return step, {"w": r(6)}, r(N)


@model({"w": "etp_einsum w"})
def heads(r):
    def step(p, h, x, op):
        return both(jnp.tanh(0.5 * h + op.cut("w", jnp.einsum("hi,hio->ho", x, p["w"]))))

    return step, {"w": r(2, IN, 4)}, r(2, 4), (r(2, IN),)


# Convolutions, tables


def _conv(x, kernel, layout, **options):
    return lax.conv_general_dilated(x[None], kernel, dimension_numbers=layout, **options)[0]


@model({"k": "etp_conv k", "b": "etp_elemwise b"})
def conv1d(r):
    def step(p, h, x, op):
        y = op.cut("k", _conv(x, p["k"], ("NWC", "WIO", "NWC"), window_strides=(1,), padding="SAME"))
        return both(0.5 * h + jnp.tanh(y + op.mark("b", jnp.broadcast_to(p["b"], y.shape))))

    return step, {"k": r(3, 2, 4), "b": r(4)}, r(6, 4), (r(6, 2),)


@model({"k": "etp_conv k b"})
def conv2d_with_bias(r):
    def step(p, h, x, op):
        y = lax.conv_general_dilated(x[None], p["k"], (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        y = op.cut("k", y + jnp.broadcast_to(p["b"], y.shape))[0]
        return both(0.5 * h + jnp.tanh(y))

    return step, {"k": r(3, 2, 2, 3), "b": r(3)}, r(2, 3, 3), (r(4, 3, 2),)


@model({"k": "etp_conv k"})
def grouped_conv_channels_first(r):
    def step(p, h, x, op):
        y = _conv(x, p["k"], ("NCHW", "OIHW", "NCHW"), window_strides=(1, 1), padding="VALID", feature_group_count=2)
        return both(0.5 * h + jnp.tanh(op.cut("k", y)))

    return step, {"k": r(4, 1, 2, 2)}, r(4, 3, 2), (r(2, 4, 3),)


@model({"e": "etp_embedding e", "d": "etp_elemwise d"})
def embedding_of_a_scalar(r):
    def step(p, h, token, op):
        return both(op.mark("d", p["d"]) * h + jnp.tanh(op.cut("e", p["e"][token])))

    return step, {"e": r(7, N), "d": r(N)}, r(N), (jnp.asarray(4),)


@model({"e": "etp_embedding e"})
def embedding_of_a_vector(r):
    def step(p, h, tokens, op):
        return both(0.5 * h + jnp.tanh(op.cut("e", jnp.take(p["e"], tokens, axis=0))))

    return step, {"e": r(7, N)}, r(3, N), (jnp.asarray([4, 0, 4]),)


@model({"row": "etp_elemwise e", "e": "etp_embedding e"})
def table_read_in_two_ways(r):
    def step(p, h, token, op):
        return both(0.5 * h * op.mark("row", p["e"][2]) + op.cut("e", p["e"][token]))

    return step, {"e": r(7, N)}, r(N), (jnp.asarray(5),)


# Control flow: the step is what it does, ``written`` how it is said


@model({"w0": "etp_mv w", "w1": "etp_mv w", "w2": "etp_mv w", "d": "etp_elemwise d"})
def scan_over_substeps(r):
    def step(p, h, x, op):
        d = op.mark("d", p["d"])
        for k in range(3):
            h = 0.5 * h + jnp.tanh(op.cut(f"w{k}", x @ p["w"]) + h * d)
        return both(h)

    def written(p, h, x):
        def substep(h, _):
            return 0.5 * h + jnp.tanh(x @ p["w"] + h * p["d"]), None

        return both(lax.scan(substep, h, None, length=3)[0])

    step.written = written
    return step, {"w": r(IN, N), "d": r(N)}, r(N)


@model({"w0": "etp_mv w b", "w1": "etp_mv w b", "w2": "etp_mv w b"}, partial=frozenset("wb"))
def scan_over_layers(r):
    def step(p, h, x, op):
        new = []
        for k in range(3):
            x = jnp.tanh(op.cut(f"w{k}", x @ p["w"][k] + p["b"][k]) + 0.5 * h[k])
            new.append(x)
        return jnp.stack(new), x

    def written(p, h, x):
        def layer(x, row):
            w, b, h = row
            h = jnp.tanh(x @ w + b + 0.5 * h)
            return h, h

        x, h = lax.scan(layer, x, (p["w"], p["b"], h))
        return h, x

    step.written = written
    return step, {"w": r(3, N, N), "b": r(3, N)}, r(3, N), (r(N),)


@model({"w0": "etp_mv w", "w1": "etp_mv w"}, partial=frozenset("w"))
def scan_backwards(r):
    def step(p, h, x, op):
        second = jnp.tanh(op.cut("w0", x[1] @ p["w"]) + 0.5 * h[1])
        first = jnp.tanh(op.cut("w1", (x[0] + second) @ p["w"]) + 0.5 * h[0])
        return both(jnp.stack([first, second]))

    def written(p, h, x):
        def one(later, row):
            x, h = row
            h = jnp.tanh((x + later) @ p["w"] + 0.5 * h)
            return h, h

        return both(lax.scan(one, jnp.zeros(N), (x, h), reverse=True)[1])

    step.written = written
    return step, {"w": r(N, N)}, r(2, N), (r(2, N),)


def _branches(p, h, x, op):
    return (
        lambda: x @ p["v"] * 0.3 + 0.1 * h if op is None else op.cut("v", x @ p["v"]) * 0.3 + 0.1 * h,
        lambda: jnp.tanh(x @ p["w"] + h) if op is None else jnp.tanh(op.cut("w", x @ p["w"]) + h),
        lambda: p["d"] * h if op is None else op.mark("d", p["d"]) * h,
    )


def _conditional(number, threshold):
    def make(r):
        def step(p, h, x, op):
            return both(_branches(p, h, x, op)[int(x[0] > threshold)]())

        def written(p, h, x):
            chosen = (x[0] > threshold).astype(int)
            branches = _branches(p, h, x, None)[:number]
            return both(lax.cond(chosen == 1, *branches[::-1]) if number == 2 else lax.switch(chosen, branches))

        step.written = written
        return step, {"w": r(IN, N), "v": r(IN, N)} | ({"d": r(N)} if number == 3 else {}), r(N)

    return make


for _name, _number, _threshold in [("cond_true", 2, -100.0), ("cond_false", 2, 100.0), ("switch", 3, -100.0)]:
    _operators = {"v": "etp_mv v", "w": "etp_mv w"} | ({"d": "etp_elemwise d"} if _number == 3 else {})
    _make = _conditional(_number, _threshold)
    _make.__name__ = _name
    model(_operators)(_make)


# Complex numbers, low precision, spikes


@model({"lambda": "etp_elemwise nu theta", "re": "etp_mv re", "im": "etp_mv im"}, passes=2, tolerance=1e-12)
def complex_lru(r):
    def step(p, h, x, op):
        decay = jnp.exp(lax.complex(-jnp.exp(p["nu"]), p["theta"]))
        drive = lax.complex(op.cut("re", x @ p["re"]), op.cut("im", x @ p["im"]))
        h = op.mark("lambda", decay) * h + drive
        return h, jnp.real(h)

    return step, {"nu": r(N), "theta": r(N), "re": r(IN, N), "im": r(IN, N)}, r(N, dtype=jnp.complex128)


@model({"w": "etp_mv w"}, passes=2)
def complex_but_not_holomorphic(r):
    def step(p, h, x, op):
        y = op.cut("w", x.astype(jnp.complex128) @ p["w"])
        h = jnp.conj(h) * 0.5 + jnp.tanh(jnp.abs(h)).astype(jnp.complex128) * y
        return h, jnp.imag(h)

    return step, {"w": r(IN, N, dtype=jnp.complex128)}, r(N, dtype=jnp.complex128)


@model({"w": "etp_mv w", "d": "etp_elemwise d"}, tolerance=0.05)
def half_precision(r):
    def step(p, h, x, op):
        return both(jnp.tanh(op.cut("w", x @ p["w"]) + op.mark("d", p["d"]) * h))

    half = jnp.bfloat16
    return step, {"w": r(IN, N, dtype=half), "d": r(N, dtype=half)}, r(N, dtype=half), (r(IN, dtype=half),)


@jax.custom_vjp
def spike_vjp(v):
    return (v > 0).astype(v.dtype)


spike_vjp.defvjp(lambda v: (spike_vjp(v), v), lambda v, g: (g / (1 + jnp.abs(v)) ** 2,))


@jax.custom_jvp
def spike_jvp(v):
    return jnp.heaviside(v, jnp.ones_like(v))


@spike_jvp.defjvp
def _(primals, tangents):
    (v,), (t,) = primals, tangents
    return spike_jvp(v), t * jnp.maximum(1 - jnp.abs(v), 0)


def _lif(spike):
    def make(r):
        def step(p, v, x, op):
            z = spike(v - 0.3)
            v = 0.9 * (v - z) + op.cut("w", jnp.concatenate([x, z]) @ p["w"])
            return v, spike(v - 0.3)

        return step, {"w": r(IN + N, N)}, jnp.asarray([0.1, 0.5, -0.3, 0.9, 0.2])

    return make


ZOO["spikes_custom_vjp"] = Model(*_lif(spike_vjp)(Numbers()), (Numbers(8)(IN),), {"w": "etp_mv w"})
ZOO["spikes_custom_jvp"] = Model(*_lif(spike_jvp)(Numbers()), (Numbers(8)(IN),), {"w": "etp_mv w"})
