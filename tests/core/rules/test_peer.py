"""The same gradients as the peer library (braintrace 0.2.6), in float64, on the same models with the same parameters.

Where the peer is wrong its value is not ours; ``KNOWN`` names the traps and says what to expect of each.
"""

import warnings

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_core import compile_etrace_graph, nn
from braintrace_core.rules import DRTRL, PPProp, RulePlan, online_gradient, step_online_gradient

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    braintrace = pytest.importorskip("braintrace", reason="the peer library is not installed here")

pytestmark = [
    pytest.mark.loose_promotion,  # the peer's own code needs it
    pytest.mark.filterwarnings("ignore"),
]

INPUTS, UNITS, OUTPUTS, BATCH, STEPS = 3, 4, 2, 3, 12
RULES = {"D_RTRL": DRTRL(), "pp_prop": PPProp(0.9)}
MODELS = {
    "ValinaRNNCell": 1,
    "GRUCell": 1,
    "LSTMCell": 1,
    "LRUCell": 1,
    "MGUCell": 1,
    "GRUCell x 2": 2,
}

# Why a parameter's gradient differs, by model and parameter, with step credit: the trap, and the factor by which the
# peer's is ours (0: the peer gives none).
NO_GRADIENT = "the peer gives no gradient to a parameter without a relation"
TWICE = "the peer counts the path from c to h within a step twice"
KNOWN = {
    "out": (NO_GRADIENT, 0),
    "Wr": (NO_GRADIENT, 0),
    "C_re": (NO_GRADIENT, 0),
    "C_im": (NO_GRADIENT, 0),
    "D": (NO_GRADIENT, 0),
    "Wi": (TWICE, 2),
    "Wg": (TWICE, 2),
}
KNOWN_OF_LSTM_ONLY = {"Wf": (TWICE, 2)}


@pytest.fixture(autouse=True)
def double_precision():
    with brainstate.environ.context(precision=64, dt=1.0):
        yield
    jax.config.update("jax_enable_x64", True)  # leaving brainstate's context turned it off, for all tests to come


class Stack(brainstate.nn.Module):
    """Some cells and a linear readout, of either library."""

    def __init__(self, name, layers, library):
        super().__init__()
        widths = [INPUTS] + [INPUTS if name == "LRUCell" else UNITS] * layers
        self.cells = [getattr(library, name)(width, UNITS) for width in widths[:-1]]
        self.out = library.Linear(widths[-1], OUTPUTS)

    def update(self, x):
        for cell in self.cells:
            x = cell(x)
        return self.out(x)


def pair(model):
    """The peer's model and ours, with the same random parameters."""
    rng = np.random.default_rng(0)
    name, layers = model.split(" ")[0], MODELS[model]
    theirs, ours = Stack(name, layers, braintrace.nn), Stack(name, layers, nn)
    ours_by_path = {tuple(map(str, p)): s for p, s in ours.states(brainstate.ParamState).items()}
    for path, state in theirs.states(brainstate.ParamState).items():
        value = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.5), state.value)
        state.value = value
        twin = ours_by_path[tuple(map(str, path))]
        assert jax.tree.structure(twin.value) == jax.tree.structure(value)
        twin.value = value
    return theirs, ours


def data():
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.normal(size=(STEPS, BATCH, INPUTS))), jnp.asarray(rng.normal(size=(STEPS, BATCH, OUTPUTS)))


def their_gradients(theirs, algorithm, window):
    xs, ys = data()
    options = {"decay_or_rank": 0.9} if algorithm == "pp_prop" else {}
    options |= {} if window is None else {"vjp_method": "multi-step"}
    learner = braintrace.compile(theirs, algorithm, xs[0], batch_size=BATCH, **options)

    def loss(x, y):
        out = learner(x if window is None else braintrace.MultiStepData(x))
        return jnp.mean((out - y) ** 2, axis=(-2, -1))

    chunks = {} if window is None else {"chunk_size": window}
    found, _ = learner.etrace_grad(xs, ys, step_fn=loss, reduction="sum", return_value=True, **chunks)
    return {tuple(map(str, path)): value for path, value in found.items()}


def our_gradients(ours, rule, window, credit):
    xs, ys = data()
    brainstate.nn.init_all_states(ours)
    graph = compile_etrace_graph(ours, xs[0, 0])
    minfo, plan = graph.module_info, RulePlan.of(graph)
    by_path = {path: state.value for path, state in zip(minfo.paths, minfo.compiled_model_states, strict=True)}
    leaves = [leaf for path in minfo.weight_path_to_invars for leaf in jax.tree.leaves(by_path[path])]
    states = [jnp.zeros((BATCH, *v.aval.shape), v.aval.dtype) for v in plan.program.state_invars]
    run = online_gradient if credit == "window" else step_online_gradient

    @jax.jit
    def step(states, traces, x, y):
        loss = lambda w: (jnp.sum(jnp.mean((w.outputs[0] - y) ** 2, axis=(-2, -1))), None)  # noqa: E731
        return run(plan, rule, loss, leaves, states, traces, [x])

    traces, total = rule.init(plan, BATCH), [jnp.zeros_like(leaf) for leaf in leaves]
    for start in range(0, STEPS, window):
        result = step(states, traces, xs[start : start + window], ys[start : start + window])
        states, traces = result.states, result.traces
        total = [a + b for a, b in zip(total, result.gradients, strict=True)]
    found, rest = {}, iter(total)
    for path in minfo.weight_path_to_invars:
        tree = jax.tree.structure(by_path[path])
        found[path] = jax.tree.unflatten(tree, [next(rest) for _ in range(tree.num_leaves)])
    return found


def compare(ours, theirs, factor=1.0, tolerance=1e-10):
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert float(jnp.abs(got).max()) > 0, "nothing to compare"
        assert float(jnp.abs(factor * got - want).max() / jnp.abs(factor * got if factor else got).max()) < tolerance


@pytest.mark.parametrize("algorithm", RULES)
@pytest.mark.parametrize("model", MODELS)
def test_step_credit_is_the_peers_single_step_mode(model, algorithm):
    theirs, ours = pair(model)
    expected = their_gradients(theirs, algorithm, None)
    found = our_gradients(ours, RULES[algorithm], 4, "step")
    assert set(found) == set(expected)
    known = KNOWN | (KNOWN_OF_LSTM_ONLY if model == "LSTMCell" else {})
    for path, value in found.items():
        _, factor = next((known[part] for part in path if part in known), ("", 1))
        compare(value, expected[path], factor)


@pytest.mark.parametrize("model", MODELS)
def test_window_credit_is_the_peers_multi_step_mode(model):
    theirs, ours = pair(model)
    expected = their_gradients(theirs, "D_RTRL", 4)
    found = our_gradients(ours, DRTRL(), 4, "window")
    for path, value in found.items():
        compare(value, expected[path])
