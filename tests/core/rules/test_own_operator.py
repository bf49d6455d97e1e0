"""An operator of the user's own, from its function to an online gradient."""

import jax.numpy as jnp

import braintrace_core as bc
from braintrace_core.rules import DRTRL
from tests.core.rules import zoo


def test_an_operator_without_a_trace_rule_is_exact_too():
    def gained(x, weight, gain):
        return (x @ weight) * gain

    gained_p = bc.register_primitive("etp_gained_for_this_test", gained, trainable={"weight": 1, "gain": 2})

    def step(params, h, x):
        h = 0.8 * h + jnp.tanh(gained_p.bind(x, params["weight"], params["gain"]))
        return h, h

    units = zoo.UNITS
    params = {"weight": jnp.linspace(-1, 1, 3 * units).reshape(3, units), "gain": jnp.linspace(0.5, 2, units)}
    case = zoo.Case(step, params, jnp.zeros(units))
    carry, inputs = zoo.batch_of(case)
    for window in (1, 4):
        found, _ = zoo.online(case, DRTRL(), window, carry, inputs)
        zoo.assert_close(found, zoo.bptt(case, carry, inputs))
