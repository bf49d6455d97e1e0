"""Step credit: each way from a parameter to a step's loss counts, and counts once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_core.rules import DRTRL, RTRL, EProp, PPProp, SnAp
from tests.core.rules import zoo
from tests.core.rules.zoo import FEATURES, UNITS, Case, spike

UNIT_WISE, MIXING = zoo.cases()


def values(seed=3):
    generator = np.random.default_rng(seed)
    return lambda *shape: jnp.asarray(0.7 * generator.standard_normal(shape))


def leaky(p, h, x):
    return jax.nn.sigmoid(p["d"]) * h + x @ p["w"]


def before(p, h, x):
    return leaky(p, h, x), h @ p["r"]


def both(p, h, x):
    new = leaky(p, h, x)
    return new, (h * new) @ p["r"]


def cast(p, h, x):
    """What comes out is what the state is made of, not the state."""
    new = leaky(p, h, x)
    return new + 0.0, new @ p["r"]


def delay(p, states, x):
    h, older = states
    new = leaky(p, h, x)
    return (new, h), (new * h + older**2) @ p["r"]


def kept_twice(p, states, x):
    h, same = states
    new = leaky(p, h + 0.1 * same, x)
    return (new, new), (new * same) @ p["r"]


def fires_before(p, v, x):
    """Units that fire by the potential that they come with, as many are written."""
    fired = spike(v - 0.5)
    return jax.nn.sigmoid(p["d"]) * v - 0.3 * fired + x @ p["w"], fired @ p["r"]


def feeds_back(p, v, x):
    fired = spike(v - 0.5)
    return jax.nn.sigmoid(p["d"]) * v - 0.3 * fired + x @ p["w"] + fired @ p["u"], fired @ p["r"]


def layers(p, states, x):
    """The upper layer, and the readout, read the lower one as it was."""
    h, top = states
    new = jnp.tanh(x @ p["w"] + h @ p["u"])
    top = jax.nn.sigmoid(p["d"]) * top + h @ p["v"]
    return (new, top), (top + h) @ p["r"]


def shared_input(p, states, x):
    """One product feeds a state, the operator of another, and the output; so does that operator."""
    h, top = states
    z = x @ p["w"]
    u = z @ p["v"]
    h = jnp.tanh(z + 0.5 * h)
    top = jnp.tanh(0.5 * top + u)
    return (h, top), (h + top + z + u) @ p["r"]


def makes():
    r = values()
    p = {"w": r(FEATURES, UNITS), "d": r(UNITS), "r": r(UNITS, 2)}
    more = p | {"u": r(UNITS, UNITS)}
    one, two = r(UNITS), (r(UNITS), r(UNITS))
    unit_wise = {
        "before": Case(before, p, one),
        "both": Case(both, p, one),
        "cast": Case(cast, p, one),
        "delay": Case(delay, p, two),
        "kept_twice": Case(kept_twice, p, two),
        "fires_before": Case(fires_before, p, one),
    }
    mixing = {
        "feeds_back": Case(feeds_back, more, one),
        "layers": Case(layers, more | {"v": r(UNITS, UNITS)}, two),
    }
    return unit_wise, mixing


READS_PAST, MIXES_AND_READS_PAST = makes()


@pytest.mark.parametrize("name", [*READS_PAST, *MIXES_AND_READS_PAST])
def test_the_loss_sees_the_states_before_a_step(name):
    case = {**READS_PAST, **MIXES_AND_READS_PAST}[name]
    carry, inputs = zoo.batch_of(case)
    if "fire" in name or name == "feeds_back":
        fired = zoo.spikes(case, carry, inputs)
        assert 0.05 < float((fired > 0).mean()) < 0.95
    resets = zoo.some_resets()
    expected = zoo.bptt(case, carry, inputs, resets)
    rules = [DRTRL(), RTRL()] if name in READS_PAST else [RTRL()]
    for rule in rules:
        for window in (1, 4):
            found, _ = zoo.online(case, rule, window, carry, inputs, resets, credit="step")
            zoo.assert_close(found, expected)


def test_what_a_result_does_to_another_state_counts_within_the_window():
    r = values()
    params = {"w": r(FEATURES, UNITS), "v": r(UNITS, UNITS), "r": r(UNITS, 2)}
    case = Case(shared_input, params, (r(UNITS), r(UNITS)))
    carry, inputs = zoo.batch_of(case)
    found, _ = zoo.online(case, DRTRL(), 1, carry, inputs[:1], credit="step")
    zoo.assert_close(found, zoo.bptt(case, carry, inputs[:1]))
    found, _ = zoo.online(case, RTRL(), 4, carry, inputs, credit="step")
    zoo.assert_close(found, zoo.bptt(case, carry, inputs))


@pytest.mark.parametrize("rule", [DRTRL(), PPProp(), EProp(kappa=0.7), SnAp(1)], ids=repr)
@pytest.mark.parametrize("name", ["both", "feeds_back"])
def test_it_sees_them_across_windows(name, rule):
    case = {**READS_PAST, **MIXES_AND_READS_PAST}[name]
    carry, inputs = zoo.batch_of(case)
    one, _ = zoo.online(case, rule, 1, carry, inputs, credit="step")
    all_at_once, _ = zoo.online(case, rule, zoo.STEPS, carry, inputs, credit="step")
    zoo.assert_close(one, all_at_once)


def test_random_feedback_reaches_the_states_before_a_step():
    case = READS_PAST["fires_before"]
    carry, inputs = zoo.batch_of(case)
    found = [
        zoo.online(case, EProp(feedback=feedback), 4, carry, inputs, credit="step")[0]
        for feedback in ("symmetric", "random")
    ]
    np.testing.assert_allclose(found[0]["r"], found[1]["r"], rtol=1e-12)
    assert float(jnp.abs(found[0]["w"] - found[1]["w"]).max()) > 1e-3
    assert float(jnp.abs(found[1]["w"]).max()) > 1e-3


@pytest.mark.parametrize("name", [*UNIT_WISE, *MIXING])
def test_rtrl_is_exact_on_every_model(name):
    case = {**UNIT_WISE, **MIXING}[name]
    carry, inputs = zoo.batch_of(case)
    found, _ = zoo.online(case, RTRL(), 4, carry, inputs, zoo.some_resets(), credit="step")
    zoo.assert_close(found, zoo.bptt(case, carry, inputs, zoo.some_resets()))


@pytest.mark.parametrize("name", ["gru", "lstm", "stack", "layer_norm"])
def test_snap_that_reaches_everything_is_exact(name):
    case = MIXING[name]
    carry, inputs = zoo.batch_of(case)
    found, _ = zoo.online(case, SnAp(20), 4, carry, inputs, credit="step")
    zoo.assert_close(found, zoo.bptt(case, carry, inputs))
