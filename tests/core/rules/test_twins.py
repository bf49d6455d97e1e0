"""Twins: of links whose traces are the same but for places and signs of components, one keeps them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
import pytest

import braintrace_core as bc
from braintrace_core.rules import DNI, DRTRL, OSTL, EProp, RulePlan
from braintrace_core.rules.twins import Twin, twins_of
from tests.core.rules import zoo

N, F = zoo.UNITS, zoo.FEATURES
number = zoo.random(5)
DECAYS, ANGLE = jnp.linspace(0.3, 0.9, N), jnp.linspace(0.1, 2.0, N)
WEIGHTS = {name: number(F, N) for name in "uvw"} | {"out": number(N, 2), "r": number(N, N)}


def turning(p, carry, x, gain=1.0, other_decay=0.0):
    """A complex state in two real ones, as of an LRU."""
    re, im = carry
    cos, sin = DECAYS * jnp.cos(ANGLE), DECAYS * jnp.sin(ANGLE)
    re, im = cos * re - sin * im + x @ p["u"], sin * re + (cos + other_decay) * im + gain * (x @ p["v"])
    return (re, im), jnp.tanh(re * im) @ p["out"]


def coupled(p, carry, x):
    """The same with a recurrent weight on the real part: an operator, so that only rules that go through it see it."""
    re, im = carry
    cos, sin = DECAYS * jnp.cos(ANGLE), DECAYS * jnp.sin(ANGLE)
    re, im = cos * re - sin * im + x @ p["u"] + re @ p["r"], sin * re + cos * im + x @ p["v"]
    return (re, im), jnp.tanh(re * im) @ p["out"]


def summed(p, h, x, sign=1.0, other=False):
    """Two weights on one input."""
    h = jnp.tanh(DECAYS * h + x @ p["u"] + sign * ((2 * x if other else x) @ p["v"]))
    return h, h @ p["out"]


def in_a_ring(p, carry, x):
    """Three states that hand on to one another."""
    a, b, c = carry
    new = DECAYS * c + x @ p["u"], DECAYS * a - x @ p["v"], DECAYS * b + x @ p["w"]
    return new, jnp.sin(new[0] + new[1] * new[2]) @ p["out"]


def in_a_long_ring(p, carry, x):
    a, b, c, d = carry
    new = DECAYS * d + x @ p["u"], DECAYS * a + x @ p["v"], DECAYS * b, DECAYS * c
    return new, jnp.sin(new[0] + new[1]) @ p["out"]


def with_bias(p, carry, x):
    re, im = carry
    cos, sin = DECAYS * jnp.cos(ANGLE), DECAYS * jnp.sin(ANGLE)
    re, im = (
        cos * re - sin * im + bc.matmul(x, p["u"], p["out"][:, 0]),
        sin * re + cos * im + bc.matmul(x, p["v"], p["out"][:, 1]),
    )
    return (re, im), jnp.tanh(re * im)


def scaled_after(x, weight, gain):
    return (x @ weight) * gain


scaled_p = bc.register_primitive("etp_scaled_in_twins", scaled_after, trainable={"weight": 1, "gain": 2})


def with_operator(p, h, x, operator):
    """Two operators of one kind on one input."""
    h = DECAYS * h + operator(x, p["u"], p["out"][:, 0]) + operator(x, p["v"], p["out"][:, 1])
    return h, jnp.tanh(h)


def low_rank(x, weight, gain):
    return bc.lora_matmul(x, weight[:, :2], weight[:2] * gain[None])


def case(step, **options):
    states = {"turning": 2, "coupled": 2, "with_bias": 2, "in_a_ring": 3, "in_a_long_ring": 4}.get(step.__name__)
    carry = number(N) if states is None else tuple(number(N) for _ in range(states))
    names = {in_a_ring: "uvw", coupled: "uvr"}.get(step, "uv")
    params = {name: WEIGHTS[name] for name in (*names, "out")}
    return zoo.Case(lambda p, c, x: step(p, c, x, **options), params, carry)


LRU = zoo.cases()[0]["complex_lru"]
FOUND = {
    "two real states": (case(turning), [((1, 1), (0, -1))]),
    "the other sense": (case(turning, gain=-1.0), [((1, -1), (0, 1))]),
    "a complex state": (LRU, [((1, 1), (0, -1))]),
    "a sum": (case(summed), [((0, 1),)]),
    "a difference": (case(summed, sign=-1.0), [((0, -1),)]),
    "a ring": (case(in_a_ring), [((1, -1), (2, -1), (0, -1)), ((2, 1), (0, 1), (1, 1))]),
    "low rank": (case(with_operator, operator=low_rank), [((0, 1),)]),
    "biases": (case(with_bias), [((1, 1), (0, -1))]),
}
NONE = {
    "another gain": case(turning, gain=2.0),
    "a decay that differs": case(turning, other_decay=0.1),
    "another input": case(summed, other=True),
    "traces made of more than the input": case(with_operator, operator=scaled_p.bind),
    "too many states": case(in_a_long_ring),
    **{name: zoo.cases()[1][name] for name in ("lstm", "gru", "alif", "complex_dense")},
    "not holomorphic": zoo.cases()[0]["not_holomorphic"],
}


def plan_of(case):
    return RulePlan.of(bc.compile_step_graph(case.step, case.params, case.carry, jnp.zeros(F)))


@pytest.mark.parametrize("name", FOUND)
def test_twins_are_found(name):
    net, turns = FOUND[name]
    assert [twin.turn for twin in twins_of(plan_of(net)).values()] == turns


@pytest.mark.parametrize("name", NONE)
def test_others_are_not(name):
    assert not twins_of(plan_of(NONE[name]))


@pytest.mark.parametrize(
    ("name", "credit", "window"),
    [
        *((name, "window", 3) for name in FOUND),
        *((name, "step", 4) for name in FOUND),
        *(("a complex state", credit, 1) for credit in ("window", "step")),
    ],
)
def test_gradients_are_exact(name, credit, window):
    net, _ = FOUND[name]
    carry, inputs = zoo.batch_of(net)
    reset = zoo.some_resets()
    found, _ = zoo.online(net, DRTRL(), window, carry, inputs, reset, credit=credit)
    zoo.assert_close(found, zoo.bptt(net, carry, inputs, reset))


def test_one_of_two_keeps_its_traces():
    plan = plan_of(case(turning))
    first, second = (link.name for link in plan.links)
    names = DRTRL().init(plan, 1)
    assert {f"{first}.weight.0", f"{first}.weight.1"} <= set(names)
    assert not any(name.startswith(f"{second}.weight") for name in names)


@dataclass(frozen=True)
class Lopsided(DRTRL):
    """Forgets some components faster than others: no exchange of them commutes with that."""

    def advance(self, traces, factors):
        scaled = tuple({(a, b): d / (1 + a) for (a, b), d in of.items()} for of in factors.D)
        return super().advance(traces, replace(factors, D=scaled))


@pytest.mark.parametrize("rule", [Lopsided(), EProp(kappa=0.3), EProp(), DNI(), OSTL()], ids=repr)
def test_rules_made_of_it_are_what_they_are_without(monkeypatch, rule):
    net = case(coupled)
    assert twins_of(plan_of(net))
    carry, inputs = zoo.batch_of(net)
    found, _ = zoo.online(net, rule, 4, carry, inputs)
    monkeypatch.setattr("braintrace_core.rules.drtrl.twins_of", lambda plan: {})
    expected, _ = zoo.online(net, rule, 4, carry, inputs)
    zoo.assert_close(found, expected)


def test_a_frozen_weight_holds_no_traces_for_another():
    net = case(turning)
    graph = bc.compile_step_graph(net.step, net.params, net.carry, jnp.zeros(F))
    paths = [path[-1] for path in graph.module_info.weight_path_to_invars]
    plan = RulePlan.of(graph, frozen=[paths.index("u")])
    assert not twins_of(plan)
    assert any("v@" in name and ".weight." in name for name in DRTRL().init(plan, 1))


def test_signals_turn_with_the_traces():
    twin = Twin(0, ((1, 1), (0, -1)))
    assert twin.at_holder({0: 2.0, 1: 3.0}, (0, 1)) == {0: 3.0, 1: -2.0}


def test_a_cell_of_ours():
    cell = bc.nn.LRUCell(3, 4)
    cell.init_state()
    plan = RulePlan.of(bc.compile_etrace_graph(cell, jnp.zeros(3)))
    (pair,) = [(plan.links[i].name, plan.links[twin.holder].name) for i, twin in twins_of(plan).items()]
    assert pair[0].startswith("B_im/")
    assert pair[1].startswith("B_re/")
