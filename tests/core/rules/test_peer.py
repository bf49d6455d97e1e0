"""The same gradients as the peer library (braintrace 0.2.6), in float64, on the same models with the same parameters.

Where the peer is wrong its value is not ours. ``KNOWN`` says what is wrong; for each entry it is tested that the
difference is that and nothing else, and that our value is right.
"""

from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_core.rules import DRTRL, OSTL, EProp, PPProp, ThreeFactor
from tests.core.rules import peer

pytestmark = [
    pytest.mark.loose_promotion,  # the peer's own code needs it
    pytest.mark.filterwarnings("ignore"),
]

KAPPA, WINDOW = 0.6, 4
KNOWN = {
    "no gradient": "with step credit, none for parameters without a relation",
    "twice": "with step credit, what a state does to another of its group within the step counts twice",
    "calls": "with windows, pp-prop's running mean is divided by the weights of as many steps as there were calls, "
    "this one included, whatever the number of steps in its traces",
    "filter": "with windows, e-prop's filter advances by one step a window",
}
WITHOUT_RELATION = {"out", "Wr", "C_re", "C_im", "D"}


class Pair(NamedTuple):
    """The same rule in both libraries."""

    algorithm: str
    options: dict[str, float]
    rule: Any


RULES = {
    "d_rtrl": Pair("d_rtrl", {}, DRTRL()),
    "pp_prop": Pair("pp_prop", {"decay_or_rank": 0.9}, PPProp(0.9)),
    "e_prop": Pair("e_prop", {"kappa_filter_decay": KAPPA}, EProp(KAPPA)),
    "ostl": Pair("ostl_recurrent", {}, OSTL(recurrent=True)),
    "ostl_feedforward": Pair("ostl_feedforward", {"decay_or_rank": 0.0}, OSTL(recurrent=False)),
}


@pytest.fixture(autouse=True)
def double_precision():
    with brainstate.environ.context(precision=64, dt=1.0):
        yield
    jax.config.update("jax_enable_x64", True)  # leaving brainstate's context turned it off, for all tests to come


def compare(ours, theirs, tolerance=1e-10):
    """Relative to the largest entry of each leaf; leaves of zeros are refused."""
    assert set(ours) == set(theirs)
    for path, value in ours.items():
        for got, want in zip(jax.tree.leaves(value), jax.tree.leaves(theirs[path]), strict=True):
            scale = np.abs(want).max()
            assert scale > 0, f"nothing to compare at {path}"
            assert np.abs(got - want).max() / scale < tolerance, path


def split(gradients):
    """Those of parameters with a relation, and those of the others."""
    without = {path for path in gradients if WITHOUT_RELATION & set(path)}
    return {p: v for p, v in gradients.items() if p not in without}, {p: gradients[p] for p in without}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("model", peer.MODELS)
def test_gradients_are_the_peers(model, name):
    pair = RULES[name]
    theirs = peer.Theirs(model, pair.algorithm, multi_step=True, **pair.options)
    of_windows = {window: theirs.gradients(window) for window in (1, WINDOW)}
    for window, expected in of_windows.items():
        compare(with_windows(model, name, window), expected)

    theirs = peer.Theirs(model, pair.algorithm, multi_step=False, **pair.options)
    expected, nothing = split(theirs.gradients())
    found, others = split(with_steps(model, pair.rule))
    compare(found, expected)
    assert not any(leaf.any() for leaf in jax.tree.leaves(nothing))
    compare(others, split(of_windows[WINDOW])[1])  # what the peer gives them with windows


def with_windows(model, name, window):
    """Our gradients with window credit and, of what is known to be wrong with the peer's, the same wrong."""
    if name == "e_prop" and window > 1:
        ours = peer.ours(model, DRTRL(), window)
        return filtered(ours, lambda i: [(KAPPA ** (i - j), ours.traces[j]) for j in range(1, i + 1)])
    ours = peer.ours(model, RULES[name].rule, window)
    if name != "pp_prop":
        return ours.gradients()
    for i, traces in enumerate(ours.traces):
        assert (traces["steps"] == i * window).all()
    return ours.gradients([t | {"steps": 0 * t["steps"] + i + 1} for i, t in enumerate(ours.traces)])


def with_steps(model, rule):
    """The same with step credit."""
    if model not in peer.READERS:
        return peer.ours(model, rule, WINDOW, "step").gradients()
    return peer.Ours(model, peer.CountedTwice(model, rule), peer.STEPS, "step").gradients()


def filtered(ours, parts):
    """Gradients for each window ``i`` of weighted sums of traces, ``parts(i)`` giving weights and traces."""
    zero = ours.traces[0]
    total = ours.gradients([zero] * len(ours.traces))
    for i in range(len(ours.traces)):
        for weight, traces in parts(i):
            more, less = ours.total([(i, traces)]), ours.total([(i, zero)])
            total = jax.tree.map(lambda t, a, b, w=weight: t + w * (a - b), total, more, less)
    return total


@pytest.mark.parametrize("model", peer.MODELS)
def test_modulated_gradients_are_the_peers(model):
    shape = peer.compiled(model)[0].groups[0].varshape
    modulator = np.random.default_rng(2).normal(size=(peer.STEPS, peer.BATCH, *shape))
    expected, nothing = split(peer.Theirs(model, "three_factor", multi_step=False).gradients(modulator=modulator))
    found, others = split(peer.Ours(model, ThreeFactor(), WINDOW, "step", modulator).gradients())
    compare(found, expected)
    assert not any(leaf.any() for leaf in jax.tree.leaves(nothing))
    compare(others, split(peer.ours(model, DRTRL(), WINDOW, "step").gradients())[1])  # the loss's own


@pytest.mark.parametrize("model", peer.READERS)
def test_what_a_state_does_within_the_step_counts_once(model):
    """With operators blind to the states' past, back-propagation is what step credit computes."""
    found = peer.ours(model, DRTRL(), WINDOW, "step").gradients()
    compare(found, peer.bptt_of_blind_operators(model))


@pytest.mark.parametrize("model", ["GRU", "CUBA"])
def test_the_filter_of_e_prop_counts_steps(model):
    each = peer.ours(model, DRTRL(), 1).traces
    expected = filtered(
        peer.ours(model, DRTRL(), WINDOW),
        lambda i: [(KAPPA ** (WINDOW * i - t), each[t]) for t in range(1, WINDOW * i + 1)],
    )
    compare(peer.ours(model, EProp(KAPPA), WINDOW).gradients(), expected)


@pytest.mark.parametrize("model", peer.SPIKING)
def test_spiking_models_spike(model):
    spikes = jnp.stack([module.cells[0].neuron.spikes() for module in peer.forward(model)])
    assert 0 < int(spikes.sum()) < spikes.size
    assert all(spikes.any((0, 1))), "a silent neuron"
