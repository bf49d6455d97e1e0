"""Where the signal comes from: random feedback, modulators, filters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_core import compile_step_graph
from braintrace_core.rules import DRTRL, TBPTT, EProp, Immediate, PPProp, RulePlan, ThreeFactor, get_rule
from braintrace_core.rules.online import random_feedback, step_online_gradient
from tests.core.rules import zoo

CASE = zoo.cases()[0]["indrnn"]
RECURRENT = ("w", "d", "b")
CARRY, INPUTS = zoo.batch_of(CASE)


def gradients(rule, window=4, **options):
    return zoo.online(CASE, rule, window, CARRY, INPUTS, credit="step", **options)[0]


def test_random_feedback_leaves_the_readout_alone_and_changes_the_rest():
    symmetric, random = gradients(EProp()), gradients(EProp(feedback="random"))
    np.testing.assert_allclose(random["r"], symmetric["r"], rtol=1e-12)
    for key in RECURRENT:
        assert float(jnp.abs(random[key]).max()) > 0
        assert float(jnp.abs(random[key] - symmetric[key]).max()) > 1e-3


def test_random_feedback_is_that_of_its_seed():
    first, again, other = (gradients(EProp(feedback="random", seed=s))["w"] for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert float(jnp.abs(first - other).max()) > 1e-3


def test_a_modulator_takes_the_place_of_the_losss_signal():
    loss_signal = INPUTS[..., 0]  # any (time, batch)
    one, two, none = (
        gradients(ThreeFactor(), window=zoo.STEPS, modulator=scale * loss_signal) for scale in (1.0, 2.0, 0.0)
    )
    for key in RECURRENT:
        np.testing.assert_allclose(two[key], 2 * one[key], rtol=1e-12)
        assert float(jnp.abs(one[key]).max()) > 0
        assert not none[key].any()
    np.testing.assert_allclose(none["r"], gradients(DRTRL())["r"], rtol=1e-12)  # no trace follows it: the loss's own


def test_the_filter_of_eprop_is_a_running_sum_of_traces():
    kappa = 0.6
    found = gradients(EProp(kappa=kappa))
    # The same by definition: the signal of step t acts on all traces up to t, weighed by kappa^(t - u).
    expected = {key: 0.0 for key in RECURRENT}
    signals = _signals()
    for t in range(zoo.STEPS):
        for u in range(t + 1):
            modulator = jnp.zeros_like(signals).at[u].set(kappa ** (t - u) * signals[t])
            part = gradients(ThreeFactor(), window=zoo.STEPS, modulator=modulator)
            expected = {key: expected[key] + part[key] for key in RECURRENT}
        if t == 2:
            break
    short = zoo.online(CASE, EProp(kappa=kappa), 1, CARRY, INPUTS[:3], credit="step")[0]
    zoo.assert_close({key: short[key] for key in RECURRENT}, expected)
    assert float(jnp.abs(found["w"] - gradients(DRTRL())["w"]).max()) > 1e-3


def _signals():
    """``dL_t / d h_t`` of the case's readout, ``(time, batch, units)``."""

    def outputs(carry, x):
        carry, out = jax.vmap(lambda c, x: CASE.step(CASE.params, c, x))(carry, x)
        return carry, (carry, out)

    _, (hidden, _) = jax.lax.scan(outputs, CARRY, INPUTS)
    return jax.vmap(jax.vmap(jax.grad(lambda h: zoo.loss_of([h @ CASE.params["r"]]))))(hidden)


def test_a_filter_advances_without_a_loss():
    rule = EProp(kappa=0.6)
    _, traces = zoo.online(CASE, rule, 1, CARRY, INPUTS[:1], credit="step")
    _, later = zoo.online(CASE, rule, 1, CARRY, INPUTS[:3], credit="step", modulator=jnp.zeros((1, zoo.BATCH)))
    assert any(float(jnp.abs(later[k] - traces[k]).max()) > 1e-6 for k in traces if k.endswith((".1", ".2")))


def test_the_local_derivative_forgets_the_past():
    carry, inputs = zoo.batch_of(CASE)
    found, traces = zoo.online(CASE, Immediate(), 1, carry, inputs, credit="step")
    assert not any(".D." in name for name in traces)
    one_by_one = [zoo.online(CASE, Immediate(), 1, carry, inputs[:1], credit="step")[0]["w"]]
    assert float(jnp.abs(found["w"] - one_by_one[0]).max()) > 1e-3


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: PPProp(1.0), r"decay in \[0, 1\), got 1.0"),
        (lambda: PPProp(0), "rank of at least 1, got 0"),
        (lambda: PPProp("0.9"), "a number, a rank as a whole number"),
        (lambda: EProp(kappa=1.0), r"`kappa` is a decay in \[0, 1\), got 1.0"),
        (lambda: EProp(feedback="none"), '`feedback` is "symmetric" or "random"'),
        (lambda: get_rule("rtlr"), "There is no rule 'rtlr'. Use one of bptt, d_rtrl"),
    ],
)
def test_bad_arguments_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_rules_go_by_name():
    assert get_rule("d_rtrl") == DRTRL()
    assert get_rule("pp_prop") == PPProp(0.9)
    assert get_rule(TBPTT()) == TBPTT()


@pytest.mark.parametrize("rule", [DRTRL(), PPProp(), EProp(kappa=0.5), Immediate(), TBPTT()], ids=repr)
def test_bytes_are_those_of_the_traces(rule):
    graph = compile_step_graph(CASE.step, CASE.params, CASE.carry, INPUTS[0, 0])
    traces = rule.init(graph, 4)
    assert rule.bytes(graph, 4) == sum(leaf.nbytes for leaf in traces.values())


def readout_state(result_too):
    """A readout whose result is a hidden state, and maybe an output besides."""

    def step(params, carry, x):
        v, y = carry
        v = 0.9 * v + jnp.tanh(x @ params["w"])
        now = v @ params["out"]
        y = 0.8 * y + now
        return (v, y), now if result_too else y

    params = {"w": CASE.params["w"], "out": CASE.params["r"]}
    return zoo.Case(step, params, (jnp.zeros(zoo.UNITS), jnp.zeros(2)))


@pytest.mark.parametrize("result_too", [False, True])
def test_an_operator_that_feeds_a_state_and_the_output_gets_both_parts(result_too):
    """The recurrences are unit by unit and the loss sees one step, so step credit is exact for a single step."""
    case = readout_state(result_too)
    carry, inputs = zoo.batch_of(case)
    found, _ = zoo.online(case, DRTRL(), 1, carry, inputs[:1], credit="step")
    zoo.assert_close(found, zoo.bptt(case, carry, inputs[:1]))
    later, _ = zoo.online(case, DRTRL(), 2, carry, inputs, credit="step")
    zoo.assert_close({"out": later["out"]}, {"out": zoo.bptt(case, carry, inputs)["out"]})


def test_random_feedback_needs_a_readout():
    case = readout_state(False)
    carry, inputs = zoo.batch_of(case)
    with pytest.raises(ValueError, match="found no readout to send errors back through"):
        zoo.online(case, EProp(feedback="random"), 1, carry, inputs[:1], credit="step")


def layers(readout):
    """Two leaky layers, and an output with the given readout."""

    def step(params, carry, x):
        low, high = carry
        low = 0.9 * low + jnp.tanh(x @ params["w1"])
        high = 0.8 * high + jnp.tanh(low @ params["w2"])
        return (low, high), high @ params["r"]

    params = {
        "w1": CASE.params["w"],
        "w2": jnp.cos(jnp.arange(float(zoo.UNITS**2))).reshape(zoo.UNITS, -1),
        "r": readout,
    }
    return zoo.Case(step, params, (jnp.zeros(zoo.UNITS), jnp.zeros(zoo.UNITS)))


def test_random_feedback_reaches_the_layers_below():
    """With a loss that is linear in the outputs, random feedback is the same as having that readout."""
    case = layers(CASE.params["r"])
    carry, inputs = zoo.batch_of(case)
    graph = compile_step_graph(case.step, case.params, case.carry, inputs[0, 0])
    plan, rule = RulePlan.of(graph), EProp(feedback="random", seed=3)
    ((_, operands),) = random_feedback(plan, rule, plan.program.frontier(jax.tree.leaves(case.params))).items()
    feedback = next(value for value in operands if value is not None)

    def gradients(case, rule):
        leaves, states = jax.tree.leaves(case.params), jax.tree.leaves(carry)
        traces = zoo.fresh(rule, plan)
        loss = lambda window: (jnp.sum(window.outputs[0]), None)  # noqa: E731
        return step_online_gradient(plan, rule, loss, leaves, states, traces, [inputs]).gradients

    found, symmetric = gradients(case, rule), gradients(case, EProp())
    expected = gradients(layers(feedback), EProp())
    zoo.assert_close([found[1], found[2]], [expected[1], expected[2]])
    assert all(float(jnp.abs(a - b).max()) > 1e-3 for a, b in zip(found[1:], symmetric[1:], strict=True))


def test_a_state_that_no_state_feeds_is_seen_through_what_stands_on_it():
    def step(params, carry, x):
        memory, now = carry
        now = jnp.tanh(x @ params["w"])
        memory = 0.9 * memory + jnp.tanh(x @ params["v"])
        return (memory, now), now @ params["r"] + memory @ params["r"]

    params = {"w": CASE.params["w"], "v": jnp.flip(CASE.params["w"]), "r": CASE.params["r"]}
    case = zoo.Case(step, params, (jnp.zeros(zoo.UNITS), jnp.zeros(zoo.UNITS)))
    carry, inputs = zoo.batch_of(case)
    found, _ = zoo.online(case, DRTRL(), 1, carry, inputs[:1], credit="step")
    zoo.assert_close(found, zoo.bptt(case, carry, inputs[:1]))


def test_the_step_is_not_run_again_for_the_layers_below():
    """Each of three operators is a product forward and one for its weight; two more go back to the layers."""
    case = layers(CASE.params["r"])
    carry, inputs = zoo.batch_of(case)
    graph = compile_step_graph(case.step, case.params, case.carry, inputs[0, 0])
    plan, rule, leaves = RulePlan.of(graph), Immediate(), jax.tree.leaves(case.params)

    def window(states, traces, x):
        loss = lambda window: (jnp.sum(jnp.sin(window.outputs[0])), None)  # noqa: E731
        return step_online_gradient(plan, rule, loss, leaves, states, traces, [x]).gradients

    compiled = jax.jit(window).lower(jax.tree.leaves(carry), zoo.fresh(rule, plan), inputs).compile()
    assert compiled.as_text().count(" dot(") == 8
