"""The traps of other implementations that concern the compiler, one test each; the numbers are those of the list."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_core import compile_etrace_graph, compile_step_graph, matmul, nn
from tests.core.compiler.oracle import PLAIN
from tests.core.compiler.support import all_values, compile_model, gradient_from_factors, state_values
from tests.core.compiler.test_calls import in_custom_jvp, in_custom_vjp, in_remat
from tests.core.compiler.test_factors import close
from tests.core.compiler.zoo import IN, ZOO, N, Numbers, both

X = Numbers(3)(IN)


def one_step_gradient(graph, params, carry, x):
    """The gradient of the sum of the new states, from factors."""
    old = state_values(graph, params, carry)
    _, _, factors = graph.step_with_factors(x, old_state_vals=old)
    ones = [jnp.ones(v.aval.shape, v.aval.dtype) for v in graph.module_info.hidden_path_to_invar.values()]
    return gradient_from_factors(graph, factors, ones, all_values(graph, (x,), old))


MASK = jnp.asarray(np.arange(IN * N).reshape(IN, N) % 2, jnp.float64)

TRANSFORMS = {
    "2 * w": lambda p: 2 * p["w"],
    "abs(w)": lambda p: jnp.abs(p["w"]),
    "masked": lambda p: p["w"] * MASK,
    "weight norm": lambda p: p["w"] / jnp.sqrt((p["w"] ** 2).sum(axis=0, keepdims=True)),
    "w + v": lambda p: p["w"] + p["v"],
    "w * v": lambda p: p["w"] * p["v"],
}


@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "lifted"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_2_a_transform_before_the_operator_keeps_its_factor(name, by_hand):
    r = Numbers()
    params, carry, product = {"w": r(IN, N), "v": r(IN, N)}, r(N), matmul if by_hand else jnp.matmul

    def step(p, h, x):
        return both(jnp.tanh(product(x, TRANSFORMS[name](p)) + 0.5 * h))

    found = one_step_gradient(compile_step_graph(step, params, carry, X), params, carry, X)
    expected = jax.grad(lambda p: step(p, carry, X)[0].sum())(params)
    used = {path[-1]: gradient for (path, _), gradient in found.items()}
    assert used.keys() == ({"w", "v"} if "v" in name.split() else {"w"})
    for key, gradient in used.items():
        close(gradient, expected[key], 1e-12)


@pytest.mark.parametrize("wrap", [in_remat, in_custom_vjp, in_custom_jvp])
@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "lifted"])
def test_4_operators_inside_checkpoint_and_custom_rules_are_found(wrap, by_hand):
    product = matmul if by_hand else jnp.matmul
    graph = compile_step_graph(
        wrap(lambda p, h, x: both(jnp.tanh(product(x, p["w"]) + p["d"] * h))),
        {"w": jnp.ones((IN, N)), "d": jnp.ones(N)},
        jnp.ones(N),
        X,
    )
    assert {r.path[-1] for r in graph.hidden_param_op_relations} == {"w", "d"}


@pytest.mark.parametrize("units", [4, 20])
def test_5_diagonals_are_not_column_sums(units):
    """Through a layer norm every column sum is zero; the diagonal is not."""
    r = Numbers()
    params, carry = r(IN, units), r(units)

    def step(p, h, x):
        z = x @ p + h
        return both((z - z.mean()) / jnp.sqrt(z.var() + 1e-5))

    graph = compile_step_graph(step, params, carry, X)
    _, _, factors = graph.step_with_factors(X, old_state_vals=state_values(graph, params, carry))
    dense = jax.jacrev(lambda h: step(params, h, X)[0])(carry)
    close(np.abs(dense.sum(axis=0)).max() < 1e-12, True, 0)
    close(factors.D[0][0, 0], jnp.diag(dense), 1e-12)
    close(factors.df[0][0][0], jnp.diag(dense), 1e-12)
    assert np.abs(factors.D[0][0, 0]).min() > 0.01
    mean = compile_step_graph(lambda p, h, x: both(x @ p + h.mean() + 0 * h), params, carry, X)
    _, _, factors = mean.step_with_factors(X, old_state_vals=state_values(mean, params, carry))
    close(factors.D[0][0, 0], jnp.full(units, 1 / units), 1e-12)


def test_7_layers_of_equal_width_and_name_stay_apart():
    class Twice(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.ValinaRNNCell(4, 4), nn.ValinaRNNCell(4, 4)

        def update(self, x):
            return self.two(self.one(x))

    model = Twice()
    brainstate.nn.init_all_states(model)
    graph = compile_etrace_graph(model, jnp.ones(4))
    assert [g.hidden_paths for g in graph.hidden_groups] == [[("one", "h")], [("two", "h")]]
    assert [[g.index for g in r.hidden_groups] for r in graph.hidden_param_op_relations] == [[0], [1]]


@pytest.mark.parametrize("name", ["lstm_fused", "layer_norm", "rolled_state", "complex_lru"])
def test_8_examples_of_a_batch_do_not_mix(name):
    """A model that is compiled with its batch: the factors of one example are those that it has alone."""
    model = ZOO[name]
    examples = [model.values(seed) for seed in range(3)]
    carry, (x,) = jax.tree.map(lambda *leaves: jnp.stack(leaves), *examples)

    def step(params, carry, x):
        return jax.vmap(lambda carry, x: model.step(params, carry, x, PLAIN))(carry, x)

    batched = compile_step_graph(step, model.params, carry, x)
    alone = compile_model(model)
    _, _, factors = batched.step_with_factors(x, old_state_vals=state_values(batched, model.params, carry))
    for b, (carry_b, inputs_b) in enumerate(examples):
        old = state_values(alone, model.params, carry_b)
        _, _, expected = alone.step_with_factors(*inputs_b, old_state_vals=old)
        for key, value in expected.D[0].items():
            close(factors.D[0][key][b], value, 1e-12)


def test_10_nothing_is_keyed_by_identity():
    """Two models made anew give graphs whose every key is a path, a name or a number that they share."""

    def keys():
        cell = nn.LSTMCell(3, 4)
        brainstate.nn.init_all_states(cell)
        graph = compile_etrace_graph(cell, jnp.ones(3))
        _, _, factors = graph.step_with_factors(jnp.ones(3))
        return jax.tree_util.tree_flatten_with_path(factors)[0], list(graph.hid_path_to_group)

    (first, paths), (second, other_paths) = keys(), keys()
    assert [path for path, _ in first] == [path for path, _ in second]
    assert paths == other_paths
