"""A window that is not finite is counted and left out, and training goes on from where it was.

Moments of an optimizer see a gradient of zero; parameters, carry and traces are as if the window had not been.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace_flax as braintrace
from tests.flax import small

pytestmark = pytest.mark.loose_promotion  # Optax relies on it
online_grad_module = importlib.import_module("braintrace_flax.online_grad")  # the package has a function of its name


@pytest.fixture(scope="module", params=["window", "step"])
def step(request):
    tx = optax.chain(
        braintrace.online_grad(small.model(), credit=request.param), optax.add_decayed_weights(0.1), optax.sgd(0.05)
    )
    return braintrace.train_step(small.model(), tx, window=2, donate=False)(small.loss)


@pytest.fixture(scope="module")
def without(step):
    """The states after each window of a run without the second."""
    inputs, targets = small.data(6)
    state = first = step(step.init(jax.random.key(0)), inputs[:2], targets[:2])[0]
    return first, step(state, inputs[4:], targets[4:])[0]


def assert_like(found, expected):
    small.assert_same((found.params, found.carry), (expected.params, expected.carry))
    small.assert_same(found.opt_state[0].traces, expected.opt_state[0].traces)
    small.assert_same(found.opt_state[1], expected.opt_state[1])


@pytest.mark.parametrize("where", ["inputs", "targets"])
def test_training_goes_on_as_if_the_window_had_not_been(step, without, where):
    inputs, targets = small.data(6)
    broken = {"inputs": inputs, "targets": targets}
    broken[where] = broken[where].at[3, 0].set(jnp.nan)  # one example of one step
    state, first_metrics = step(step.init(jax.random.key(0)), inputs[:2], targets[:2])
    state, metrics = step(state, broken["inputs"][2:4], broken["targets"][2:4])
    assert not np.isfinite(metrics["loss"]).all()
    assert (first_metrics["skipped"].tolist(), metrics["skipped"].tolist()) == ([False], [True])
    assert_like(state, without[0])
    state, metrics = step(state, inputs[4:], targets[4:])
    assert np.isfinite(metrics["loss"]).all()
    assert_like(state, without[1])
    assert small.differs(state.params, without[0].params)
    assert int(optax.tree.get(state.opt_state, "skipped")) == 1


def test_momentum_does_not_move_parameters_meanwhile():
    tx = optax.chain(braintrace.online_grad(small.model()), optax.adamw(0.05, weight_decay=0.1))
    step = braintrace.train_step(small.model(), tx, window=2, donate=False)(small.loss)
    inputs, targets = small.data(6)
    first, _ = step(step.init(jax.random.key(0)), inputs[:2], targets[:2])
    second, _ = step(first, inputs[2:4].at[0].set(jnp.nan), targets[2:4])
    small.assert_same((second.params, second.carry), (first.params, first.carry))
    third, metrics = step(second, inputs[4:], targets[4:])
    assert np.isfinite(metrics["loss"]).all()
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((third.params, third.opt_state[1])))
    assert small.differs(third.params, first.params)


def test_the_same_within_one_call(step, without):
    inputs, targets = small.data(6)
    state, metrics = step(step.init(jax.random.key(0)), inputs.at[2, 1, 0].set(jnp.inf), targets)
    assert metrics["skipped"].tolist() == [False, True, False]
    assert np.isfinite(np.asarray(metrics["loss"])[[0, 2]]).all()
    assert_like(state, without[1])


def test_a_broken_trace_costs_one_window(step):
    inputs, targets = small.data(2)
    state = step.init(jax.random.key(0))
    traces = jax.tree.map(lambda trace: jnp.full_like(trace, jnp.nan), state.opt_state[0].traces)
    state = state._replace(opt_state=(state.opt_state[0]._replace(traces=traces), *state.opt_state[1:]))
    state, metrics = step(state, inputs, targets)
    assert metrics["skipped"].tolist() == [True]
    state, metrics = step(state, inputs, targets)
    assert metrics["skipped"].tolist() == [False]
    fresh, _ = step(step.init(jax.random.key(0)), inputs, targets)
    assert_like(state, fresh)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64])
@pytest.mark.parametrize("shape", [(), (5,), (3000,), (70, 50), (2, 40, 50), (2, 3000)])
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_one_number_is_enough(monkeypatch, shape, dtype, value):
    monkeypatch.setattr(jax, "device_count", lambda: 1)  # as on a machine with one device, where arrays are probed
    all_finite = jax.jit(lambda *leaves: online_grad_module._all_finite(leaves))
    fine = jnp.full(shape, jnp.finfo(dtype).max, dtype)
    assert all_finite(fine, jnp.zeros(4, dtype))
    last = tuple(size - 1 for size in shape)
    assert not all_finite(fine.at[last].set(value), jnp.zeros(4, dtype))
