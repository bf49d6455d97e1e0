"""Rules on random steps: the exact ones equal back-propagation, and no trace depends on where windows end."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import braintrace_core as bc
from braintrace_core.rules import DRTRL, RTRL, PPProp, RulePlan, SnAp
from braintrace_core.rules.coupling import coupled_factors
from braintrace_core.rules.factors import window_factors
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
    plan = RulePlan.of(graph)
    if (
        any(record.kind.name == "FACTOR_APPROXIMATED" for record in graph.diagnostics)
        or plan.feeds != plan.feeds_elsewhere
    ):
        return  # a trace does not tell what a result does to its own state through another operator
    found, _ = zoo.online(case, DRTRL(), 1, carry, inputs[:1], reset[:1], credit="step")
    close(found, zoo.bptt(case, carry, inputs[:1], reset[:1]))


@settings(max_examples=20)
@given(programs())
def test_a_units_whole_effect_on_itself(program):
    case = case_of(program)
    carry, inputs, _ = data(case)
    plan = RulePlan.of(bc.compile_step_graph(case.step, case.params, case.carry, inputs[0, 0]))
    frontier = plan.program.frontier(jax.tree.leaves(case.params))
    record = plan.program.run(frontier, jax.tree.leaves(carry), [inputs[:1]]).record
    coupled = coupled_factors(window_factors(plan, frontier, record)).D
    first = jax.tree.map(lambda a: a[0], carry)
    jacobian = jax.jacrev(lambda states: case.step(case.params, states, inputs[0, 0])[0])(first)
    for group, entries in zip(plan.graph.hidden_groups, coupled, strict=True):
        states = [int(path[-1]) for path in group.hidden_paths]
        for a, after in enumerate(states):
            for b, before in enumerate(states):
                found = entries[a, b][0, 0] if (a, b) in entries else np.zeros(len(first[0]))
                np.testing.assert_allclose(found, np.diag(jacobian[after][before]), rtol=1e-9, atol=1e-12)


@settings(max_examples=20)
@given(programs(), st.sampled_from([1, 2]), st.sampled_from([DRTRL(), PPProp()]))
def test_traces_do_not_depend_on_where_windows_end(program, window, rule):
    case = case_of(program)
    carry, inputs, reset = data(case)
    _, some = zoo.online(case, rule, window, carry, inputs, reset, credit="step")
    _, one = zoo.online(case, rule, STEPS, carry, inputs, reset, credit="step")
    close(some, one)
