"""Traces stored in bfloat16 while everything else is float32: same shapes, gradients close to the full ones."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_core as bc
from braintrace_core.rules import DNI, DRTRL, OSTL, RTRL, UORO, EProp, Immediate, PPProp, RulePlan, Signal, SnAp
from braintrace_core.rules.factors import window_factors
from tests.core.rules import zoo

ROUNDING = 2.0**-8  # of bfloat16, relative
CASES = {**zoo.cases()[0], **zoo.cases()[1]}
RULES = {
    "d_rtrl": DRTRL(),
    "pp_prop": PPProp(),
    "e_prop with a filter": EProp(kappa=0.6),
    "immediate": Immediate(),
    "rtrl": RTRL(),
    "uoro": UORO(),
    "ostl": OSTL(),
    "snap": SnAp(),
    "dni": DNI(),
}
BY_OPERATOR = ("d_rtrl", "pp_prop", "e_prop with a filter", "immediate")  # the others see a step as a whole
# The trace rule of every operator with D-RTRL, and every other rule on some models.
FEW = {
    "pp_prop": ["lstm", "complex_dense", "conv", "embedding", "sparse", "alif"],
    "e_prop with a filter": ["gru", "complex_lru"],
    "rtrl": ["lstm", "complex_dense"],
    "uoro": ["gru"],
    "ostl": ["lstm"],
    "snap": ["gru", "complex_dense"],
    "dni": ["indrnn"],
    "immediate": [],  # only factors that wait
}
advance = zoo.hurried(lambda rule, traces, factors: rule.advance(traces, factors), static_argnums=0)
gradient = zoo.hurried(lambda rule, traces, signal: rule.gradient(traces, signal), static_argnums=0)


def single(tree: Any) -> Any:
    """The same numbers in single precision."""
    return jax.tree.map(lambda a: a.astype(jnp.complex64 if jnp.iscomplexobj(a) else jnp.float32), tree)


@cache
def case_of(name: str) -> tuple[zoo.Case, RulePlan, Any, Any]:
    """A case in single precision, its plan, and a batch of it."""
    case = CASES[name]
    case = case._replace(params=single(case.params), carry=single(case.carry))
    plan = RulePlan.of(bc.compile_step_graph(case.step, case.params, case.carry, jnp.zeros(zoo.FEATURES, jnp.float32)))
    return case, plan, *single(zoo.batch_of(CASES[name]))


def factors_of(plan: RulePlan, case: zoo.Case, carry: Any, inputs: Any) -> Any:
    """The factors of a sequence."""

    @zoo.hurried
    def run(states: Any, inputs: Any) -> Any:
        frontier = plan.program.frontier(jax.tree.leaves(case.params))
        return window_factors(plan, frontier, plan.program.run(frontier, states, [inputs]).record)

    return jax.tree.map(np.asarray, run(jax.tree.leaves(carry), inputs))


@cache
def sequence(name: str) -> Any:
    case, plan, carry, inputs = case_of(name)
    return factors_of(plan, case, carry, inputs[:4])


def part(factors: Any, start: int, stop: int) -> Any:
    x, df, between, record = jax.tree.map(lambda value: value[start:stop], factors.moving)
    return replace(factors, x=x, df=df, D=between, record=record)


def signal_for(factors: Any) -> Signal:
    generator = np.random.default_rng(1)
    groups = tuple(
        tuple(generator.normal(size=(factors.sizes[1], *group.varshape)).astype(dtype) for dtype in group.dtypes)
        for group in factors.plan.groups
    )
    return Signal(groups, factors.operands, factors.plan)


def waits(rule: Any, key: str) -> bool:
    """Whether this is a factor that waits for the next step, an axis or a parameter of the rule's own, not a trace."""
    if key.startswith("synthesiser."):
        return True
    return rule != PPProp() and (".df." in key or ".D." in key or ".axis." in key or key.endswith(".x"))


@pytest.mark.parametrize(
    ("rule", "name"),
    [(RULES[rule], name) for rule in RULES for name in (CASES if rule in BY_OPERATOR else FEW[rule])],
    ids=lambda value: value if isinstance(value, str) else repr(value),
)
def test_traces_stay_short_and_gradients_do_not(rule, name):
    _, plan, _, _ = case_of(name)
    factors = sequence(name)
    full, traces = (jax.eval_shape(lambda d=d: rule.init(plan, zoo.BATCH, d)) for d in (None, jnp.bfloat16))
    for key, value in traces.items():
        own = full[key].dtype
        changes = jnp.issubdtype(own, jnp.floating) and not waits(rule, key)
        assert value.dtype == (jnp.bfloat16 if changes else own), key
    assert rule.bytes(plan, zoo.BATCH, jnp.bfloat16) == sum(
        value.size * value.dtype.itemsize for value in traces.values()
    )
    new = jax.eval_shape(rule.advance, traces, part(factors, 0, 2))
    assert {k: (v.shape, v.dtype) for k, v in new.items()} == {k: (v.shape, v.dtype) for k, v in traces.items()}
    found = jax.eval_shape(rule.gradient, traces, signal_for(factors))
    expected = jax.eval_shape(rule.gradient, full, signal_for(factors))
    assert {k: (v.shape, v.dtype) for k, v in found.items()} == {k: (v.shape, v.dtype) for k, v in expected.items()}


LEFT_OUT = (
    *("layer_norm", "complex_dense"),  # nothing in D: D-RTRL keeps no trace
    *("summed_weights", "leading_axis", "stack", "lif", "gru", "two_states"),  # operators that others have too
)
PAIRS = [
    pytest.param(rule, name, id=f"{key}-{name}")
    for key, rule in RULES.items()
    for name in FEW.get(key, [name for name in CASES if name not in LEFT_OUT])
]


@pytest.mark.parametrize(("rule", "name"), PAIRS)
def test_gradients_are_close_to_the_full_ones(rule, name):
    _, plan, _, _ = case_of(name)
    factors = sequence(name)

    def after(dtype: Any) -> Any:
        traces = zoo.fresh(rule, plan, dtype)
        for start in (0, 2):
            traces = advance(rule, traces, part(factors, start, start + 2))
        return gradient(rule, traces, signal_for(factors))

    full, short = after(None), after(jnp.bfloat16)
    for key, want in full.items():
        got, want = np.asarray(short[key]), np.asarray(want)
        assert np.abs(want).max() > 0, key
        assert np.abs(got - want).max() < 2e-2 * np.abs(want).max(), key
        cosine = np.real(np.vdot(got, want)) / np.linalg.norm(got) / np.linalg.norm(want)
        assert cosine > 0.999, key
    if not any(jnp.issubdtype(value.dtype, jnp.complexfloating) for value in full.values()):
        assert any(np.any(short[key] != full[key]) for key in full), "not rounded at all"


@pytest.mark.parametrize("rule", [DRTRL(), PPProp(0.95), EProp(kappa=0.9), RTRL(), UORO(), SnAp()], ids=repr)
def test_a_window_rounds_once(rule):
    """Error of traces after 32 steps: one window's is that of one rounding, that of single steps adds up."""
    weights = jnp.linspace(-1, 1, zoo.FEATURES * zoo.UNITS, dtype=jnp.float32).reshape(zoo.FEATURES, zoo.UNITS)
    case = zoo.Case(lambda p, h, x: (0.95 * h + jnp.tanh(x @ p), h), weights, jnp.zeros(zoo.UNITS, jnp.float32))
    inputs = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1, (32, 1, zoo.FEATURES)), jnp.float32)
    plan = RulePlan.of(bc.compile_step_graph(case.step, case.params, case.carry, inputs[0, 0]))
    factors = factors_of(plan, case, case.carry[None], inputs)

    def after(window: int, dtype: Any) -> Any:
        traces = rule.init(plan, 1, dtype)
        for start in range(0, 32, window):
            traces = advance(rule, traces, part(factors, start, start + window))
        return traces

    full, at_once, by_step = after(32, None), after(32, jnp.bfloat16), after(1, jnp.bfloat16)
    rounded = [key for key in full if at_once[key].dtype == jnp.bfloat16]
    assert rounded

    def error(traces: Any) -> float:
        found = [np.abs(np.asarray(traces[k], np.float32) - full[k]).max() / np.abs(full[k]).max() for k in rounded]
        return float(max(found))

    assert error(at_once) <= ROUNDING
    assert error(by_step) > 2 * error(at_once) > 0


@pytest.mark.parametrize(("rule", "credit"), [(DRTRL(), "window"), (PPProp(), "step")], ids=repr)
def test_online_gradients_with_short_traces(rule, credit):
    case, _, carry, inputs = case_of("indrnn")
    full, _ = zoo.online(case, rule, 4, carry, inputs, credit=credit)
    short, traces = zoo.online(case, rule, 4, carry, inputs, credit=credit, trace_dtype=jnp.bfloat16)
    assert any(value.dtype == jnp.bfloat16 for value in traces.values())
    zoo.assert_close(short, full, 2e-2)
    assert jax.tree.map(jax.typeof, short) == jax.tree.map(jax.typeof, case.params)
    assert any(np.any(short[key] != full[key]) for key in full), "not rounded at all"
