"""Frames: the traces of two states that feed each other lie along axes that turn with them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import braintrace_core as bc
from braintrace_core.rules import DRTRL, OSTL, EProp, RulePlan, frames
from braintrace_core.rules.frames import along, are_interlocked, follow, frames_of, triangular
from braintrace_core.rules.rolling import Roll
from braintrace_core.rules.twins import twins_of
from tests.core.rules import zoo

N, F = zoo.UNITS, zoo.FEATURES
number = zoo.random(6)
WEIGHTS = {"u": number(F, N), "v": number(F, N), "r": number(N, 2)}
DECAYS, ANGLE = jnp.linspace(0.3, 0.9, N), jnp.linspace(0.1, 2.0, N)
PAIR = ((0, 1),)


def swinging(p, carry, x):
    """Two states that feed each other, as strongly as the input says; at times not at all."""
    a, b = carry
    strength = jnp.maximum(x[0], 0.0)
    a, b = DECAYS * a - strength * b + x @ p["u"], strength * a * jnp.tanh(b)
    return (a, b), jnp.tanh(a - b) @ p["r"]


def turning(p, carry, x, constant=False):
    """A complex state in two real ones, that forgets faster at times."""
    re, im = carry
    size = DECAYS if constant else DECAYS * jax.nn.sigmoid(x[1])
    cos, sin = size * jnp.cos(ANGLE), size * jnp.sin(ANGLE)
    re, im = cos * re - sin * im + x @ p["u"], sin * re + cos * im + x @ p["v"]
    return (re, im), jnp.tanh(re * im) @ p["r"]


def synapse(p, carry, x):
    """One state feeds the other, which does not feed it back."""
    g, v = carry
    g = jnp.tanh(0.7 * g) + x @ p["u"]
    v = jnp.tanh(0.8 * v) + g
    return (g, v), v @ p["r"]


def ring(p, carry, x):
    """Three states in a circle."""
    a, b, c = carry
    new = jnp.tanh(c) + x @ p["u"], jnp.tanh(a), jnp.tanh(b)
    return new, new[2] @ p["r"]


def two_pairs(p, carry, x):
    """One pair drives another."""
    a, b, c, d = carry
    a, b = jnp.tanh(a - b) + x @ p["u"], jnp.tanh(a + b)
    c, d = jnp.tanh(0.5 * c - d) + a, 0.9 * d + 0.3 * jnp.tanh(c)
    return (a, b, c, d), jnp.sin(c * d) @ p["r"]


def case(step, states, used="ur"):
    return zoo.Case(step, {key: WEIGHTS[key] for key in used}, tuple(number(N) for _ in range(states)))


CASES = {
    "swinging": case(swinging, 2),
    "turning": case(turning, 2, "uvr"),
    "synapse": case(synapse, 2),
    "ring": case(ring, 3),
    "two_pairs": case(two_pairs, 4),
}


def plan_of(case):
    return RulePlan.of(bc.compile_step_graph(case.step, case.params, case.carry, jnp.zeros(F)))


@pytest.mark.parametrize(
    ("case", "expected", "interlocked"),
    [
        (CASES["swinging"], PAIR, False),
        (CASES["turning"], PAIR, False),
        (case(lambda *args: turning(*args, constant=True), 2, "uvr"), (), True),  # D is known once for all examples
        (CASES["synapse"], (), False),
        (CASES["ring"], (), True),
        (CASES["two_pairs"], ((0, 1), (2, 3)), False),
    ],
    ids=["swinging", "turning", "turning alike", "synapse", "ring", "two pairs"],
)
def test_pairs_that_feed_each_other_have_a_frame(case, expected, interlocked):
    plan = plan_of(case)
    assert frames_of(plan) == [expected]
    assert are_interlocked(plan, plan.links[0]) == interlocked
    names = {name for name in zoo.fresh(DRTRL(), plan) if ".axis." in name}
    assert names == {f"group0.axis.{a}" for pair in expected for a in pair}


def test_a_filter_leaves_the_frame_to_what_it_filters():
    plan = plan_of(CASES["swinging"]).with_filter
    assert frames_of(plan) == [PAIR]
    assert not are_interlocked(plan, plan.links[0])


@pytest.mark.parametrize(
    ("window", "credit", "resets"), [(1, "window", True), (1, "step", False), (3, "window", False), (3, "step", True)]
)
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_back_propagation(name, window, credit, resets):
    carry, inputs = zoo.batch_of(CASES[name])
    assert (inputs[..., 0] < 0).any()  # where the swinging one lets nothing pass
    reset = zoo.some_resets() if resets else None
    found, _ = zoo.online(CASES[name], DRTRL(), window, carry, inputs, reset, credit)
    zoo.assert_close(found, zoo.bptt(CASES[name], carry, inputs, reset))


@pytest.mark.parametrize("rule", [DRTRL(), EProp(kappa=0.6), OSTL()], ids=repr)
@pytest.mark.parametrize("credit", ["window", "step"])
def test_a_frame_changes_no_gradient(monkeypatch, rule, credit):
    alif = zoo.cases()[1]["alif"]
    carry, inputs = zoo.batch_of(alif)
    found, traces = zoo.online(alif, rule, 3, carry, inputs, zoo.some_resets(), credit)
    assert any(".axis." in name for name in traces)
    monkeypatch.setattr(frames, "_find_frames", lambda plan: [()] * len(plan.groups))
    expected, traces = zoo.online(alif, rule, 3, carry, inputs, zoo.some_resets(), credit)
    assert not any(".axis." in name for name in traces)
    zoo.assert_close(found, expected)


def test_twins_share_a_frame():
    plan = plan_of(CASES["turning"])
    assert list(twins_of(plan)) == [1]
    assert frames_of(plan) == [PAIR]  # test_gradients_equal_back_propagation says that both are right


steps_of = st.lists(st.tuples(*[st.sampled_from([0.0, -1.5, 0.2, 0.7, 1e-200])] * 4), min_size=1, max_size=6)


@pytest.mark.parametrize("devices", [1, 8])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps_of, angle=st.floats(0, 6.28), cut=st.integers(0, 6))
def test_axes_make_what_a_window_does_triangular(monkeypatch, devices, steps, angle, cut):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    steps = [np.array(step).reshape(2, 2) for step in steps]
    before = {0: jnp.cos(jnp.array([angle])), 1: jnp.sin(jnp.array([angle]))}
    after, across = followed(before, steps)
    by_entry = {(a, b): jnp.array([across[a, b]]) for a in range(2) for b in range(2)}
    turned = frame(after).T @ across @ frame(before)
    np.testing.assert_allclose(frame(after).T @ frame(after), np.eye(2), atol=1e-12)
    found = triangular(PAIR, before, after, by_entry)
    assert set(found) == {(0, 0), (0, 1), (1, 1)}
    scale = 1e-12 * max(1.0, np.abs(across).max())
    assert abs(turned[1, 0]) <= scale
    for (a, b), value in found.items():
        np.testing.assert_allclose(value, turned[a, b], atol=scale)
    vanishing = sum((step == 1e-200).any() for step in steps)  # the product of two of them is lost, and its direction
    if 0 < cut < len(steps) and vanishing < 2:
        in_two, _ = followed(followed(before, steps[:cut])[0], steps[cut:])
        np.testing.assert_allclose(frame(in_two), frame(after), atol=1e-12)


def followed(axis, steps):
    """The axes after some steps, and the product of these."""
    across = np.linalg.multi_dot([np.eye(2), np.eye(2), *steps[::-1]])
    entries = [(a, b) for a in range(2) for b in range(2)]
    between = {(a, b): jnp.array([[step[a, b]] for step in steps]) for a, b in entries}
    return follow(PAIR, axis, between, {(a, b): jnp.array([across[a, b]]) for a, b in entries}), across


def frame(axis):
    (cos,), (sin,) = axis[0], axis[1]
    return np.array([[cos, -sin], [sin, cos]])


def test_entries_that_are_not_there_are_zero():
    """A single step of ``D = [[0, d], [e, 0]]``, with a third component that the first one feeds."""
    before = {0: jnp.array([0.6]), 1: jnp.array([0.8])}
    between = {(0, 1): jnp.array([[2.0]]), (1, 0): jnp.array([[3.0]]), (2, 0): jnp.array([[5.0]])}
    after = follow(PAIR, before, between, {pair: value[0] for pair, value in between.items()})
    dense = np.zeros((3, 3))
    for (a, b), value in between.items():
        dense[a, b] = value[0, 0]
    old, new = np.eye(3), np.eye(3)
    old[:2, :2], new[:2, :2] = frame(before), frame(after)
    found = triangular(PAIR, before, after, {pair: value[0] for pair, value in between.items()})
    turned = new.T @ dense @ old
    assert set(found) == {(0, 0), (0, 1), (1, 1), (2, 0), (2, 1)}
    for (a, b), value in found.items():
        np.testing.assert_allclose(value, turned[a, b], atol=1e-12)
    alone = along(PAIR, after, {1: jnp.array([7.0])})
    np.testing.assert_allclose([alone[0][0], alone[1][0]], frame(after).T @ [0, 7.0])


def test_no_digits_are_lost_in_a_long_run():
    """Along the axes, traces in float32 stay as near to float64 as they are without a frame."""
    generator = np.random.default_rng(0)
    steps = 0.97 * np.array([[1.0, -0.3], [0.3, 1.0]]) / np.hypot(1, 0.3) * generator.uniform(0.9, 1.1, (3000, 2, 2))
    added = generator.standard_normal((3000, 2))
    exact = np.zeros(2)
    for d, more in zip(steps, added, strict=True):
        exact = d @ exact + more

    def step(now, given):
        axis, e, plain = now
        d, more = given
        between = {(a, b): d[a, b][None, None] for a in range(2) for b in range(2)}
        across = {pair: of[0] for pair, of in between.items()}
        new = follow(PAIR, axis, between, across)
        t = triangular(PAIR, axis, new, across)
        c = along(PAIR, new, {0: more[:1], 1: more[1:]})
        e = {0: t[0, 0] * e[0] + t[0, 1] * e[1] + c[0], 1: t[1, 1] * e[1] + c[1]}
        return (new, e, d @ plain + more), None

    zero = jnp.zeros(1, jnp.float32)
    start = ({0: zero, 1: zero}, {0: zero, 1: zero}, jnp.zeros(2, jnp.float32))
    given_ = (steps.astype(np.float32), added.astype(np.float32))
    (axis, e, plain), _ = jax.jit(lambda start, given_: jax.lax.scan(step, start, given_))(start, given_)
    found = frame(axis) @ [e[0][0], e[1][0]]
    error, error_without = (np.abs(value - exact).max() / np.abs(exact).max() for value in (found, np.asarray(plain)))
    assert error < 1e-5
    assert error < 10 * error_without


def test_traces_are_made_before_those_that_they_are_made_of():
    def order(*pairs):
        return Roll((0, 1, 2), dict.fromkeys(pairs, None), None, {}, None).order

    assert order((0, 0), (0, 1), (1, 1)) == [0, 1, 2]
    assert order((1, 0), (2, 1)) == [2, 1, 0]
    assert order((0, 2), (1, 0), (1, 2)) == [1, 0, 2]
    assert order((0, 1), (1, 0), (2, 0)) == [2, 0, 1]  # of two in a circle, the first
