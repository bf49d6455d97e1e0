"""Rules that mind whether a window counts: if not, their traces stay; and traces can be forgotten first."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_core as bc
from braintrace_core.rules import DRTRL, OSTL, EProp, Immediate, RulePlan, past_gradient, step_gradient, window_gradient
from tests.core.rules import zoo

UNIT_WISE, MIXING = zoo.cases()
ALL = {**UNIT_WISE, **MIXING}


def windows(name, rule, window, credit):
    """Traces after some steps, and a function of a window and the two flags that follows them."""
    case = ALL[name]
    carry, inputs = zoo.batch_of(case)
    plan = RulePlan.of(
        bc.compile_step_graph(case.step, case.params, case.carry, jax.tree.map(lambda x: x[0, 0], inputs))
    )
    params, states, inputs = jax.tree.leaves(case.params), jax.tree.leaves(carry), jax.tree.leaves(inputs)

    @zoo.hurried
    def advance(states, traces, inputs, fine, anew):
        present = (window_gradient if credit == "window" else step_gradient)(
            plan, lambda found: (zoo.loss_of(found.outputs), None), params, states, inputs
        )
        more, traces = past_gradient(plan, rule, params, traces, present, None, credit, fine, anew)
        return present.after, more, traces

    first, second = ([leaf[i * window : (i + 1) * window] for leaf in inputs] for i in range(2))
    states, _, traces = advance(states, zoo.fresh(rule, plan), first, None, None)
    return lambda traces, inputs, *flags: advance(states, traces, inputs, *flags), traces, second


def assert_close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), found, expected)


CASES = [
    *((name, DRTRL()) for name in ("lstm", "gru", "two_states", "complex_lru", "fused_gates", "conv", "sparse")),
    ("embedding", DRTRL(rows=2)),
    ("embedding", DRTRL()),
    ("lstm", EProp(kappa=0.7)),
    ("lstm", OSTL()),
    ("gru", Immediate()),
]


WAYS = [(1, "window"), (4, "window"), (4, "step")]
TABLE = [
    (name, rule, *way)
    for i, (name, rule) in enumerate(CASES)
    for j, way in enumerate(WAYS)
    if name == "lstm" or i % 3 == j
]


@pytest.mark.parametrize(
    ("name", "rule", "window", "credit"), TABLE, ids=lambda part: part if isinstance(part, str) else repr(part)
)
def test_traces(name, rule, window, credit):
    check(name, rule, window, credit)


def check(name, rule, window, credit):
    assert rule.minds_windows
    advance, traces, inputs = windows(name, rule, window, credit)
    assert any(np.any(trace) for trace in traces.values())
    bad = [jnp.full_like(leaf, jnp.nan) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf for leaf in inputs]
    yes, no = jnp.array(True), jnp.array(False)

    _, _, kept = advance(traces, bad, no, no)
    for key, trace in traces.items():
        np.testing.assert_array_equal(kept[key], trace, err_msg=key)

    _, gradient, new = advance(traces, inputs, yes, no)
    _, expected_gradient, expected = advance(traces, inputs, None, None)
    assert_close((gradient, new), (expected_gradient, expected))

    broken = {
        key: jnp.full_like(trace, jnp.nan) if jnp.issubdtype(trace.dtype, jnp.inexact) else trace
        for key, trace in traces.items()
    }
    empty = {key: jnp.zeros_like(trace) for key, trace in traces.items()}
    _, gradient, new = advance(broken, inputs, yes, yes)
    _, expected_gradient, expected = advance(empty, inputs, None, None)
    assert_close((gradient, new), (expected_gradient, expected))
