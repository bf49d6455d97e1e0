"""What the tests of the compiler share: compiling models of the zoo and reading what came out."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from braintrace_core import ETraceGraph, compile_step_graph
from tests.core.compiler.zoo import ZOO, Model


@cache
def compiled(name: str) -> ETraceGraph:
    """The graph of a model of the zoo."""
    return compile_model(ZOO[name])


def compile_model(model: Model, function: Any = None, **options: Any) -> ETraceGraph:
    """The graph of a model, or of another function with its signature."""
    return compile_step_graph(function or model.function, model.params, model.carry, *model.inputs, **options)


def state_values(graph: ETraceGraph, params: Any, carry: Any) -> list[Any]:
    """The values of a step function's states in the order of its graph."""
    by_path = {}
    for root, tree in (("params", params), ("carry", carry)):
        for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
            by_path[root, *(jax.tree_util.keystr((key,), simple=True) for key in keys)] = leaf
    return [by_path[path] for path in graph.module_info.paths]


def parameters_behind(relation: Any) -> list[str]:
    """The names of the parameters behind a relation, operand by operand, in the order of the step's inputs."""
    paths = [path for chain in relation.trainable_processing_chains.values() for path in chain.paths]
    return [path[-1] for path in dict.fromkeys(paths)]


def relations_by_name(graph: ETraceGraph, operators: Mapping[str, str]) -> dict[str, int]:
    """The relation of each operator of a model; the graph must have these and no others."""
    found = defaultdict(list)
    for i, relation in enumerate(graph.hidden_param_op_relations):
        found[" ".join([relation.primitive.name, *parameters_behind(relation)])].append(i)
    expected = defaultdict(list)
    for name, text in operators.items():
        expected[text].append(name)
    assert {text: len(names) for text, names in expected.items()} == {text: len(rows) for text, rows in found.items()}
    return {name: i for text in expected for name, i in zip(expected[text], found[text], strict=True)}


def gradient_from_factors(
    graph: ETraceGraph, factors: Any, signals: Sequence[Any], values: Mapping[Any, Any]
) -> dict[tuple[tuple[str, ...], int], Any]:
    """What a single step contributes to each leaf of each parameter: ``sum_a dL/dh_a . dh_a/dtheta``.

    Args:
      graph, factors: a graph and the factors of one step.
      signals: ``dL/dh`` of each hidden state, in the order of ``hidden_perturb.perturb_hidden_paths``.
      values: the values of the step's variables, by variable.
    """
    signal_of = dict(zip(graph.hidden_perturb.perturb_hidden_paths, signals, strict=True))
    total: dict[tuple[tuple[str, ...], int], Any] = {}
    for r, relation in enumerate(graph.hidden_param_op_relations):
        y = relation.y_var.aval
        cotangent = jnp.zeros(y.shape, y.dtype)
        for group, entries in zip(relation.hidden_groups, factors.df[r], strict=True):
            unit = graph.factor_plan.groups[group.index].positions(r).unit
            states = [signal_of[p] for p in group.hidden_paths]
            for a, df in entries.items():
                signal = group.components.of_cotangents(states, a).ravel()[np.maximum(unit, 0)]
                cotangent += jnp.where(unit >= 0, signal, 0).astype(df.dtype) * df
        eqn = next(eqn for eqn in graph.module_info.jaxpr.eqns if relation.y_var in eqn.outvars)
        operands = [values[v] for v in eqn.invars]
        places = relation.primitive.trainable_operands(eqn.params)
        for key, chain in relation.trainable_processing_chains.items():

            def of_operand(operand, key=key, eqn=eqn, operands=operands, places=places):
                given = list(operands)
                given[places[key]] = operand
                return eqn.primitive.apply(*given, **eqn.params)

            _, pull_back = jax.vjp(of_operand, operands[places[key]])
            leaves = [values[v] for v in chain.variables]
            for path, leaf, part in zip(
                chain.paths, chain.leaf_indices, chain.pull_back(leaves, *pull_back(cotangent)), strict=True
            ):
                total[path, leaf] = total[path, leaf] + part if (path, leaf) in total else part
    return total


def all_values(graph: ETraceGraph, args: Sequence[Any], states: Sequence[Any]) -> dict[Any, Any]:
    """The value of every variable of the step."""
    minfo = graph.module_info
    variables = [v for eqn in minfo.jaxpr.eqns for v in eqn.outvars if str(v) != "_"]
    flat = minfo.flatten_inputs(args, {}, states)
    extra = minfo.add_jaxpr_outs(variables).jaxpr_call(*args, old_state_vals=states)[2]
    inputs = zip((*minfo.jaxpr.constvars, *minfo.jaxpr.invars), (*minfo.consts, *flat), strict=True)
    return dict(inputs) | dict(zip(variables, extra, strict=True))
