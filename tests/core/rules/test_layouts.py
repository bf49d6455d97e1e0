"""Layers that lie in one array, in whatever order: D-RTRL is exact on them, or the compiler says that it is not."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import braintrace_core as bc
from braintrace_core.rules import DRTRL
from tests.core.rules import zoo


class Layout(NamedTuple):
    """A state that holds layers: what joins them, and what takes them out of it again."""

    join: Callable[..., Any]
    take: Callable[..., Any]


class Layers(NamedTuple):
    """Leaky layers whose units keep to themselves."""

    case: zoo.Case
    is_in_one_order: bool


@st.composite
def layouts(draw, sizes):
    total = sum(sizes)
    rows = draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    upright = draw(st.booleans())
    order = draw(st.one_of(st.just(range(total)), st.just(range(total)[::-1]), st.permutations(range(total))))
    back = np.argsort(order)

    def ordered(flat, by):
        return flat if list(by) == list(range(total)) else flat[np.array(by)]

    def join(layers):
        state = ordered(jnp.concatenate(layers), order).reshape(rows, -1)
        return state if upright else state.T

    def take(state):
        return cut(ordered((state if upright else state.T).ravel(), back), sizes)

    return Layout(join, take)


def cut(flat, sizes):
    return [flat[a:b] for a, b in pairwise([0, *np.cumsum(sizes)])]


@st.composite
def layers(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    has_two_states, share_a_product, sees_new = (draw(st.booleans()) for _ in range(3))
    first = draw(layouts(sizes))
    second = draw(st.one_of(st.just(first), layouts(sizes)))
    r = zoo.random(draw(st.integers(0, 99)))

    def step(p, carry, x):
        results = cut(x @ p["w"], sizes) if share_a_product else [x @ w for w in p["w"]]
        olds = first.take(carry[0])
        news = [d * v + jnp.tanh(y) for d, v, y in zip(p["d"], olds, results, strict=True)]
        if not has_two_states:
            return (first.join(news),), first.join(news) ** 2
        slow = second.take(carry[1])
        news = [v + 0.4 * jnp.sin(a) for v, a in zip(news, slow, strict=True)]
        slow = [0.7 * a + 0.3 * v for a, v in zip(slow, news if sees_new else olds, strict=True)]
        return (first.join(news), second.join(slow)), (first.join(news) ** 2, jnp.cos(second.join(slow)))

    params = {"w": r(zoo.FEATURES, sum(sizes)) if share_a_product else [r(zoo.FEATURES, n) for n in sizes]}
    params["d"] = [r(n) for n in sizes]
    carry = (first.join([r(n) for n in sizes]), second.join([r(n) for n in sizes]))[: 1 + has_two_states]
    return Layers(zoo.Case(step, params, carry), not has_two_states or second is first)


@settings(max_examples=20)
@given(layers(), st.sampled_from([1, 3]), st.booleans())
def test_layers_in_one_array(layers, window, reset):
    case = layers.case
    carry, inputs = zoo.batch_of(case)
    graph = bc.compile_step_graph(case.step, case.params, case.carry, inputs[0, 0])
    warnings = [record for record in graph.diagnostics if record.level is not bc.DiagnosticLevel.INFO]
    if warnings:
        assert not layers.is_in_one_order, warnings
        return
    resets = zoo.some_resets() if reset else None
    expected = zoo.bptt(case, carry, inputs, resets)
    for credit in ("window", "step"):
        found, _ = zoo.online(case, DRTRL(), window, carry, inputs, resets, credit=credit)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9), found, expected)
