"""Laws that every learning rule obeys on every model, in float64.

Windows here are one and two steps long, so that a case compiles little; longer ones are drawn further down.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import braintrace_core as bc
from braintrace_core.rules import (
    DNI,
    DRTRL,
    OSTL,
    RTRL,
    TBPTT,
    UORO,
    Combined,
    EProp,
    Immediate,
    PPProp,
    RulePlan,
    Signal,
    SnAp,
    ThreeFactor,
    WindowFactors,
)
from braintrace_core.rules.factors import window_factors
from tests.core.rules import zoo

CASES = {**zoo.cases()[0], **zoo.cases()[1]}
MODELS = (
    "indrnn lstm gru two_states complex_lru complex_dense conv embedding lora sparse grouped einsum stack alif".split()
)
RULES = {
    "d_rtrl": DRTRL(),
    "pp_prop": PPProp(),
    "e_prop": EProp(),
    "e_prop with a filter": EProp(kappa=0.6),
    "three_factor": ThreeFactor(),
    "immediate": Immediate(),
    "tbptt": TBPTT(),
    "rtrl": RTRL(),
    "uoro": UORO(),
    "ostl": OSTL(),
    "ostl without recurrence": OSTL(recurrent=False),
    "snap 1": SnAp(1),
    "snap 2": SnAp(2),
    "dni": DNI(),
    "combined": Combined(PPProp(0.8), recurrence="coupled", kappa=0.6),
}
# D-RTRL, which keeps a trace for every operator, meets all models; rules that keep less of an operator, that see a step
# as a whole, or that share another rule's trace, meet a few of each kind.
FEW = {
    "pp_prop": ["lstm", "gru", "two_states", "complex_lru", "conv", "embedding", "stack", "alif"],
    "e_prop": ["lstm", "alif"],
    "e_prop with a filter": ["lstm", "complex_lru", "stack", "alif"],
    "three_factor": ["two_states", "stack"],
    "immediate": ["gru", "conv"],
    "rtrl": ["lstm", "complex_dense", "embedding", "stack"],
    "uoro": ["gru", "complex_lru"],
    "ostl": ["lstm", "conv"],
    "ostl without recurrence": ["gru"],
    "snap 1": ["gru", "complex_dense"],
    "snap 2": ["sparse", "alif"],
    "dni": ["stack"],
    "combined": ["lstm", "alif"],
    "tbptt": [],  # it has no traces
}
SHAPES = [(rule, name) for rule in RULES for name in FEW.get(rule, MODELS) or ["gru"]]
LAWS = [(rule, name) for rule in RULES for name in FEW.get(rule, MODELS)]
UNITS_IN_ANY_ORDER = [
    *((rule, "gru") for rule in RULES if rule not in ("tbptt", "uoro")),  # UORO draws signs for each place
    *(("d_rtrl", "lstm"), ("pp_prop", "lstm"), ("e_prop with a filter", "alif"), ("snap 2", "alif")),
]


def over(pairs: list[tuple[str, str]]) -> Any:
    """One test for each rule and model."""
    cases = [pytest.param(RULES[rule], name, id=f"{rule}-{name}") for rule, name in pairs]
    return pytest.mark.parametrize(("rule", "name"), cases)


RESET_AT, RESET_ROW = 1, 1

hurried = partial(zoo.hurried, static_argnums=0)


@cache
def plan_of(name: str, again: bool = False) -> RulePlan:
    """The plan of a model; or another one, compiled anew."""
    del again
    case = CASES[name]
    return RulePlan.of(bc.compile_step_graph(case.step, case.params, case.carry, jnp.zeros(zoo.FEATURES)))


@hurried
def run(plan: RulePlan, params: list[Any], initial: list[Any], states: list[Any], inputs: Any, reset: Any) -> Any:
    frontier = plan.program.frontier(params)
    window = plan.program.run(frontier, states, [inputs], reset, initial)
    return window_factors(plan, frontier, window.record)


def factors_of(name: str, params: Any, initial: Any, carry: Any, inputs: Any, reset: Any) -> WindowFactors:
    """The factors of a sequence."""
    leaves = (jax.tree.leaves(tree) for tree in (params, initial, carry))
    return jax.tree.map(np.asarray, run(plan_of(name), *leaves, inputs, reset))


@cache
def sequence(name: str, reset: bool = False, steps: int = 3) -> WindowFactors:
    """The factors of a sequence in which, if asked for, one row starts anew."""
    case = CASES[name]
    carry, inputs = zoo.batch_of(case)
    where = jnp.zeros((steps, zoo.BATCH), bool).at[RESET_AT, RESET_ROW].set(reset)
    return factors_of(name, case.params, case.carry, carry, inputs[:steps], where)


def part(factors: WindowFactors, start: int, stop: int) -> WindowFactors:
    """Some steps of a window."""
    x, df, between, record = jax.tree.map(lambda value: value[start:stop], factors.moving)
    return replace(factors, x=x, df=df, D=between, record=record)


advance = hurried(lambda rule, traces, factors: rule.advance(traces, factors))
gradient = hurried(lambda rule, traces, signal: rule.gradient(traces, signal))


def advanced(rule: Any, traces: Any, factors: WindowFactors, *cuts: int) -> Any:
    """Traces after a sequence that is cut into windows."""
    edges = [0, *cuts, factors.sizes[0]]
    for start, stop in pairwise(edges):
        traces = advance(rule, traces, part(factors, start, stop))
    return traces


@cache
def fresh(rule: Any, name: str) -> Any:
    """Traces before the sequence."""
    return zoo.fresh(rule, plan_of(name))


@cache
def after(rule: Any, name: str, reset: bool = False) -> Any:
    """Traces after the sequence."""
    return advanced(rule, fresh(rule, name), sequence(name, reset), 1)


def signal_for(name: str, seed: int) -> Signal:
    """A signal at some moment."""
    generator = np.random.default_rng(seed)
    factors = sequence(name)
    groups = tuple(
        tuple(generator.normal(size=(zoo.BATCH, *group.varshape)).astype(dtype) for dtype in group.dtypes)
        for group in factors.plan.groups
    )
    return Signal(groups, factors.operands, factors.plan)


def assert_same(found: Any, expected: Any) -> None:
    """Equal to rounding, leaf by leaf, and not all of it zero."""
    assert found.keys() == expected.keys()
    for key, want in expected.items():
        want = np.asarray(want)
        np.testing.assert_allclose(found[key], want, rtol=1e-9, atol=1e-11 * np.abs(want).max(), err_msg=key)
    assert not expected or any(np.any(want) for want in expected.values()), "nothing to compare"


@over(SHAPES)
def test_shapes_dtypes_and_names(rule, name):
    plan = plan_of(name)
    traces = fresh(rule, name)
    for steps in (1, 3):
        new = jax.eval_shape(rule.advance, traces, part(sequence(name), 0, steps))
        assert {k: (v.shape, v.dtype) for k, v in new.items()} == {k: (v.shape, v.dtype) for k, v in traces.items()}
    assert all(value.shape[0] == zoo.BATCH for key, value in traces.items() if not shared(key))
    assert rule.bytes(plan, zoo.BATCH) == sum(value.nbytes for value in traces.values())
    operands = {f"{link.name}.{key}": var for link in plan.links for key, var in link.operator.operands.items()}
    operands |= {f"parameter{i}": var for i, var in enumerate(plan.program.schedule.frontier)}
    found = jax.eval_shape(rule.gradient, traces, signal_for(name, 0))
    assert bool(found) == bool(traces) == (rule != TBPTT())
    for key, value in found.items():
        assert (value.shape, value.dtype) == (operands[key].aval.shape, operands[key].aval.dtype), key
    assert list(jax.eval_shape(lambda: rule.init(plan_of(name, again=True), zoo.BATCH))) == list(traces)
    assert all(re.fullmatch(r"[\w@./]+", key) and not re.search(r"\d{4}", key) for key in traces), "an address?"


@over(LAWS)
def test_windows_may_be_split_anywhere(rule, name):
    factors, start = sequence(name), fresh(rule, name)
    assert_same(advanced(rule, start, factors, 2), after(rule, name))
    assert_same(advanced(rule, start, factors, 1, 2), after(rule, name))


@pytest.mark.parametrize("rule", [DRTRL(), PPProp(), EProp(kappa=0.6)], ids=repr)
@settings(max_examples=5)
@given(cuts=st.sets(st.integers(1, zoo.STEPS - 1)))
def test_longer_windows_may_be_split_anywhere_too(rule, cuts):
    factors, start = sequence("two_states", True, zoo.STEPS), fresh(rule, "two_states")
    assert_same(advanced(rule, start, factors, *sorted(cuts)), advanced(rule, start, factors))


@pytest.mark.parametrize(("steps", "loops"), [(4, 0), (5, 1)])
def test_few_steps_of_pp_prop_are_written_out(steps, loops):
    factors, start = sequence("two_states", True, zoo.STEPS), fresh(PPProp(), "two_states")
    advance = jax.jit(lambda traces, factors: PPProp().advance(traces, factors))
    assert advance.lower(start, part(factors, 0, steps)).as_text().count("stablehlo.while") == loops


@over(LAWS)
def test_the_gradient_is_linear_in_the_signal(rule, name):
    traces = after(rule, name)
    first, second = signal_for(name, 1), signal_for(name, 2)
    mixed = replace(first, groups=jax.tree.map(lambda a, b: 2 * a - 3 * b, first.groups, second.groups))
    one, two, both = (gradient(rule, traces, signal) for signal in (first, second, mixed))
    assert_same(both, {key: 2 * np.asarray(one[key]) - 3 * np.asarray(two[key]) for key in one})
    none = gradient(rule, traces, replace(first, groups=jax.tree.map(np.zeros_like, first.groups)))
    assert not any(np.any(value) for value in none.values())


@over(LAWS)
def test_the_order_of_examples_does_not_matter(rule, name):
    order = np.array([2, 0, 1])
    factors, start = sequence(name), fresh(rule, name)
    x, df, between, record = jax.tree.map(lambda value: value[:, order], factors.moving)
    moved = replace(factors, x=x, df=df, D=between, record=record)
    found = advanced(rule, rows(start, order), moved, 1)
    assert_same(found, rows(after(rule, name), order))
    signal = signal_for(name, 1)
    moved_signal = replace(signal, groups=jax.tree.map(lambda value: value[order], signal.groups))
    assert_same(gradient(rule, found, moved_signal), gradient(rule, after(rule, name), signal))


@over(LAWS)
def test_a_reset_row_is_a_fresh_row(rule, name):
    factors, start = sequence(name, reset=True), fresh(rule, name)
    before = advance(rule, start, part(factors, 0, RESET_AT))
    anew = {**start, **({"key": before["key"]} if "key" in start else {})}  # randomness goes on
    is_row = np.arange(zoo.BATCH) == RESET_ROW
    signal = signal_for(name, 1)
    to_row = jax.tree.map(lambda s: np.where(np.expand_dims(is_row, tuple(range(1, s.ndim))), s, 0), signal.groups)
    at_reset, alone = (advance(rule, traces, part(factors, RESET_AT, RESET_AT + 1)) for traces in (before, anew))
    only = replace(signal, groups=to_row)
    assert_same(gradient(rule, at_reset, only), gradient(rule, alone, only))
    later, alone = after(rule, name, True), advance(rule, anew, part(factors, RESET_AT, 3))
    assert_same(rows(later, is_row), rows(alone, is_row))
    assert_same(rows(later, ~is_row), rows(after(rule, name), ~is_row))


@over(UNITS_IN_ANY_ORDER)
@settings(max_examples=2)
@given(order=st.permutations(range(zoo.UNITS)))
def test_the_order_of_units_does_not_matter(rule, name, order):
    case, start = CASES[name], fresh(rule, name)
    carry, inputs = zoo.batch_of(case)
    moved = partial(jax.tree.map, partial(units_moved, order))
    reset = jnp.zeros((3, zoo.BATCH), bool)
    factors = factors_of(name, moved(case.params), moved(case.carry), moved(carry), inputs[:3], reset)
    found = advanced(rule, start, factors, 1)
    if not isinstance(rule, SnAp):  # its lists of hidden values keep the order of places
        assert_same(found, moved(after(rule, name)))
    signal = signal_for(name, 1)
    there = Signal(moved(signal.groups), factors.operands, factors.plan)
    assert_same(gradient(rule, found, there), moved(gradient(rule, after(rule, name), signal)))


@pytest.mark.parametrize("rule", [DRTRL(), PPProp(), RTRL(), UORO(), SnAp(1), DNI()], ids=repr)
def test_traces_go_by_name_not_by_place(rule):
    """JAX sorts the names: ``parameter10`` comes before ``parameter2``."""
    name = "indrnn"
    backwards = hurried(lambda rule, traces, factors: rule.advance(dict(reversed(traces.items())), factors))
    start = fresh(rule, name)
    first = advance(rule, start, part(sequence(name), 0, 1))
    assert_same(backwards(rule, first, part(sequence(name), 1, 2)), advance(rule, first, part(sequence(name), 1, 2)))
    given_backwards = hurried(lambda rule, traces, signal: rule.gradient(dict(reversed(traces.items())), signal))
    signal = signal_for(name, 1)
    assert_same(given_backwards(rule, first, signal), gradient(rule, first, signal))


def shared(key: str) -> bool:
    """Whether this is a parameter of the rule's own, which all examples share."""
    return key.startswith("synthesiser.")


def rows(traces: Any, which: Any) -> Any:
    """Some rows of the batch."""
    return {key: value if shared(key) else np.asarray(value)[which] for key, value in traces.items()}


def units_moved(order: list[int], value: Any) -> Any:
    """Every axis that counts units, or some units after others (gates, states), in another order."""
    value = np.asarray(value)
    for axis, size in enumerate(value.shape):
        if size % zoo.UNITS == 0:
            places = np.arange(size).reshape(-1, zoo.UNITS)[:, order].ravel()
            value = np.take(value, places, axis)
    return value
