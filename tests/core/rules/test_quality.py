"""How close a rule comes to back-propagation: the comparison and the meter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_core as bc
from braintrace_core.rules import DRTRL, TBPTT, QualityMeter, RulePlan, compare_gradients, online_gradient
from tests.core.rules import zoo

CASE = zoo.cases()[1]["gru"]


def test_a_comparison_by_its_numbers():
    table = compare_gradients(
        {"a": jnp.array([3.0, 4.0]), "b": jnp.array([1.0])}, {"a": jnp.array([3.0, 0.0]), "b": jnp.array([2.0])}
    )
    np.testing.assert_allclose(table["a"][1:], (3 / 5, 5 / 3, 4 / 3))
    np.testing.assert_allclose(table["b"][1:], (1, 0.5, 0.5))
    np.testing.assert_allclose(table.overall.cosine, 11 / np.sqrt(26 * 13))
    assert len(str(table).splitlines()) == 4


def test_zeros_are_not_compared_with_zeros():
    with pytest.raises(ValueError, match="Nothing to compare: the gradients of b are zero"):
        compare_gradients({"a": jnp.ones(2), "b": jnp.zeros(2)}, {"a": jnp.ones(2), "b": jnp.zeros(2)})
    assert compare_gradients({"a": jnp.zeros(2)}, {"a": jnp.ones(2)})["a"].relative_error == 1


def readings(rule, meter, window=2, steps=8):
    """What a meter reads after each window of a sequence."""
    carry, inputs = zoo.batch_of(CASE)
    inputs, resets = inputs[:steps], jnp.zeros((steps, zoo.BATCH), bool)
    plan = RulePlan.of(bc.compile_step_graph(CASE.step, CASE.params, CASE.carry, inputs[0, 0]))
    leaves, initial = jax.tree.leaves(CASE.params), jax.tree.leaves(CASE.carry)

    @jax.jit
    def step(states, traces, ring, x, reset):
        ring = meter.record(ring, (states, [x], None, reset))
        result = online_gradient(
            plan, rule, lambda w: (zoo.loss_of(w.outputs), None), leaves, states, traces, [x], reset, initial
        )
        quality = meter.measure(ring, plan, lambda w, _: zoo.loss_of(w.outputs), leaves, result.gradients, initial)
        return result.states, result.traces, ring, quality, result.gradients

    states, traces = jax.tree.leaves(carry), rule.init(plan, zoo.BATCH)
    ring = meter.init((states, [inputs[:window]], None, resets[:window]))
    found = []
    for start in range(0, steps, window):
        now = slice(start, start + window)
        states, traces, ring, quality, gradients = step(states, traces, ring, inputs[now], resets[now])
        found.append((float(quality.cosine), float(quality.norm_ratio), gradients))
    return found


def test_the_meter_reads_when_it_is_due_and_only_then():
    found = readings(DRTRL(), QualityMeter(every=2, windows=2))
    assert [bool(np.isnan(cosine)) for cosine, _, _ in found] == [True, False, True, False]


def test_the_meter_reads_what_back_propagation_says():
    """After all windows are in the ring, the truth is the gradient of the last window's loss through everything."""
    cosine, ratio, gradients = readings(TBPTT(), QualityMeter(every=4, windows=4))[-1]
    carry, inputs = zoo.batch_of(CASE)

    def last(params):
        state, total = carry, 0.0
        for t in range(8):
            state, y = jax.vmap(lambda c, x: CASE.step(params, c, x))(state, inputs[t])
            total = total + (zoo.loss_of([y]) if t >= 6 else 0.0)
        return total

    flat = [
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(t)])
        for t in (gradients, jax.grad(last)(CASE.params))
    ]
    norms = [np.linalg.norm(v) for v in flat]
    np.testing.assert_allclose(cosine, flat[0] @ flat[1] / norms[0] / norms[1], rtol=1e-9)
    np.testing.assert_allclose(ratio, norms[0] / norms[1], rtol=1e-9)
    assert cosine < 1 - 1e-4, "truncation must show"


def test_the_meter_tells_rules_apart():
    meter = QualityMeter(every=4, windows=4)
    assert readings(DRTRL(), meter)[-1][0] > readings(TBPTT(), meter)[-1][0]
