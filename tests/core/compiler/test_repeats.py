"""What is moved in the same way twice is moved once: operators on it are seen to share their input."""

import jax.numpy as jnp
import pytest

from braintrace_core import compile_step_graph
from braintrace_core.rules import DRTRL, PPProp, RulePlan
from tests.core.rules import zoo

N, WIDE = zoo.UNITS, zoo.FEATURES + zoo.UNITS


def gated(join_first, join_second):
    """A cell with two gates, and what each of them sees of an input and a state."""
    numbers = jnp.cos(jnp.arange(2.0 * WIDE * N)).reshape(2, WIDE, N)

    def step(params, h, x):
        gate = jnp.tanh(join_first(x, h) @ params["gate"])
        h = 0.5 * h + gate * (join_second(x, h) @ params["new"])
        return h, h

    return zoo.Case(step, {"gate": numbers[0], "new": numbers[1]}, jnp.zeros(N))


def joined(x, h):
    return jnp.concatenate([x, h])


def cast(x, h):
    return jnp.concatenate([x, h]).astype(jnp.float32).astype(jnp.float64)


def graph_of(net):
    return compile_step_graph(net.step, net.params, net.carry, jnp.zeros(zoo.FEATURES))


@pytest.mark.parametrize("join", [joined, cast, lambda x, h: joined(x, h)[::-1]])
def test_gates_share_their_input(join):
    graph = graph_of(gated(join, join))
    first, second = graph.hidden_param_op_relations
    assert first.x_var is second.x_var
    for rule in (PPProp(), DRTRL()):
        assert len([name for name in rule.init(RulePlan.of(graph), 1) if name.endswith(".x")]) == 1


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda x, h: jnp.concatenate([h, x]), id="another order"),
        pytest.param(lambda x, h: joined(x, h)[::-1], id="moved once more"),
        pytest.param(lambda x, h: joined(x + 1.0, h), id="other data"),
    ],
)
def test_what_differs_stays_apart(other):
    first, second = graph_of(gated(joined, other)).hidden_param_op_relations
    assert first.x_var is not second.x_var


def test_states_that_are_moved_alike_stay_two():
    def step(params, carry, x):
        y, old = x @ params, carry[0][:N]
        return (jnp.concatenate([y, old]), jnp.concatenate([y, old])), y

    carry = (jnp.zeros(2 * N), jnp.zeros(2 * N))
    graph = compile_step_graph(step, jnp.ones((zoo.FEATURES, N)), carry, jnp.zeros(zoo.FEATURES))
    assert len(set(graph.module_info.hidden_path_to_outvar.values())) == 2
