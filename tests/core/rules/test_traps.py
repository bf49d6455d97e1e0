"""The traps of other implementations, and what they refuse, one test each; the numbers are those of the list."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_core as bc
from braintrace_core.rules import DRTRL, RTRL, TBPTT, EProp, PPProp, RulePlan, online_gradient
from tests.core.rules import zoo

UNIT_WISE, MIXING = zoo.cases()
N, F = zoo.UNITS, zoo.FEATURES


def numbers(*shape: int, seed: int = 5) -> Any:
    return jnp.asarray(0.7 * np.random.default_rng([seed, *shape]).standard_normal(shape))


def assert_exact(case: zoo.Case, window: int = 2, rule: Any = None, reset: Any = None, **options: Any) -> Any:
    """A rule's gradient is that of the whole sequence."""
    carry, inputs = zoo.batch_of(case)
    found, _ = zoo.online(case, rule or DRTRL(), window, carry, inputs, reset, **options)
    zoo.assert_close(found, zoo.bptt(case, carry, inputs, reset))
    return found


def memory_cell(p: Any, c: Any, x: Any) -> Any:
    """An LSTM without recurrent weights: what its cell holds reaches its output within the step."""
    _, s = c
    i, f, g, o = jnp.split(x @ p["w"], 4)
    s = jax.nn.sigmoid(f) * s + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(s)
    return (h, s), h @ p["r"]


@pytest.mark.parametrize("name", ["cell to output", "synapse to voltage"])
def test_1_step_credit_does_not_count_a_state_that_feeds_another_twice(name):
    case = UNIT_WISE["lif_with_synapse"]
    if name == "cell to output":
        case = zoo.Case(memory_cell, {"w": numbers(F, 4 * N), "r": numbers(N, 2)}, (jnp.zeros(N), jnp.zeros(N)))
    assert_exact(case, credit="step")


@pytest.mark.parametrize("credit", ["window", "step"])
def test_2_a_transform_before_the_operator_keeps_its_factor(credit):
    mask = jnp.asarray(np.arange(F * N).reshape(F, N) % 3 > 0, float)

    def weight(p: Any) -> Any:
        w = mask * (2 * p["a"] + jnp.abs(p["b"]))
        return p["g"] * w / jnp.sqrt((w**2).sum(0, keepdims=True))

    def step(p: Any, h: Any, x: Any) -> Any:
        h = 0.7 * h + jnp.tanh(x @ weight(p))
        return h, h

    params = {"a": numbers(F, N), "b": numbers(F, N, seed=6), "g": numbers(1, N)}
    assert_exact(zoo.Case(step, params, jnp.zeros(N)), credit=credit)


def test_3_parameters_without_a_relation_learn_within_the_window():
    case = MIXING["gru"]
    carry, inputs = zoo.batch_of(case)
    found, _ = zoo.online(case, DRTRL(), 4, carry, inputs, credit="step")
    truncated, _ = zoo.online(case, TBPTT(), 4, carry, inputs)
    resets = {"wr", "ur"}  # the reset gate acts through another operator
    zoo.assert_close({k: found[k] for k in resets}, {k: truncated[k] for k in resets})
    assert_exact(UNIT_WISE["indrnn"], window=1, credit="step")  # its readout has no relation


@pytest.mark.parametrize("wrap", ["checkpoint", "custom_vjp"])
def test_4_operators_inside_checkpoint_and_custom_rules_are_found(wrap):
    plain = UNIT_WISE["indrnn"]
    if wrap == "checkpoint":
        step = jax.checkpoint(plain.step)
    else:
        step = jax.custom_vjp(plain.step)
        step.defvjp(lambda *args: jax.vjp(plain.step, *args), lambda pull_back, g: pull_back(g))
    found = assert_exact(plain._replace(step=step), window=1)
    carry, inputs = zoo.batch_of(plain)
    zoo.assert_close(found, zoo.bptt(plain, carry, inputs))


def test_5_traces_follow_the_diagonal_not_column_sums():
    def hidden(w: Any, h: Any, x: Any) -> Any:
        z = x @ w + h
        return (z - z.mean()) / jnp.sqrt(z.var() + 1e-3)

    case = zoo.Case(lambda p, h, x: (hidden(p, h, x),) * 2, numbers(F, N), numbers(N))
    carry, inputs = zoo.batch_of(case)
    found, _ = zoo.online(case, DRTRL(), 4, carry, inputs, credit="step")

    @zoo.hurried
    def expected(h: Any, inputs: Any) -> Any:
        """One example, by definition."""
        trace, total = jnp.zeros((F, N)), jnp.zeros((F, N))
        for x in inputs:
            jacobian = jax.jacrev(hidden, argnums=1)(case.params, h, x)  # also that of the product, which is added to h
            trace = jnp.diag(jacobian)[None] * (trace + x[:, None])
            h = hidden(case.params, h, x)
            total = total + jnp.cos(h)[None] * trace
        return total, jnp.abs(jacobian.sum(0)).max()

    gradients, column_sums = jax.vmap(expected, in_axes=(0, 1))(carry, inputs)
    zoo.assert_close(found, gradients.sum(0))
    assert float(column_sums.max()) < 1e-12


@pytest.mark.parametrize("window", [1, 4])
def test_6_the_debiasing_of_pp_prop_counts_steps_not_calls(window):
    decay = 0.8
    case = zoo.Case(lambda w, h, x: (0.5 * h + jnp.tanh(x @ w),) * 2, numbers(F, N), numbers(N))
    carry, inputs = zoo.batch_of(case)
    found, traces = zoo.online(case, PPProp(decay), window, carry, inputs, credit="step")
    assert (traces["steps"] == zoo.STEPS).all()
    h, ex, ef, expected = carry, 0.0 * inputs[0], 0.0 * carry, 0.0 * case.params
    for t, x in enumerate(inputs, 1):
        moved = jnp.tanh(x @ case.params)
        h = 0.5 * h + moved
        ex, ef = decay * ex + x, decay * 0.5 * ef + (1 - decay) * (1 - moved**2)
        expected = expected + ex.T @ (jnp.cos(h) * ef / (1 - decay**t))
    zoo.assert_close(found, expected)


def test_7_layers_of_equal_width_and_name_stay_apart():
    def layer(p: Any, h: Any, x: Any) -> Any:
        return p["d"] * h + jnp.tanh(x @ p["w"])

    def step(p: Any, c: Any, x: Any) -> Any:
        first = layer(p[0], c[0], x)
        second = layer(p[1], c[1], first)
        return (first, second), second

    params = [{"w": numbers(F, N), "d": numbers(N)}, {"w": numbers(N, N), "d": numbers(N, seed=6)}]
    case = zoo.Case(step, params, (jnp.zeros(N), jnp.zeros(N)))
    carry, inputs = zoo.batch_of(case)
    graph = bc.compile_step_graph(step, params, case.carry, inputs[0, 0])
    assert [len(group.hidden_paths) for group in graph.hidden_groups] == [1, 1]
    assert [len(relation.hidden_groups) for relation in graph.hidden_param_op_relations] == [1] * 4
    found, _ = zoo.online(case, DRTRL(), 1, carry, inputs)
    zoo.assert_close(found[1], zoo.bptt(case, carry, inputs)[1])  # exact in the last layer


@pytest.mark.parametrize("rule", [RTRL(), DRTRL(), EProp(kappa=0.5)], ids=repr)
def test_8_examples_of_a_batch_do_not_mix(rule):
    case = MIXING["alif"]
    carry, inputs = zoo.batch_of(case)
    _, traces = zoo.online(case, rule, 4, carry, inputs)
    _, others_changed = zoo.online(case, rule, 4, carry, inputs.at[:, 1:].multiply(-1.5))
    for key, value in traces.items():
        np.testing.assert_array_equal(value[0], others_changed[key][0], err_msg=key)
    assert any(np.any(value[1:] != others_changed[key][1:]) for key, value in traces.items())


@pytest.mark.parametrize("name", zoo.SPIKING)
def test_9_spiking_models_spike(name):
    case = {**UNIT_WISE, **MIXING}[name]
    carry, inputs = zoo.batch_of(case)
    spikes = zoo.spikes(case, carry, inputs)
    assert set(np.unique(spikes)) == {0.0, 1.0}
    assert 0.1 < float(spikes.mean()) < 0.9
    assert (spikes.max((0, 1)) == 1).all(), "units that never spike"


def windows(plan: RulePlan, rule: Any, params: Any, states: Any, traces: Any, inputs: list[Any], size: int) -> Any:
    """Gradients summed over windows, with the states and traces at the end."""
    step = zoo.hurried(
        lambda states, traces, x: online_gradient(
            plan, rule, lambda w: (zoo.loss_of(w.outputs), None), jax.tree.leaves(params), states, traces, x
        )
    )
    total = jax.tree.map(jnp.zeros_like, jax.tree.leaves(params))
    for start in range(0, len(inputs[0]), size):
        result = step(states, traces, [value[start : start + size] for value in inputs])
        states, traces = result.states, result.traces
        total = jax.tree.map(jnp.add, total, result.gradients)
    return jax.tree.unflatten(jax.tree.structure(params), total), states, traces


def test_10_traces_go_by_names_that_another_compilation_shares(tmp_path):
    case, rule = UNIT_WISE["two_states"], DRTRL()
    carry, inputs = zoo.batch_of(case)

    def half(states: Any, traces: Any, inputs: Any) -> Any:
        plan = RulePlan.of(bc.compile_step_graph(case.step, case.params, case.carry, inputs[0, 0]))
        traces = rule.init(plan, zoo.BATCH) if traces is None else dict(np.load(traces))
        assert all(isinstance(key, str) for key in traces)
        return windows(plan, rule, case.params, states, traces, [inputs], 2)

    first, states, traces = half(jax.tree.leaves(carry), None, inputs[:4])
    np.savez(tmp_path / "traces.npz", **traces)
    second, _, _ = half(states, tmp_path / "traces.npz", inputs[4:])
    zoo.assert_close(jax.tree.map(jnp.add, first, second), zoo.bptt(case, carry, inputs))


def test_two_states_read_by_one_equation():
    def step(p: Any, c: Any, x: Any) -> Any:
        v, a = c
        gap = jnp.tanh(v - a)
        return (0.8 * gap + x @ p["w"], 0.9 * a + p["b"] * gap), gap

    assert_exact(zoo.Case(step, {"w": numbers(F, N), "b": numbers(N)}, (jnp.zeros(N), jnp.zeros(N))))


def test_complex_states_by_finite_differences():
    case = UNIT_WISE["complex_lru"]
    carry, inputs = zoo.batch_of(case)
    found, _ = zoo.online(case, DRTRL(), 2, carry, inputs)

    @zoo.hurried
    def loss(params: Any) -> Any:
        def step(c: Any, x: Any) -> Any:
            return jax.vmap(lambda c, x: case.step(params, c, x))(c, x)

        return zoo.loss_of([jax.lax.scan(step, carry, inputs)[1]])

    for key in case.params:
        direction = numbers(*case.params[key].shape, seed=7)
        there, back = (loss({**case.params, key: case.params[key] + s * 1e-5 * direction}) for s in (1, -1))
        np.testing.assert_allclose(jnp.vdot(found[key], direction), (there - back) / 2e-5, rtol=1e-6, err_msg=key)


@pytest.mark.parametrize(("rule", "credit"), [(DRTRL(), "window"), (PPProp(), "step"), (EProp(0.5), "step")], ids=repr)
def test_bfloat16_states(rule, credit):
    def step(p: Any, h: Any, x: Any) -> Any:
        h = p["d"].astype(h.dtype) * h + jnp.tanh(x.astype(h.dtype) @ p["w"].astype(h.dtype))
        return h, h

    full = zoo.Case(step, {"w": numbers(F, N), "d": numbers(N)}, numbers(N))
    carry, inputs = zoo.batch_of(full)
    expected, _ = zoo.online(full, rule, 2, carry, inputs, credit=credit)
    short = full._replace(
        params=jax.tree.map(lambda p: p.astype(jnp.float32), full.params), carry=full.carry.astype(jnp.bfloat16)
    )
    found, _ = zoo.online(short, rule, 2, carry.astype(jnp.bfloat16), inputs, credit=credit)
    assert all(value.dtype == jnp.float32 for value in found.values())
    zoo.assert_close(jax.tree.map(lambda value: value.astype(float), found), expected, 5e-2)


def test_grouped_convolution():
    assert_exact(UNIT_WISE["grouped_conv"], credit="step")


def test_keyword_inputs():
    def step(p: Any, h: Any, x: Any, *, gain: Any, hold: Any) -> Any:
        h = hold * h + jnp.tanh(gain * (x @ p["w"]) + p["b"])
        return h, h

    params, generator = {"w": numbers(F, N), "b": numbers(N)}, np.random.default_rng(3)
    x, gain, hold = (jnp.asarray(generator.normal(size=(zoo.STEPS, zoo.BATCH, *s))) for s in ((F,), (N,), ()))
    graph = bc.compile_step_graph(step, params, jnp.zeros(N), x[0, 0], hold=hold[0, 0], gain=gain[0, 0])
    plan, states = RulePlan.of(graph), [jnp.zeros((zoo.BATCH, N))]
    found, _, _ = windows(plan, DRTRL(), params, states, DRTRL().init(plan, zoo.BATCH), [x, gain, hold], 2)

    def total(params: Any) -> Any:
        one = jax.vmap(lambda h, x, gain, hold: step(params, h, x, gain=gain, hold=hold))
        return zoo.loss_of([jax.lax.scan(lambda h, now: one(h, *now), states[0], (x, gain, hold))[1]])

    zoo.assert_close(found, zoo.hurried(jax.grad(total))(params))


def test_masks_and_resets_of_single_examples():
    def step(p: Any, h: Any, x: Any) -> Any:
        h = jnp.where(x[0] > 0, p["d"] * h + jnp.tanh(x @ p["w"]), h)  # padded steps leave the state alone
        return h, jnp.where(x[0] > 0, h, 0)

    case = zoo.Case(step, {"w": numbers(F, N), "d": numbers(N)}, numbers(N))
    _, inputs = zoo.batch_of(case)
    assert 0 < int((inputs[..., 0] > 0).sum()) < zoo.STEPS * zoo.BATCH
    assert zoo.some_resets().any()
    assert_exact(case, reset=zoo.some_resets())


@pytest.mark.parametrize("credit", ["window", "step"])
def test_permuted_tails(credit):
    def step(p: Any, h: Any, x: Any) -> Any:
        a, b = jnp.split(jnp.roll(x @ p["w"], 3), 2)
        h = jax.nn.sigmoid(jnp.flip(a)) * h + jnp.roll(jnp.tanh(b), 1)
        return h, h

    assert_exact(zoo.Case(step, {"w": numbers(F, 2 * N)}, numbers(N)), credit=credit)
