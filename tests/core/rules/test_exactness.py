"""Where a rule must equal back-propagation through the whole sequence, in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_core as bc
from braintrace_core.rules import (
    DRTRL,
    RTRL,
    TBPTT,
    UORO,
    EProp,
    PPProp,
    RulePlan,
    online_gradient,
    step_online_gradient,
)
from tests.core.rules import zoo

UNIT_WISE, MIXING = zoo.cases()
ALL = {**UNIT_WISE, **MIXING}


@pytest.mark.parametrize(("window", "reset"), [(1, False), (4, True)])
@pytest.mark.parametrize("name", UNIT_WISE)
def test_drtrl_is_exact_where_the_recurrence_is_unit_wise(name, window, reset):
    case = UNIT_WISE[name]
    carry, inputs = zoo.batch_of(case)
    resets = zoo.some_resets() if reset else None
    found, _ = zoo.online(case, DRTRL(), window, carry, inputs, resets)
    zoo.assert_close(found, zoo.bptt(case, carry, inputs, resets))


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("name", MIXING)
def test_rtrl_is_exact_on_every_model(name, window):
    case = MIXING[name]
    carry, inputs = zoo.batch_of(case)
    resets = zoo.some_resets()
    found, _ = zoo.online(case, RTRL(), window, carry, inputs, resets)
    zoo.assert_close(found, zoo.bptt(case, carry, inputs, resets))


@pytest.mark.parametrize("name", ["indrnn", "complex_lru", "two_states", "fused_gates", "lora", "sparse"])
@pytest.mark.parametrize("window", [1, 4])
def test_drtrl_with_step_credit_is_exact_where_the_recurrence_is_unit_wise(name, window):
    case = UNIT_WISE[name]
    carry, inputs = zoo.batch_of(case)
    resets = zoo.some_resets()
    found, _ = zoo.online(case, DRTRL(), window, carry, inputs, resets, credit="step")
    zoo.assert_close(found, zoo.bptt(case, carry, inputs, resets))


@pytest.mark.parametrize("rule", [DRTRL(), PPProp(), UORO(), TBPTT(), EProp()], ids=repr)
@pytest.mark.parametrize("name", ["lstm", "gru", "stack"])
def test_every_rule_is_exact_when_the_window_is_the_sequence(name, rule):
    case = MIXING[name]
    carry, inputs = zoo.batch_of(case)
    found, _ = zoo.online(case, rule, zoo.STEPS, carry, inputs)
    zoo.assert_close(found, zoo.bptt(case, carry, inputs))


@pytest.mark.parametrize("rule", [DRTRL(), PPProp(), EProp(kappa=0.7), RTRL()], ids=repr)
@pytest.mark.parametrize("name", ["lstm", "two_states", "fused_gates", "embedding", "stack"])
def test_traces_do_not_depend_on_where_windows_are_split(name, rule):
    case = ALL[name]
    carry, inputs = zoo.batch_of(case)
    resets = zoo.some_resets()
    _, one = zoo.online(case, rule, 1, carry, inputs, resets)
    _, four = zoo.online(case, rule, 4, carry, inputs, resets)
    for key in one:
        np.testing.assert_allclose(one[key], four[key], rtol=1e-9, atol=1e-11, err_msg=key)


@pytest.mark.parametrize("rule", [DRTRL(), PPProp(), EProp(kappa=0.7)], ids=repr)
@pytest.mark.parametrize("name", ["lstm", "two_states", "gru"])
def test_step_credit_does_not_depend_on_where_windows_are_split(name, rule):
    case = ALL[name]
    carry, inputs = zoo.batch_of(case)
    resets = zoo.some_resets()
    followed = {"gru": ["wz", "uz", "wh", "uh"]}.get(name, list(case.params))  # others learn within the window
    one, _ = zoo.online(case, rule, 1, carry, inputs, resets, credit="step")
    four, _ = zoo.online(case, rule, 4, carry, inputs, resets, credit="step")
    zoo.assert_close({k: one[k] for k in followed}, {k: four[k] for k in followed})


# A layer norm spreads an operator's result over units: the trace keeps one unit's part, and a record says so.
ONE_STEP = [(name, credit) for name in ALL for credit in ("window", "step") if (name, credit) != ("layer_norm", "step")]


@pytest.mark.parametrize(("name", "credit"), ONE_STEP)
def test_one_step_is_exact(name, credit):
    case = ALL[name]
    carry, inputs = zoo.batch_of(case)
    expected = zoo.bptt(case, carry, inputs[:1])
    found, _ = zoo.online(case, DRTRL(), 1, carry, inputs[:1], credit=credit)
    paths = jax.tree_util.tree_leaves_with_path(expected)
    for (path, want), got in zip(paths, jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("run", [online_gradient, step_online_gradient])
def test_uoro_is_unbiased(run):
    case = MIXING["gru"]
    carry, inputs = zoo.batch_of(case)
    inputs = inputs[:4]
    plan = RulePlan.of(bc.compile_step_graph(case.step, case.params, case.carry, inputs[0, 0]))
    leaves, names = jax.tree.leaves(case.params), list(case.params)

    @jax.jit
    def estimate(traces):
        states, total = jax.tree.leaves(carry), [jnp.zeros_like(leaf) for leaf in leaves]
        for t in range(len(inputs)):
            result = run(
                plan, UORO(), lambda w: (zoo.loss_of(w.outputs), None), leaves, states, traces, [inputs[t : t + 1]]
            )
            states, traces = result.states, result.traces
            total = [a + b for a, b in zip(total, result.gradients, strict=True)]
        return total

    draws = [estimate(UORO(seed).init(plan, zoo.BATCH)) for seed in range(200)]
    expected = jax.tree.leaves(zoo.bptt(case, carry, inputs))
    for i, name in enumerate(sorted(names)):
        values = jnp.stack([draw[i] for draw in draws])
        error, standard_error = values.mean(0) - expected[i], values.std(0) / np.sqrt(len(draws))
        assert float(standard_error.max()) > 0, "no noise: this cannot be UORO"
        assert float(jnp.mean(jnp.abs(error) < 3 * standard_error + 1e-12)) > 0.95, name


@pytest.mark.parametrize("name", ["lstm", "gru", "stack"])
def test_window_credit_is_closer_to_the_truth_than_truncation(name):
    case = MIXING[name]
    carry, inputs = zoo.batch_of(case)
    truth = zoo.bptt(case, carry, inputs)

    def cosine(rule):
        found, _ = zoo.online(case, rule, 2, carry, inputs)
        a, b = (jnp.concatenate([v.ravel() for v in jax.tree.leaves(t)]) for t in (found, truth))
        return float(a @ b / jnp.linalg.norm(a) / jnp.linalg.norm(b))

    assert cosine(DRTRL()) > cosine(TBPTT())
