"""What is the same at all steps of a window is computed once, and its numbers stay the same."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest

from braintrace_core import compile_step_graph
from braintrace_core.rules import DRTRL, TBPTT, RulePlan
from braintrace_core.rules.factors import window_factors
from tests.core.rules import zoo

UNIT_WISE, MIXING = zoo.cases()


def factors_of(case, reset=None):
    carry, inputs = zoo.batch_of(case)
    plan = RulePlan.of(compile_step_graph(case.step, case.params, case.carry, inputs[0, 0]))
    frontier = plan.program.frontier(jax.tree.leaves(case.params))
    initial = jax.tree.leaves(case.carry)
    window = plan.program.run(frontier, jax.tree.leaves(carry), [inputs], reset, initial)
    return window_factors(plan, frontier, window.record)


@pytest.mark.parametrize("name", ["complex_lru", "conv", "embedding", "lora"])
def test_a_recurrence_of_parameters_alone_has_one_D(name):
    factors = factors_of(UNIT_WISE[name])
    one = factors.one_D(0)
    assert one is not None
    for pair, d in factors.D[0].items():
        assert one[pair].shape == (1, *d.shape[2:])
        assert float(jnp.abs(d - one[pair][None]).max()) == 0 < float(jnp.abs(d).max())


@pytest.mark.parametrize("name", ["indrnn", "two_states", "fused_gates", "lif", "not_holomorphic"])
def test_a_recurrence_of_states_or_inputs_has_many(name):
    factors = factors_of(UNIT_WISE[name])
    assert factors.one_D(0) is None
    assert any(float(jnp.abs(d - d[:1, :1]).max()) > 1e-3 for d in factors.D[0].values())


def test_a_new_sequence_part_way_has_another():
    assert factors_of(UNIT_WISE["conv"], zoo.some_resets()).one_D(0) is None


@dataclass(frozen=True)
class Fading(DRTRL):
    """Traces that fade faster; ``plainly`` without what is known of ``D``."""

    keep: float = 0.5
    plainly: bool = False

    def advance(self, traces, factors):
        faded = replace(factors, D=jax.tree.map(lambda d: self.keep * d, factors.D))
        return super().advance(traces, replace(faded, alike=None) if self.plainly else faded)


def test_a_rule_with_a_D_of_its_own_gets_what_it_asked_for():
    case = UNIT_WISE["conv"]
    carry, inputs = zoo.batch_of(case)
    found, _ = zoo.online(case, Fading(), 4, carry, inputs)
    zoo.assert_close(found, zoo.online(case, Fading(plainly=True), 4, carry, inputs)[0])
    other = zoo.online(case, DRTRL(), 4, carry, inputs)[0]
    assert all(float(jnp.abs(a - b).max()) > 1e-3 for a, b in zip(*map(jax.tree.leaves, (found, other)), strict=True))


def leaky(params, h, x):
    """Parameters that act element by element in front of the recurrence, in it, and behind it."""
    h = jnp.tanh(params["decay"]) * h + jnp.tanh(params["gain"] * (x @ params["w"])) + params["bias"]
    return h, params["scale"] * h


def test_a_result_of_parameters_alone_is_moved_once(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    names, n = ("decay", "gain", "bias", "scale"), zoo.UNITS
    params = {name: jnp.cos(jnp.arange(n) + i) for i, name in enumerate(names)} | {"w": UNIT_WISE["indrnn"].params["w"]}
    case = zoo.Case(leaky, params, jnp.zeros(n))
    carry, inputs = zoo.batch_of(case)
    program = RulePlan.of(compile_step_graph(case.step, params, case.carry, inputs[0, 0])).program
    loss = lambda window: (zoo.loss_of(window.outputs), None)  # noqa: E731
    frontier = program.frontier(jax.tree.leaves(params))
    gradient = program.value_and_gradient(loss, frontier, [carry], [inputs])[3]
    shapes = [gradient.operators[i].shape for i in range(len(program.schedule.operators))]
    assert sorted(shapes) == [(1, 1, n)] * 4 + [(zoo.STEPS, zoo.BATCH, n)]
    for rule, window in ((TBPTT(), zoo.STEPS), (DRTRL(), 3)):
        found, _ = zoo.online(case, rule, window, carry, inputs, zoo.some_resets())
        zoo.assert_close(found, zoo.bptt(case, carry, inputs, zoo.some_resets()))
