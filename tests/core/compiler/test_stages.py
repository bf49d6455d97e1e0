"""Stacks run layer by layer: which states share a loop, what is made for all steps before it, and equal gradients."""

import math

import jax
import jax.numpy as jnp
import pytest

from braintrace_core import compile_step_graph
from braintrace_core.ops import is_boundary
from braintrace_core.rules import TBPTT, RulePlan
from tests.core.rules import zoo

N = zoo.UNITS


SHAPES = {"into": (zoo.FEATURES, N), "decay": (N,), "wide": (2 * N, N)}


def weights(*names):
    shapes = {name: SHAPES.get(name, (N, N)) for name in names}
    return {name: jnp.cos(jnp.arange(1.0, math.prod(shape) + 1)).reshape(shape) for name, shape in shapes.items()}


def leaky_stack(params, carry, x):
    a, b, c = carry
    a = 0.9 * a + x @ params["into"]
    b = params["decay"] * b + jnp.tanh(a) @ params["second"]
    c = params["decay"] * c + jnp.tanh(b) @ params["third"]
    return (a, b, c), c


def dense_stack(params, carry, x):
    a, b = carry
    a = jnp.tanh(x @ params["into"] + a @ params["first"])
    b = jnp.tanh(jnp.concatenate([a, b]) @ params["wide"])
    return (a, b), b


def skipping(params, carry, x):
    """The second layer sees the first as it was, the third both."""
    a, b, c = carry
    new = jnp.tanh(x @ params["into"] + a @ params["first"])
    b = 0.5 * b + a @ params["second"]
    c = 0.5 * c + (new + b) @ params["third"]
    return (new, b, c), c * new


def from_above(params, carry, x):
    a, b = carry
    a, b = 0.9 * a + x @ params["into"] + jnp.sin(b), 0.8 * b + jnp.tanh(a) @ params["second"]
    return (a, b), b


def from_far_above(params, carry, x):
    """Back to the first layer by way of a third, one step later each."""
    a, b, c = carry
    new = 0.9 * a + x @ params["into"] + jnp.sin(c)
    return (new, 0.8 * b + new @ params["second"], jnp.cos(b)), b


def without_product(params, carry, x):
    a, b = carry
    a = jnp.tanh(x @ params["into"] + a @ params["first"])
    b = 0.8 * b + params["decay"] * a
    return (a, b), b @ params["second"]


def side_by_side(params, carry, x):
    a, b, c = carry
    a = 0.9 * a + x @ params["into"]
    b = 0.7 * b + (x + 1) @ params["into"]
    c = 0.5 * c + (a * b) @ params["second"]
    return (a, b, c), c


def remembering(params, carry, x):
    """A state that is the input of the step before, and one that stays as it is."""
    a, last, fixed = carry
    a = 0.9 * a + (last + x) @ params["into"] + fixed
    return (a, x, fixed), a @ params["first"]


def vector(size=N):
    return jnp.sin(jnp.arange(1.0, size + 1))


# step, parameters, carry, the stage of each state, products inside loops.
STACKS = {
    "leaky stack": (leaky_stack, ("decay", "second", "third"), (N, N, N), [0, 1, 2], 0),
    "dense stack": (dense_stack, ("first", "wide"), (N, N), [0, 1], 2),
    "skipping": (skipping, ("first", "second", "third"), (N, N, N), [0, 1, 2], 1),
    "from above": (from_above, ("second",), (N, N), [0, 0], 1),
    "from far above": (from_far_above, ("second",), (N, N, N), [0, 0, 0], 1),
    "without a product": (without_product, ("decay", "first", "second"), (N, N), [0, 0], 1),
    "side by side": (side_by_side, ("second",), (N, N, N), [0, 0, 1], 0),
    "remembering": (remembering, ("first",), (N, zoo.FEATURES, N), [1, 0, 0], 0),
}


def case(name):
    step, names, sizes, *_ = STACKS[name]
    return zoo.Case(step, weights("into", *names), tuple(map(vector, sizes)))


def stages(net):
    x = jnp.zeros(zoo.FEATURES)
    return RulePlan.of(compile_step_graph(net.step, net.params, net.carry, x)).program.schedule.stages


@pytest.mark.parametrize("name", STACKS)
def test_states_that_a_product_stands_between_run_one_after_the_other(name):
    *_, expected, inside = STACKS[name]
    found = stages(case(name))
    assert [next(s for s, stage in enumerate(found) if k in stage.states) for k in range(len(expected))] == expected
    assert sum(is_boundary(eqn.primitive) for stage in found for eqn in stage.loop.eqns) == inside


@pytest.mark.parametrize(("name", "devices"), [*((name, 1) for name in STACKS), ("dense stack", 8)])
def test_the_gradient_is_that_of_the_loop(name, devices, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    net = case(name)
    carry, inputs = zoo.batch_of(net)
    reset = zoo.some_resets()
    found, _ = zoo.online(net, TBPTT(), zoo.STEPS, carry, inputs, reset)
    zoo.assert_close(found, zoo.bptt(net, carry, inputs, reset))


def test_a_deep_stack_has_a_loop_for_each_layer():
    def step(params, carry, x):
        new = []
        for weight, h in zip(params, carry, strict=True):
            x = jnp.tanh(0.9 * h + x @ weight)
            new.append(x)
        return new, x

    params = [jnp.ones((N, N))] * 20
    graph = compile_step_graph(step, params, [jnp.zeros(N)] * 20, jnp.zeros(N))
    found = RulePlan.of(graph).program.schedule.stages
    assert [stage.states for stage in found] == [(k,) for k in range(20)]
    assert all(any(is_boundary(eqn.primitive) for eqn in stage.ahead.eqns) for stage in found)
