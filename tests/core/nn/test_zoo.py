"""What holds for everything in ``nn``, checked over the whole zoo."""

import re

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_core import nn
from tests.core.nn.zoo import CELLS, LAYERS, NEURONS, assert_close, pure, run, values

ALL = CELLS | LAYERS | NEURONS
STATEFUL = CELLS | NEURONS
TRAINABLE = CELLS | LAYERS
STEPS = 12


def over(table):
    return pytest.mark.parametrize("name", table)


def test_the_zoo_has_every_public_class():
    shown = {type(node).__name__ for each in ALL.values() for node in each.build().nodes().values()}
    classes = {name for name in nn.__all__ if isinstance(getattr(nn, name), type)}
    assert classes - shown == {"COBA", "CUBA", "Cell", "Layer"}


@over(ALL)
def test_a_batch_is_its_examples(name):
    example = ALL[name]
    inputs = example.inputs(STEPS, 3)
    module = example.build()
    brainstate.nn.init_all_states(module, batch_size=3)
    batched = run(module, inputs)
    hidden = values(module, brainstate.HiddenState)
    assert batched.shape == (STEPS, 3, *module.out_size)

    brainstate.nn.init_all_states(module)
    step, start = pure(module, inputs[0, 0]), values(module)
    final, single = jax.vmap(lambda xs: jax.lax.scan(step, start, xs), in_axes=1)(inputs)
    assert single.shape == (3, STEPS, *module.out_size)
    assert_close(batched, np.moveaxis(single, 0, 1))
    for path, value in hidden.items():
        assert_close(value, final[path])


@over(STATEFUL)
def test_a_loop_is_the_scan(name):
    example = STATEFUL[name]
    module = example.build()
    brainstate.nn.init_all_states(module, batch_size=2)
    inputs = example.inputs(5, 2)
    expected = run(module, inputs)
    states = values(module)
    module.reset_state()
    assert_close(np.stack([module(x) for x in inputs]), expected)
    for path, value in values(module).items():
        jax.tree.map(lambda new, old: assert_close(new, old), value, states[path])


@over(ALL)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_one_strong_dtype_everywhere(name, dtype):
    example = ALL[name]
    module = example.build(dtype=dtype)
    brainstate.nn.init_all_states(module)
    x = example.input(dtype=dtype)
    before = jax.tree.leaves(values(module))
    after, y = jax.eval_shape(pure(module, x), values(module), x)
    after = jax.tree.leaves(after)
    assert [leaf.shape for leaf in after] == [leaf.shape for leaf in before]
    for leaf in [y, *after, *before]:
        assert (leaf.dtype, leaf.weak_type) == (jnp.dtype(dtype), False)


@over(ALL)
def test_default_dtype_is_that_of_jax(name):
    assert ALL[name].build().dtype == jnp.float64
    with jax.enable_x64(False):
        assert ALL[name].build().dtype == jnp.float32


@over([name for name, example in ALL.items() if example.rows is None])
def test_inputs_are_cast(name):
    example = ALL[name]
    module = example.build(dtype="float32")
    brainstate.nn.init_all_states(module)
    for dtype in (float, bool, int):
        x = np.ones(example.shape, dtype)
        assert jax.eval_shape(pure(module, x), values(module), x)[1].dtype == jnp.float32


@over(TRAINABLE)
def test_same_key_same_bits(name):
    def leaves(key):
        return jax.tree.leaves(values(TRAINABLE[name].build(key=key)))

    five, default = leaves(jax.random.key(5)), leaves(None)
    for left, right in zip(five + default, leaves(jax.random.key(5)) + leaves(jax.random.key(0)), strict=True):
        np.testing.assert_array_equal(left, right)
    assert any(not np.array_equal(left, right) for left, right in zip(five, default, strict=True))
    matrices = [leaf for leaf in five if leaf.ndim > 1]
    assert not any(np.array_equal(one, two) for i, one in enumerate(matrices) for two in matrices[:i])


@over(TRAINABLE)
def test_every_parameter_gets_a_gradient(name):
    example = TRAINABLE[name]
    module = example.build()
    brainstate.nn.init_all_states(module)
    inputs, states = example.inputs(STEPS), values(module)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(STEPS, *module.out_size)))
    step = pure(module, inputs[0])

    @jax.jit
    @jax.grad
    def gradient(params):
        return jnp.sum(weights * jax.lax.scan(step, states | params, inputs)[1])

    gradients = gradient(values(module, brainstate.ParamState))
    assert gradients
    for path, leaf in jax.tree.leaves_with_path(gradients):
        assert np.isfinite(leaf).all()
        assert np.abs(leaf).max() > 1e-6, path


@over([name for name, example in STATEFUL.items() if example.spiking])
@pytest.mark.parametrize("batch", [None, 3])
def test_spiking_modules_spike(name, batch):
    example = STATEFUL[name]
    module = example.build()
    brainstate.nn.init_all_states(module, batch_size=batch)
    spikes = run(module, example.inputs(STEPS, batch))
    assert set(np.unique(spikes)) == {0.0, 1.0}
    assert 0.05 < spikes.mean() < 0.8


@over(STATEFUL)
def test_reset_starts_again(name):
    example = STATEFUL[name]
    module = example.build()
    brainstate.nn.init_all_states(module, batch_size=2)
    states, start = module.states(), values(module)
    module(example.inputs(1, 2)[0])
    module.reset_state()
    for path, state in module.states().items():
        assert state is states[path]
        jax.tree.map(np.testing.assert_array_equal, state.value, start[path])
    module.reset_state(batch_size=5)
    assert module(example.inputs(1, 5)[0]).shape == (5, *module.out_size)


@over(STATEFUL)
def test_states_are_per_stream_under_vmapped_init(name):
    module = STATEFUL[name].build()
    brainstate.nn.vmap_init_all_states(module, axis_size=3)
    assert all(value.shape[0] == 3 for value in values(module, brainstate.HiddenState).values())


@over(ALL)
def test_split_and_merge(name):
    example = ALL[name]
    module = example.build()
    brainstate.nn.init_all_states(module)
    copy = brainstate.graph.treefy_merge(*brainstate.graph.treefy_split(module))
    x = example.input()
    np.testing.assert_array_equal(copy(x), module(x))


@over(STATEFUL)
def test_no_state_yet(name):
    example = STATEFUL[name]
    with pytest.raises(RuntimeError, match=re.escape("has no states yet. Call init_state() for a single stream")):
        example.build()(example.input())


@over(STATEFUL)
def test_wrong_batch(name):
    example = STATEFUL[name]
    module = example.build()
    brainstate.nn.init_all_states(module, batch_size=2)
    with pytest.raises(
        ValueError, match=r"got x with leading axes \(3,\), but its states have \(2,\). Call init_state"
    ):
        module(example.inputs(1, 3)[0])
