"""The containers of the contract: their fields, in order, and what their methods do."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_core
from braintrace_core import (
    CompilationRecord,
    DiagnosticKind,
    DiagnosticLevel,
    ETraceGraph,
    HiddenGroup,
    HiddenParamOpRelation,
    HiddenPerturbation,
    ModuleInfo,
    NotSupportedError,
    PathClassification,
    add_hidden_perturbation_from_minfo,
    add_hidden_perturbation_in_module,
    compile_etrace_graph,
    extract_module_info,
    find_hidden_groups_from_minfo,
    find_hidden_groups_from_module,
    find_hidden_param_op_relations_from_jaxpr,
    find_hidden_param_op_relations_from_minfo,
    find_hidden_param_op_relations_from_module,
    nn,
)
from braintrace_core._compat import eval_jaxpr, open_jaxpr
from tests.core.compiler.oracle import diagonal
from tests.core.compiler.support import all_values, compiled, relations_by_name, state_values
from tests.core.compiler.test_factors import close
from tests.core.compiler.zoo import ZOO

X = jnp.asarray([0.3, -1.2, 0.7])


@pytest.fixture
def lstm():
    cell = nn.LSTMCell(3, 4, key=jax.random.key(5))
    brainstate.nn.init_all_states(cell)
    cell.h.value, cell.c.value = jnp.linspace(-1, 1, 4), jnp.linspace(0.5, -2, 4)
    return cell


@pytest.fixture
def minfo(lstm):
    return extract_module_info(lstm, X)


# Names and fields


def test_everything_in_the_contract_is_importable():
    names = """
    register_primitive ModuleInfo extract_module_info HiddenGroup find_hidden_groups_from_minfo
    find_hidden_groups_from_module HiddenParamOpRelation find_hidden_param_op_relations_from_minfo
    find_hidden_param_op_relations_from_module find_hidden_param_op_relations_from_jaxpr PathClassification
    CompilationRecord DiagnosticKind DiagnosticLevel HiddenPerturbation add_hidden_perturbation_from_minfo
    add_hidden_perturbation_in_module ETraceGraph compile_etrace_graph NotSupportedError
    """.split()
    assert [name for name in names if name not in braintrace_core.__all__] == []


FIELDS = {
    ModuleInfo: """
    stateful_model closed_jaxpr retrieved_model_states compiled_model_states state_id_to_path state_tree_invars
    state_tree_outvars hidden_path_to_invar hidden_path_to_outvar invar_to_hidden_path outvar_to_hidden_path
    hidden_outvar_to_invar weight_invars weight_path_to_invars invar_to_weight_path num_var_out num_var_state
    """,
    HiddenGroup: """
    index hidden_paths hidden_states hidden_invars hidden_outvars transition_jaxpr transition_jaxpr_constvars
    """,
    HiddenParamOpRelation: """
    primitive x_var y_var hidden_groups y_to_hidden_group_jaxprs connected_hidden_paths eqn_params path_classification
    trainable_vars trainable_paths trainable_leaf_indices trainable_param_states trainable_processing_chains
    """,
    HiddenPerturbation: "perturb_jaxpr perturb_hidden_paths perturb_hidden_states",
    ETraceGraph: """
    module_info hidden_groups hid_path_to_group hidden_param_op_relations hidden_perturb diagnostics
    """,
    CompilationRecord: "kind level message primitive weight_path hidden_paths context",
}


@pytest.mark.parametrize("container", FIELDS, ids=lambda c: c.__name__)
def test_fields_in_order(container):
    fields = getattr(container, "_fields", None) or tuple(container.__dataclass_fields__)
    assert list(fields) == FIELDS[container].split()


def test_defaults_of_fields():
    defaults = HiddenParamOpRelation._field_defaults
    assert list(defaults) == FIELDS[HiddenParamOpRelation].split()[7:]
    assert all(value == {} for value in defaults.values())
    assert ETraceGraph._field_defaults == {"diagnostics": ()}


def test_kinds_and_levels():
    kinds = """
    RELATION_INCLUDED RELATION_PARTIAL_PATH RELATION_EXCLUDED_WEIGHT_TO_WEIGHT RELATION_EXCLUDED_NON_TEMPORAL
    RELATION_EXCLUDED_NO_PARAMSTATE RELATION_EXCLUDED_SHAPE_MISMATCH TRAINABLE_INVAR_NOT_PARAMSTATE
    PYTREE_WEIGHT_LEAF_AMBIGUOUS MULTI_OUTPUT_PRIMITIVE_DETECTED PRIMITIVE_INSIDE_CONTROL_FLOW
    PRIMITIVE_INSIDE_NESTED_JIT
    """.split()
    assert set(kinds) <= {kind.name for kind in DiagnosticKind}
    assert [level.name for level in DiagnosticLevel] == ["INFO", "WARNING", "ERROR"]
    assert [c.name for c in PathClassification] == ["ALL_DIRECT", "ALL_THROUGH_OTHER_ETP", "MIXED"]


def test_dict_holds_every_field(lstm):
    graph = compile_etrace_graph(lstm, X)
    for container in (
        graph,
        graph.module_info,
        graph.hidden_groups[0],
        graph.hidden_param_op_relations[0],
        graph.hidden_perturb,
    ):
        found = container.dict()
        assert list(found) == FIELDS[type(container)].split()
        assert all(found[name] is getattr(container, name) for name in found)


def test_readable_forms(lstm):
    graph = compile_etrace_graph(lstm, X)
    assert repr(graph.hidden_groups[0]) == "HiddenGroup(0: c, h; shape (4,), 2 state(s) a unit)"
    relation = graph.hidden_param_op_relations[3]
    assert repr(relation) == "HiddenParamOpRelation(etp_mv(weight=Wo/weight, bias=Wo/weight) -> h)"
    text = repr(graph.module_info)
    for line in ("  input   float64[3]", "  hidden  c: float64[4]", "  weight  Wi/weight: float64[4], float64[7,4]"):
        assert line in text
    assert repr(graph).startswith("ETraceGraph(groups 0: c, h\n  HiddenParamOpRelation(etp_mv(weight=Wi")
    (record,) = graph.explain(kind=DiagnosticKind.HIDDEN_GROUP_MERGED)
    assert str(record) == "[info] hidden_group_merged: c, h feed one another unit by unit and form group 0."


# ModuleInfo


def test_variables_of_the_states(minfo, lstm):
    assert minfo.paths == [("c",), ("h",), *((f"W{k}", "weight") for k in "igfo")]
    assert minfo.retrieved_model_states[("Wg", "weight")] is lstm.Wg.weight
    assert [minfo.state_id_to_path[id(s)] for s in minfo.compiled_model_states] == minfo.paths
    assert set(minfo.hidden_path_to_invar) == {("h",), ("c",)}
    for path, before in minfo.hidden_path_to_invar.items():
        after = minfo.hidden_path_to_outvar[path]
        assert minfo.invar_to_hidden_path[before] == minfo.outvar_to_hidden_path[after] == path
        assert minfo.hidden_outvar_to_invar[after] is before
        assert before in minfo.jaxpr.invars
        assert after in minfo.jaxpr.outvars
    assert len(minfo.weight_invars) == 8
    assert all(minfo.weight_path_to_invars[minfo.invar_to_weight_path[v]] for v in minfo.weight_invars)
    assert (minfo.num_var_out, minfo.num_var_state) == (1, 10)
    assert len(minfo.jaxpr.outvars) == 11
    assert jax.tree.structure(minfo.state_tree_invars[2]) == jax.tree.structure(lstm.Wi.weight.value)
    assert jax.tree.structure(minfo.state_tree_outvars[2]) == jax.tree.structure(lstm.Wi.weight.value)
    assert [v.aval.shape for v in minfo.input_invars] == [(3,)]


def test_jaxpr_call(minfo, lstm):
    out, states = minfo.jaxpr_call(X)
    before = lstm.h.value
    c, h, *weights = _values(minfo)
    other, _ = minfo.jaxpr_call(X, old_state_vals=[c, 2 * h, *weights])
    assert lstm.h.value is before  # nothing was written
    close(out, lstm(X), 1e-12)
    close(states[0], lstm.c.value, 1e-12)
    lstm.c.value, lstm.h.value = c, 2 * h
    close(other, lstm(X), 1e-12)


def _values(minfo):
    return [state.value for state in minfo.compiled_model_states]


def test_add_jaxpr_outs(minfo):
    y = next(eqn.outvars[0] for eqn in minfo.jaxpr.eqns if eqn.primitive.name == "etp_mv")
    wider = minfo.add_jaxpr_outs([y, minfo.hidden_path_to_invar[("h",)]])
    out, states, extra = wider.jaxpr_call(X)
    _, h, weight, *_ = _values(minfo)
    close(extra[0], jnp.concatenate([X, h]) @ weight["weight"] + weight["bias"], 1e-12)
    close(extra[1], h, 0)
    close(out, minfo.jaxpr_call(X)[0], 0)
    assert len(states) == 6
    assert wider.hidden_path_to_outvar == minfo.hidden_path_to_outvar
    assert len(minfo.jaxpr.outvars) == 11  # the original is as it was


def test_split_state_outvars(minfo):
    weights, hidden, others = minfo.split_state_outvars()
    assert list(weights) == [("Wi", "weight"), ("Wg", "weight"), ("Wf", "weight"), ("Wo", "weight")]
    assert hidden == {path: minfo.hidden_path_to_outvar[path] for path in [("h",), ("c",)]}
    assert others == {}


# HiddenGroup


def test_groups_from_either_source(minfo, lstm):
    for groups, path_to_group in (find_hidden_groups_from_minfo(minfo), find_hidden_groups_from_module(lstm, X)):
        assert [group.hidden_paths for group in groups] == [[("c",), ("h",)]]
        assert path_to_group == {("c",): groups[0], ("h",): groups[0]}
        assert groups[0].hidden_states == [lstm.c, lstm.h]


@pytest.mark.parametrize("name", ZOO)
def test_the_transition_and_its_diagonal(name):
    model, graph = ZOO[name], compiled(name)
    old = state_values(graph, model.params, model.carry)
    values = all_values(graph, model.inputs, old)
    for group in graph.hidden_groups:
        hidden = [values[v] for v in group.hidden_invars]
        inputs = [values[v] for v in group.transition_jaxpr_constvars]
        assert list(group.transition_jaxpr.constvars) == group.transition_jaxpr_constvars
        assert list(group.transition_jaxpr.invars) == group.hidden_invars
        for found, out in zip(group.transition(hidden, inputs), group.hidden_outvars, strict=True):
            close(found, values[out], model.tolerance)
        if not any(jnp.iscomplexobj(h) for h in hidden):
            found = group.diagonal_jacobian(hidden, inputs)
            assert found.shape == (*group.varshape, group.num_state, group.num_state)
            dense = _dense(group, hidden, inputs)
            close(np.asarray(found, np.float64).reshape(dense.shape), dense, model.tolerance)


def _dense(group, hidden, inputs):
    size = int(np.prod(group.varshape))
    with jax.numpy_dtype_promotion("standard"):
        full = jax.jacrev(lambda h: group.transition(h, inputs))(hidden)
    full = [[np.asarray(block, np.float64).reshape(size, size) for block in row] for row in full]
    return diagonal(np.asarray(full).transpose(0, 2, 1, 3))


def test_the_diagonal_of_a_holomorphic_transition_is_complex():
    model, graph = ZOO["complex_lru"], compiled("complex_lru")
    (group,) = graph.hidden_groups
    values = all_values(graph, model.inputs, state_values(graph, model.params, model.carry))
    inputs = [values[v] for v in group.transition_jaxpr_constvars]
    found = group.diagonal_jacobian([model.carry], inputs)
    close(found[:, 0, 0], jnp.exp(jax.lax.complex(-jnp.exp(model.params["nu"]), model.params["theta"])), 1e-12)


def test_operators_are_not_part_of_a_transition():
    for name in ("vanilla", "lstm_fused", "gru_reset_before"):
        for group in compiled(name).hidden_groups:
            names = {eqn.primitive.name for eqn in group.transition_jaxpr.eqns}
            assert not {n for n in names if n.startswith("etp_") and n != "etp_elemwise"}


def test_concat_and_split():
    model = nn.SpikingLayer(3, nn.GroupALIF(4), nn.Expon(4))
    brainstate.nn.init_all_states(model)
    (group,) = compile_etrace_graph(model, X).hidden_groups
    assert (group.varshape, group.num_state) == ((4,), 3)
    values = [jnp.arange(8.0).reshape(4, 2), jnp.arange(4.0)]
    joined = group.concat_hidden(values)
    close(joined, jnp.asarray([[0.0, 1, 0], [2, 3, 1], [4, 5, 2], [6, 7, 3]]), 0)
    for found, value in zip(group.split_hidden(joined), values, strict=True):
        close(found, value, 0)
    batch = group.concat_hidden([jnp.zeros((5, 4, 2)), jnp.zeros((5, 4))])
    assert batch.shape == (5, 4, 3)


def test_concat_and_split_of_two_precisions():
    (group,) = compiled("states_of_two_precisions").hidden_groups
    parts = group.split_hidden(group.concat_hidden([jnp.ones(5, jnp.float32), jnp.ones(5)]))
    assert [part.dtype for part in parts] == [jnp.float32, jnp.float64]


def test_states_of_different_shapes_make_no_group():
    one, other = compiled("two_layers").hidden_groups
    three = compiled("bias_with_axes_of_one").hidden_groups[0]
    one.check_consistent_varshape()
    broken = one._replace(
        hidden_paths=[*one.hidden_paths, *three.hidden_paths],
        hidden_states=[*one.hidden_states, *three.hidden_states],
        hidden_invars=[*one.hidden_invars, *three.hidden_invars],
    )
    with pytest.raises(NotSupportedError, match=r"must have one shape, found \{'carry/0': \(5,\), 'carry': \(4, 5\)\}"):
        broken.check_consistent_varshape()
    assert other.index == 1


# HiddenParamOpRelation


def test_relations_from_any_source(minfo, lstm):
    _, path_to_group = find_hidden_groups_from_minfo(minfo)
    from_minfo = find_hidden_param_op_relations_from_minfo(minfo, path_to_group)
    from_module = find_hidden_param_op_relations_from_module(lstm, X)
    assert list(map(repr, from_minfo)) == list(map(repr, from_module))
    assert [r.path for r in from_minfo] == [(f"W{k}", "weight") for k in "igfo"]
    part = from_minfo[1].y_to_hidden_group_jaxprs[0]
    assert find_hidden_param_op_relations_from_jaxpr(minfo, part, path_to_group) == []
    first_half = minfo.jaxpr.eqns[: len(minfo.jaxpr.eqns) // 2]
    whole = find_hidden_param_op_relations_from_jaxpr(minfo, minfo.jaxpr, path_to_group)
    assert list(map(repr, whole)) == list(map(repr, from_minfo))
    some = find_hidden_param_op_relations_from_jaxpr(minfo, _jaxpr_of(first_half), path_to_group)
    assert 0 < len(some) < 4


def _jaxpr_of(eqns):
    class Part:
        pass

    part = Part()
    part.eqns = eqns
    return part


def test_the_parts_of_a_relation(lstm):
    graph = compile_etrace_graph(lstm, X)
    relation = graph.hidden_param_op_relations[3]
    assert relation.primitive.name == "etp_mv"
    assert relation.x is relation.x_var
    assert relation.y is relation.y_var
    assert relation.path == ("Wo", "weight")
    assert relation.eqn_params["has_bias"] is True
    assert relation.connected_hidden_paths == [("h",)]  # the output gate does not move the memory
    assert relation.path_classification == {("h",): PathClassification.ALL_DIRECT}
    assert relation.trainable_paths == {"weight": ("Wo", "weight"), "bias": ("Wo", "weight")}
    # Leaves of a dict come in the order of its keys.
    assert relation.trainable_leaf_indices == {"weight": 1, "bias": 0}
    assert relation.trainable_param_states == {"weight": lstm.Wo.weight, "bias": lstm.Wo.weight}
    invars = graph.module_info.weight_path_to_invars[("Wo", "weight")]
    assert relation.trainable_vars == {"weight": invars[1], "bias": invars[0]}
    assert relation.trainable_processing_chains == {"weight": (), "bias": ()}


@pytest.mark.parametrize("name", ZOO)
def test_from_the_result_to_the_states(name):
    model, graph = ZOO[name], compiled(name)
    values = all_values(graph, model.inputs, state_values(graph, model.params, model.carry))
    for relation in graph.hidden_param_op_relations:
        eqn = next(eqn for eqn in graph.module_info.jaxpr.eqns if relation.y in eqn.outvars)
        consts = []
        for jaxpr in relation.y_to_hidden_group_jaxprs:
            assert list(jaxpr.invars) == [relation.y]
            assert eqn not in jaxpr.eqns
            assert relation.y not in [v for e in jaxpr.eqns for v in e.outvars]
            names = {e.primitive.name for e in jaxpr.eqns}
            assert not {n for n in names if n.startswith("etp_") and n not in ("etp_elemwise", "etp_test_gain")}
            consts.append([values[v] for v in jaxpr.constvars])
        new = relation.y_to_hidden_groups(values[relation.y], consts, concat_hidden_vals=False)
        for group, states in zip(relation.hidden_groups, new, strict=True):
            for state, out in zip(states, group.hidden_outvars, strict=True):
                close(state, values[out], model.tolerance)
        joined = relation.y_to_hidden_groups(values[relation.y], consts)
        assert [j.shape for j in joined] == [(*g.varshape, g.num_state) for g in relation.hidden_groups]


@pytest.mark.parametrize("name", ZOO)
def test_processing_chains(name):
    """What stands before an operator gives its operand, and sends gradients back as ``jax.vjp`` does."""
    model, graph = ZOO[name], compiled(name)
    values = all_values(graph, model.inputs, state_values(graph, model.params, model.carry))
    for relation in graph.hidden_param_op_relations:
        for key, chain in relation.trainable_processing_chains.items():
            operand = values[relation.trainable_vars[key]]
            leaves = [values[v] for v in chain.variables]
            close(chain.evaluate(*leaves), operand, model.tolerance)
            assert len(set(chain)) == len(chain)
            assert [p.name for p in chain] == list(dict.fromkeys(e.primitive.name for e in chain.jaxpr.eqns))
            gradient = jnp.cos(jnp.arange(operand.size)).astype(operand.dtype).reshape(operand.shape)
            _, pull_back = jax.vjp(chain.evaluate, *leaves)
            for found, expected in zip(chain.pull_back(leaves, gradient), pull_back(gradient), strict=True):
                close(found, expected, model.tolerance)
            assert relation.trainable_paths[key] == chain.paths[0]
            assert relation.trainable_leaf_indices[key] == chain.leaf_indices[0]
            assert [graph.module_info.invar_to_weight_path[v] for v in chain.variables] == list(chain.paths)


CHAINS = {
    ("vanilla", "w"): [],
    ("doubled_weight", "w"): ["mul"],
    ("absolute_and_masked_weights", "w"): ["abs"],
    ("absolute_and_masked_weights", "v"): ["mul"],
    ("sum_of_weights", "w"): ["mul", "add"],
    ("weights_side_by_side", "w"): ["concatenate"],
    ("weight_on_the_left", "w"): ["transpose"],
    ("low_rank_correction", "w"): ["dot_general", "add"],
    ("complex_lru", "lambda"): ["exp", "neg", "complex"],  # and exp again
    ("table_read_in_two_ways", "row"): ["slice", "squeeze"],
    ("scalar_for_all_units", "a"): ["logistic", "broadcast_in_dim"],
}


@pytest.mark.parametrize(("name", "operator"), CHAINS)
def test_the_primitives_of_a_chain(name, operator):
    graph = compiled(name)
    relation = graph.hidden_param_op_relations[relations_by_name(graph, ZOO[name].operators)[operator]]
    (chain,) = relation.trainable_processing_chains.values()
    assert [primitive.name for primitive in chain] == CHAINS[name, operator]
    assert isinstance(chain, tuple)


# HiddenPerturbation


def test_gradients_with_respect_to_the_terms(lstm):
    """``dL/dh``, the other states of the group held fixed."""
    graph = compile_etrace_graph(lstm, X)
    perturbation = graph.hidden_perturb
    assert perturbation.perturb_hidden_paths == [("c",), ("h",)]
    assert perturbation.perturb_hidden_states == [lstm.c, lstm.h]
    terms = perturbation.init_perturb_data()
    assert [term.shape for term in terms] == [(4,), (4,)]
    out, states = graph.call_hidden_perturb((X,), terms)
    close(out, graph.module_info.jaxpr_call(X)[0], 1e-12)
    moved, new_states = graph.call_hidden_perturb((X,), [terms[0] + 0.25, terms[1] + 0.5])
    close(moved, out + 0.5, 1e-12)  # the memory's term does not move the output
    close(new_states[0], states[0] + 0.25, 1e-12)
    gradient = jax.grad(lambda terms: jnp.sin(graph.call_hidden_perturb((X,), terms)[0]).sum())(terms)
    close(gradient[0], jnp.zeros(4), 0)
    close(gradient[1], jnp.cos(out), 1e-12)


def test_perturbation_from_either_source(minfo, lstm):
    for perturbation in (add_hidden_perturbation_from_minfo(minfo), add_hidden_perturbation_in_module(lstm, X)):
        flat = minfo.flatten_inputs((X,), {}, _values(minfo))
        jaxpr, _ = open_jaxpr(perturbation.perturb_jaxpr)
        terms = perturbation.init_perturb_data()
        assert len(jaxpr.invars) == len(flat) + 2
        for found, expected in zip(
            perturbation.eval_jaxpr(flat, terms), eval_jaxpr(minfo.jaxpr, minfo.consts, *flat), strict=True
        ):
            close(found, expected, 1e-12)


def test_a_term_reaches_the_next_layer_and_the_output():
    """Through an operator, a term acts on everything behind it; only mates of its own group do not see it."""
    graph, model = compiled("two_layers"), ZOO["two_layers"]
    old = state_values(graph, model.params, model.carry)
    terms = graph.hidden_perturb.init_perturb_data()
    paths = graph.module_info.paths

    def second_layer(terms):
        _, new = graph.call_hidden_perturb(model.inputs, terms, old)
        return new[paths.index(("carry", "1"))]

    jacobian = jax.jacrev(second_layer)(terms)
    z = jnp.arctanh(second_layer(terms))
    close(jacobian[0], (1 - jnp.tanh(z) ** 2)[:, None] * model.params["v"].T, 1e-10)
    close(jacobian[1], jnp.eye(5), 1e-12)


def test_the_perturbed_step_must_have_been_asked_for(lstm):
    graph = compile_etrace_graph(lstm, X, include_hidden_perturb=False)
    assert graph.hidden_perturb is None
    with pytest.raises(ValueError, match="compiled without its perturbed step: pass `include_hidden_perturb=True`"):
        graph.call_hidden_perturb((X,), [])
