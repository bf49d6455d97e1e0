"""Rules on random steps: the exact ones equal back-propagation, and no trace depends on where windows end."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import braintrace_core as bc
from braintrace_core.rules import DRTRL, RTRL, PPProp, SnAp
from tests.core.compiler.oracle import PLAIN
from tests.core.compiler.test_random_models import INPUTS, programs
from tests.core.rules import zoo

STEPS = 4

cuts = st.integers(1, STEPS)
credits = st.sampled_from(["window", "step"])


def case_of(program):
    """A step whose outputs see states after it and before it."""

    def step(p, carry, x):
        new, _ = program.step(p, carry, x, PLAIN)
        return new, (jnp.sin(new[0]), new[-1] * carry[0])

    return zoo.Case(step, program.params(), program.carry())


def data(case):
    r = np.random.default_rng(7)
    carry = jax.tree.map(lambda a: a[None] + jnp.asarray(r.normal(size=(zoo.BATCH, *a.shape))), case.carry)
    inputs = jnp.asarray(r.normal(size=(STEPS, zoo.BATCH, INPUTS)))
    return carry, inputs, jnp.asarray(r.random((STEPS, zoo.BATCH)) < 0.2)


def close(found, expected):
    """Some parameters of a random step do nothing: here zeros may be compared."""
    for key, want in expected.items():
        np.testing.assert_allclose(found[key], want, rtol=1e-8, atol=1e-9, err_msg=key)


@settings(max_examples=20)
@given(programs(), cuts, credits, st.sampled_from([RTRL(), SnAp(9)]))
def test_exact_rules_are_back_propagation(program, window, credit, rule):
    case = case_of(program)
    carry, inputs, reset = data(case)
    found, _ = zoo.online(case, rule, window, carry, inputs, reset, credit=credit)
    close(found, zoo.bptt(case, carry, inputs, reset))


@settings(max_examples=20)
@given(programs())
def test_one_step_with_its_own_signal_is_exact(program):
    case = case_of(program)
    carry, inputs, reset = data(case)
    graph = bc.compile_step_graph(case.step, case.params, case.carry, inputs[0, 0])
    if any(record.kind.name == "FACTOR_APPROXIMATED" for record in graph.diagnostics):
        return  # it says itself that it is not
    found, _ = zoo.online(case, DRTRL(), 1, carry, inputs[:1], reset[:1], credit="step")
    close(found, zoo.bptt(case, carry, inputs[:1], reset[:1]))


@settings(max_examples=20)
@given(programs(), st.sampled_from([1, 2]), st.sampled_from([DRTRL(), PPProp()]))
def test_traces_do_not_depend_on_where_windows_end(program, window, rule):
    case = case_of(program)
    carry, inputs, reset = data(case)
    _, some = zoo.online(case, rule, window, carry, inputs, reset, credit="step")
    _, one = zoo.online(case, rule, STEPS, carry, inputs, reset, credit="step")
    close(some, one)
