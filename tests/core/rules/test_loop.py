"""A loop differentiated at all steps at once: the same numbers as the plain one, and less to do step by step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from braintrace_core.compiler.jaxpr_tools import walk
from braintrace_core.rules.loop import scan_at_once

STEPS, FEW, UNITS = 5, 4, 3  # the few are written out


@jax.custom_vjp
def halved(x):
    return x


halved.defvjp(lambda x: (x, None), lambda _, g: (0.5 * g,))


@jax.custom_jvp
def fired(x):
    return (x > 0).astype(x.dtype)


fired.defjvp(lambda primals, tangents: (fired(*primals), tangents[0] / (1 + jnp.abs(primals[0]))))


def gated(p, states, now):
    (h,), (x, _) = states, now
    y = h @ p["recurrent"] + x
    z = jax.nn.sigmoid(y * p["gain"])
    return [(1 - z) * h + z * jnp.tanh(y)], [h, y]


def counted(p, states, now):
    """A state that has no derivative, and one that is kept but not followed."""
    (n, h), (x, _) = states, now
    new = jnp.sin(h * n.astype(h.dtype)) + x * p["gain"]
    return [n + 1, new], [n, h, jnp.where(n > 1, new, 0.0), n]


def restarted(p, states, now):
    """A new sequence starts at some steps: what is kept are the states that it starts from."""
    (h,), (x, reset) = states, now
    h = jnp.where(reset, p["gain"], h)
    return [jnp.exp(-h) * x], [h]


def spiking(p, states, now):
    (v,), (x, _) = states, now
    s = fired(v - 0.1)
    return [0.9 * (v - s) + jnp.concatenate([x, s]) @ p["into"]], [v, s]


def inner(p, states, now):
    """A loop inside of the step."""
    (h,), (x, _) = states, now
    h_new, _ = lax.scan(lambda h, g: (jnp.tanh(h * g + x), None), h, p["recurrent"])
    return [h_new], [h, jnp.ones_like(h)]


def noisy(p, states, now):
    """A key among the states."""
    (key, h), (x, _) = states, now
    after, own = jax.random.split(key)
    return [after, jnp.tanh(h * p["gain"] + x * jax.random.normal(own, x.shape, x.dtype))], [key, h]


CELLS = [gated, counted, restarted, spiking, inner, noisy]


def problem(cell, steps):
    keys = iter(jax.random.split(jax.random.key(0), 8))
    p = {
        "recurrent": jax.random.normal(next(keys), (UNITS, UNITS)),
        "gain": jax.random.normal(next(keys), (UNITS,)),
        "into": jax.random.normal(next(keys), (2 * UNITS, UNITS)),
    }
    h = jax.random.normal(next(keys), (UNITS,))
    states = [*{counted: [jnp.zeros((), jnp.int32)], noisy: [jax.random.key(1)]}.get(cell, []), h]
    x = jax.random.normal(next(keys), (steps, UNITS))
    return p, states, x, jnp.arange(steps) == 2


def total(cell, scan, steps=STEPS):
    """A scalar of all that a loop finds, of parameters, the float state and the inputs."""
    p, states, x, reset = problem(cell, steps)

    def of(p, h, x):
        after, kept = scan(lambda states, now: cell(p, states, now), [*states[:-1], h], (x, reset), steps)
        leaves = [leaf for leaf in (*after, *kept) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return sum(jnp.sum(jnp.cos(leaf + i)) for i, leaf in enumerate(leaves))

    return of, (p, states[-1], x)


def plain(body, states, over, steps):
    """The loop that it stands for. (A second derivative of `lax.scan` loses a rule that stands in a rule.)"""
    kept = []
    for t in range(steps):
        states, now = body(states, jax.tree.map(lambda a, t=t: a[t], over))
        kept.append(now)
    return states, [jnp.stack(of) for of in zip(*kept, strict=True)]


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12), found, expected)


@pytest.mark.parametrize("steps", [FEW, STEPS])
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.__name__)
@pytest.mark.parametrize("wrt", [(0, 1, 2), (1,), (2,)], ids=["all", "state", "inputs"])
def test_gradients_are_those_of_the_plain_loop(cell, wrt, steps):
    (ours, args), (theirs, _) = total(cell, scan_at_once, steps), total(cell, plain, steps)
    close(jax.jit(jax.value_and_grad(ours, wrt))(*args), jax.value_and_grad(theirs, wrt)(*args))


@pytest.mark.parametrize("steps", [FEW, STEPS])
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.__name__)
def test_tangents_and_second_derivatives_too(cell, steps):
    (ours, args), (theirs, _) = total(cell, scan_at_once, steps), total(cell, plain, steps)
    moves = jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), args)
    close(jax.jvp(ours, args, moves), jax.jvp(theirs, args, moves))

    def slope(of):
        return lambda *args: sum(jnp.vdot(g, g) for g in jax.tree.leaves(jax.grad(of)(*args)))

    close(jax.grad(slope(ours))(*args), jax.grad(slope(theirs))(*args))


def test_a_derivative_rule_without_tangents_is_kept():
    def cell(p, states, now):
        return [jnp.tanh(halved(states[0]) @ p["recurrent"] + now[0])], [states[0]]

    (ours, args), (theirs, _) = total(cell, scan_at_once), total(cell, plain)
    close(jax.grad(ours, (0, 1, 2))(*args), jax.grad(theirs, (0, 1, 2))(*args))


def test_a_batch_of_loops():
    (ours, args), (theirs, _) = total(gated, scan_at_once), total(gated, plain)
    many = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), args)
    close(jax.vmap(jax.grad(ours))(*many), jax.vmap(jax.grad(theirs))(*many))


def test_nothing_is_computed_step_by_step_that_need_not_be():
    """The loop keeps the state and the product; the way back has no function of one unit, and one product."""
    of, (p, h, x) = total(gated, scan_at_once)
    # A gradient with respect to the inputs: weights are constants.
    loops = [eqn for eqn in walk(jax.make_jaxpr(jax.grad(of, 2))(p, h, x)) if eqn.primitive.name == "scan"]
    there, back = (sorted(eqn.primitive.name for eqn in walk(loop.params["jaxpr"])) for loop in loops)
    assert (there.count("logistic"), there.count("tanh"), there.count("dot_general")) == (1, 1, 1)
    assert (back.count("logistic"), back.count("tanh"), back.count("dot_general")) == (0, 0, 1)
    assert len(loops[0].outvars) == 1 + 2


@pytest.mark.parametrize(("steps", "loops"), [(FEW, 0), (STEPS, 2)])
def test_few_steps_are_written_out(steps, loops):
    of, args = total(gated, scan_at_once, steps)
    assert jax.jit(jax.grad(of)).lower(*args).as_text().count("stablehlo.while") == loops


def test_what_is_kept_is_not_computed_again():
    """The product over all steps would be a second one: its result was kept."""
    of, args = total(gated, scan_at_once)
    jaxpr = jax.make_jaxpr(jax.grad(of, 2))(*args)
    assert sum(eqn.primitive.name == "dot_general" for eqn in walk(jaxpr)) == 2
