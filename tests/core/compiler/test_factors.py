"""Factors against dense Jacobians: every model of the zoo, alone, in a batch, and inside every kind of call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_core import compile_step_graph
from tests.core.compiler.oracle import at_home, diagonal, expected_factors, homes
from tests.core.compiler.support import (
    all_values,
    compiled,
    gradient_from_factors,
    relations_by_name,
    state_values,
)
from tests.core.compiler.zoo import ZOO

over_the_zoo = pytest.mark.parametrize("name", ZOO)


def close(found, expected, tolerance):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    kind = np.complex128 if np.iscomplexobj(expected) else np.float64
    np.testing.assert_allclose(found.astype(kind), expected.astype(kind), rtol=tolerance, atol=tolerance)


def check_factors(model, graph, factors, seed=0):
    """Compare the factors of one step with Jacobians of the model's plain function."""
    carry, inputs = model.values(seed)
    relation_of = relations_by_name(graph, model.operators)
    for g, members in enumerate(model.groups):
        dense = expected_factors(model.step, model.params, carry, inputs, list(members))
        plan = graph.factor_plan
        width = dense.D.shape[0]
        between = plan.dense_D(factors, g)
        close(np.asarray(between, np.float64).reshape(-1, width, width), diagonal(dense.D), model.tolerance)
        for name, r in relation_of.items():
            groups = [group.index for group in graph.hidden_param_op_relations[r].hidden_groups]
            jacobian = dense.df.get(name)  # None in a branch that was not taken
            if g not in groups:
                assert jacobian is None or not jacobian.any()
                continue
            found = np.asarray(plan.dense_df(factors, r, groups.index(g)))
            found = found.astype(np.complex128 if np.iscomplexobj(found) else np.float64).reshape(-1, width)
            if jacobian is None:
                assert not found.any()
                continue
            home = model.home[name] if name in model.home else homes(jacobian)
            close(found, at_home(jacobian, home), model.tolerance)
            unit = plan.groups[g].positions(r).unit.ravel()
            assert (unit[home >= 0] == home[home >= 0]).all()


@over_the_zoo
def test_factors_are_the_diagonal_of_the_jacobian(name):
    model, graph = ZOO[name], compiled(name)
    old = state_values(graph, model.params, model.carry)
    out, new, factors = graph.step_with_factors(*model.inputs, old_state_vals=old)
    check_factors(model, graph, factors)
    new_carry, expected_out = model.function(model.params, model.carry, *model.inputs)
    jax.tree.map(lambda a, b: close(a, b, model.tolerance), out, expected_out)
    for found, expected in zip(new, state_values(graph, model.params, new_carry), strict=True):
        if not jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
            close(found, expected, model.tolerance)


@over_the_zoo
def test_hidden_groups(name):
    model, graph = ZOO[name], compiled(name)
    paths = [
        ("carry", *(jax.tree_util.keystr((key,), simple=True) for key in keys))
        for keys, _ in jax.tree_util.tree_leaves_with_path(model.carry)
    ]
    assert [group.hidden_paths for group in graph.hidden_groups] == [[paths[i] for i in g] for g in model.groups]


@over_the_zoo
def test_number_of_passes(name):
    assert compiled(name).factor_plan.num_passes == ZOO[name].passes


# Model -> the entries of ``D`` between components, and the components that each operator moves; all others are zero
# whatever the values, so no rule needs to keep them.
ENTRIES = {
    "vanilla": (set(), {"w": {0}, "u": {0}, "b": {0}}),
    "indrnn": ({(0, 0)}, {"d": {0}, "w": {0}}),
    "lstm_fused": ({(0, 1), (1, 1)}, {"w": {0, 1}, "u": {0, 1}, "b": {0, 1}}),
    "lstm_split": ({(0, 1), (1, 1)}, {"i": {0, 1}, "f": {0, 1}, "g": {0, 1}, "o": {0}}),
    "synapse_and_membrane": ({(0, 0), (1, 0), (1, 1)}, {"w": {0, 1}}),
    "two_names_for_one_value": (set(), {"w": {0, 1}}),
    "complex_lru": ({(a, b) for a in (0, 1) for b in (0, 1)}, {"lambda": {0, 1}, "re": {0, 1}, "im": {0, 1}}),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_entries_that_are_zero_by_structure_are_not_there(name):
    model, graph = ZOO[name], compiled(name)
    old = state_values(graph, model.params, model.carry)
    _, _, factors = graph.step_with_factors(*model.inputs, old_state_vals=old)
    between, moved = ENTRIES[name]
    assert set(factors.D[0]) == between
    found = relations_by_name(graph, model.operators)
    assert {operator: set(factors.df[r][0]) for operator, r in found.items()} == moved


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.whole_table] if i % 2 else []) for i, name in enumerate(sorted(ZOO))]
)
def test_a_batch_under_vmap_and_jit(name):
    model, graph = ZOO[name], compiled(name)
    examples = [model.values(seed) for seed in (0, 1)]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *examples)

    @jax.jit
    def run(params, carry, inputs):
        def one(carry, inputs):
            return graph.step_with_factors(*inputs, old_state_vals=state_values(graph, params, carry))[2]

        return jax.vmap(one)(carry, inputs)

    factors = run(model.params, *batch)
    for seed in (0, 1):
        check_factors(model, graph, jax.tree.map(lambda leaf: leaf[seed], factors), seed)  # noqa: B023


def loss_of(out, states):
    """Some scalar of everything that a step returns; weights tell its parts apart."""
    total = 0.0
    for i, leaf in enumerate(jax.tree.leaves((out, states))):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            weights = jnp.cos(jnp.arange(leaf.size) + i).reshape(leaf.shape)
            parts = [jnp.real(leaf), jnp.imag(leaf)] if jnp.iscomplexobj(leaf) else [leaf]
            total += sum(jnp.sum(jnp.sin(part.astype(jnp.float64) * (k + 1)) * weights) for k, part in enumerate(parts))
    return total


@over_the_zoo
def test_signals_times_factors_are_the_gradient_of_one_step(name):
    """The whole chain: signals, factors, operators and what is before them. Nothing is counted twice (trap 1)."""
    model, graph = ZOO[name], compiled(name)
    old = state_values(graph, model.params, model.carry)
    hidden = set(graph.hidden_perturb.perturb_hidden_paths)

    def perturbed(terms):
        out, new = graph.call_hidden_perturb(model.inputs, terms, old)
        return loss_of(out, [v for p, v in zip(graph.module_info.paths, new, strict=True) if p in hidden])

    def plain(params):
        carry, out = model.function(params, model.carry, *model.inputs)
        new = state_values(graph, params, carry)
        return loss_of(out, [v for p, v in zip(graph.module_info.paths, new, strict=True) if p in hidden])

    terms = graph.hidden_perturb.init_perturb_data()
    factors = graph.step_with_factors(*model.inputs, old_state_vals=old)[2]
    found = gradient_from_factors(graph, factors, jax.grad(perturbed)(terms), all_values(graph, model.inputs, old))
    expected = jax.grad(plain)(model.params)
    assert {path[-1] for path, _ in found} | model.partial == set(expected)
    for (path, _), gradient in found.items():
        if path[-1] not in model.partial:
            close(gradient, expected[path[-1]], 10 * model.tolerance)
            assert np.abs(np.asarray(gradient, np.complex128)).max() > 0 or name in IDLE


def test_only_shapes_are_read_when_compiling():
    """Parameters and carry may be abstract, or traced by an outer transformation."""
    model = ZOO["lstm_fused"]
    shapes = jax.eval_shape(lambda: (model.params, model.carry, model.inputs))
    abstract = compile_step_graph(model.function, shapes[0], shapes[1], *shapes[2])
    assert repr(abstract) == repr(compiled("lstm_fused"))
    assert not any(np.any(state.value) for state in abstract.module_info.compiled_model_states)

    @jax.jit
    def compile_and_run(params, carry, x):
        graph = compile_step_graph(model.function, params, carry, x)
        return graph.step_with_factors(x, old_state_vals=state_values(graph, params, carry))[2]

    check_factors(model, compiled("lstm_fused"), compile_and_run(model.params, model.carry, *model.inputs))


# Models in which some parameter has no effect at the chosen values.
IDLE = {"learnt_start", "cond_true", "cond_false", "switch"}
