"""Stock cells, unmodified: every parameter learns, and back-propagation is met where that is due.

What adds nothing is left out: RTRL is exact at any window, so one step is enough; a window of the whole sequence is the
same for every rule, since no trace has been written yet; a rule sees a graph, whatever framework it came from.
"""

from __future__ import annotations

import contextlib

import brainstate
import jax
import numpy as np
import pytest

from tests.flax import zoo

SEEDS = 0, 1, 2
CELLS = [(framework, cell) for framework, (cells, _) in zoo.FRAMEWORKS.items() for cell in cells]
STACKED = [("linen", "LSTMCell"), ("nnx", "GRUCell"), ("brainstate", "ValinaRNNCell")]
UNIT_WISE = {"LRUCell"}


def over(cells):
    """One test for each cell; brainstate's own need implicit promotion."""
    marks = {"brainstate": pytest.mark.loose_promotion}
    cases = [pytest.param(f, cell, id=f"{f}-{cell}", marks=marks.get(f, ())) for f, cell in cells]
    return pytest.mark.parametrize(("framework", "cell"), cases)


@pytest.fixture(autouse=True)
def double_precision(framework):
    """What brainstate's own cells need; leaving its context turns float64 off for all tests to come."""
    with brainstate.environ.context(precision=64) if framework == "brainstate" else contextlib.nullcontext():
        yield
    jax.config.update("jax_enable_x64", True)


def prepare(framework, cell, layers):
    """The compiled model, data for each seed, and the gradients of back-propagation."""
    case = zoo.FRAMEWORKS[framework][1](cell, layers)
    model = case.compile()
    sets = [zoo.data(model, seed) for seed in SEEDS]
    return model, sets, [*map(case.bptt, *zip(*sets, strict=True))]


def every_parameter_learns(model, rule, window, sets):
    """The online and the truncated gradients; the traces add something."""
    run = zoo.online(model, rule, window)
    results = [run(*each) for each in sets]
    for found, truncated in results:
        assert all(np.abs(leaf).max() > 0 for leaf in zoo.leaves(found))
        assert zoo.distance(found, truncated) > 0
    return results


def closer_than_truncated(results, truths):
    """Whether traces turn the gradient towards that of back-propagation, on average over seeds."""
    closeness = [[zoo.cosine(each, truth) for each in pair] for pair, truth in zip(results, truths, strict=True)]
    ours, truncated = np.mean(closeness, axis=0)
    return truncated < ours < 1 + 1e-12


@over(CELLS)
def test_a_stock_cell(framework, cell):
    model, sets, truths = prepare(framework, cell, layers=1)
    found, _ = zoo.online(model, "rtrl", 1)(*sets[0])
    zoo.assert_same(found, truths[0])
    results = every_parameter_learns(model, "d_rtrl", 1, sets)
    assert closer_than_truncated(results, truths)
    if cell in UNIT_WISE:
        zoo.assert_same(results[0][0], truths[0])
    if framework == "linen":
        every_parameter_learns(model, "pp_prop", 1, sets[:1])


@over(STACKED)
def test_two_layers_with_a_readout(framework, cell):
    model, sets, truths = prepare(framework, cell, layers=2)
    found, _ = zoo.online(model, "d_rtrl", zoo.STEPS)(*sets[0])
    zoo.assert_same(found, truths[0])
    results = every_parameter_learns(model, "d_rtrl", 4, sets)
    assert closer_than_truncated(results, truths)
    if framework == "linen":
        every_parameter_learns(model, "pp_prop", 4, sets[:1])


@pytest.mark.whole_table
@pytest.mark.parametrize("layers", [1, 2])
@over([each for each in CELLS if each[1] not in UNIT_WISE])
def test_the_whole_table(framework, cell, layers):
    """Every rule at every window on every cell, what adds nothing included."""
    model, sets, truths = prepare(framework, cell, layers)
    for rule in ("d_rtrl", "pp_prop", "rtrl"):
        for window in (1, 4, zoo.STEPS):
            results = [zoo.online(model, rule, window)(*each) for each in sets]
            for found, _ in results:
                assert all(np.abs(leaf).max() > 0 for leaf in zoo.leaves(found))
            if window == zoo.STEPS or rule == "rtrl":
                zoo.assert_same(results[0][0], truths[0])
            elif rule == "d_rtrl":
                assert closer_than_truncated(results, truths)
