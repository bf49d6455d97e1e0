"""Trace: one step of a model becomes a flat jaxpr in which every trainable operation is an operator's equation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._compat import ClosedJaxpr, Var, eval_jaxpr, open_jaxpr
from .checks import check_call, check_hidden, check_result, check_states, tree_path
from .control_flow import ControlFlowPolicy
from .diagnostics import Path, Recorder
from .inline import inline_calls
from .lift import lift_operators
from .module_info import ModuleInfo, TracedStep, is_differentiable
from .repeats import merge_repeats

__all__ = ["extract_module_info", "extract_step_info"]


def extract_module_info(
    model: brainstate.nn.Module,
    *args: Any,
    control_flow: ControlFlowPolicy | None = None,
    lift: bool = True,
    recorder: Recorder | None = None,
    **kwargs: Any,
) -> ModuleInfo:
    """Trace one step of a brainstate module whose states have been initialised.

    Args:
      model: the module; ``model(*args, **kwargs)`` is one step.
      *args, **kwargs: example inputs of one step (arrays or ``jax.ShapeDtypeStruct``).
      control_flow: what to do with ``cond``, ``scan`` and ``while`` that hold trainable operations.
      lift: whether ordinary operations on parameters become operators; ``False`` keeps to those written by hand.
      recorder: where the passes leave their records.

    >>> import brainstate, jax.numpy as jnp
    >>> cell = brainstate.nn.GRUCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(cell)
    >>> sorted(extract_module_info(cell, jnp.zeros(3)).hidden_path_to_invar)
    [('h',)]
    """
    plain_call = type(model).__call__ is brainstate.nn.Module.__call__
    check_call(model.update if plain_call else model, args, kwargs)
    states = {tuple(map(str, path)): state for path, state in model.states().items()}
    return _trace(model, states, args, kwargs, control_flow, lift, recorder)


def extract_step_info(
    step: Callable[..., tuple[Any, Any]],
    params: Any,
    carry: Any,
    *args: Any,
    hidden: Any = None,
    control_flow: ControlFlowPolicy | None = None,
    lift: bool = True,
    recorder: Recorder | None = None,
    **kwargs: Any,
) -> ModuleInfo:
    """Trace a plain function ``step(params, carry, *args, **kwargs) -> (carry, out)``.

    Each leaf of ``params`` is a parameter and each floating or complex leaf of ``carry`` a hidden state, at the path
    ``("params", ...)`` or ``("carry", ...)``; other leaves of ``carry`` (counters, keys) are carried along, and so are
    those for which ``hidden``, of the carry's structure, says False. Only shapes and dtypes are read, so ``params`` and
    ``carry`` may be abstract.
    """
    check_call(step, (params, carry, *args), kwargs)
    chosen = [True] * len(jax.tree.leaves(carry)) if hidden is None else jax.tree.leaves(hidden)
    param_states = _leaf_states(params, "params", lambda leaf, _: brainstate.ParamState)
    carry_states = _leaf_states(
        carry,
        "carry",
        lambda leaf, i: brainstate.HiddenState if chosen[i] and is_differentiable(leaf) else brainstate.ShortTermState,
    )
    params_tree, carry_tree = jax.tree.structure(params), jax.tree.structure(carry)

    def stateful(*inputs: Any, **named: Any) -> Any:
        old = jax.tree.unflatten(carry_tree, [state.value for state in carry_states.values()])
        values = jax.tree.unflatten(params_tree, [state.value for state in param_states.values()])
        new, out = check_result(step(values, old, *inputs, **named), carry)
        for state, leaf in zip(carry_states.values(), jax.tree.leaves(new), strict=True):
            state.value = leaf
        return out

    return _trace(stateful, {**param_states, **carry_states}, args, kwargs, control_flow, lift, recorder)


def _trace(
    function: Any,
    states: dict[Path, brainstate.State],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    control_flow: ControlFlowPolicy | None,
    lift: bool,
    recorder: Recorder | None,
) -> ModuleInfo:
    recorder = recorder or Recorder()
    stateful = TracedStep(function, return_only_write=False)
    closed = stateful.trace(*args, **kwargs)
    compiled = stateful.get_states(*args, **kwargs)
    written = {id(state) for state in stateful.get_write_states(*args, **kwargs)}
    paths = _paths_of(compiled, states)
    check_states(compiled, paths, written)
    num_inputs = len(stateful.in_names)
    parameters = {
        num_inputs + i: paths[id(state)]
        for i, state in enumerate(_leaf_owners(compiled))
        if isinstance(state, brainstate.ParamState)
    }
    closed = merge_repeats(inline_calls(closed, parameters, control_flow or ControlFlowPolicy(), recorder))
    if lift:
        closed = lift_operators(closed, parameters, _hidden_outputs(closed, compiled), recorder)
    closed = _with_distinct_outputs(closed, _hidden_outputs(closed, compiled))
    return _describe(stateful, closed, states, compiled, paths)


def _describe(
    stateful: Any,
    closed: ClosedJaxpr,
    states: dict[Path, brainstate.State],
    compiled: tuple[brainstate.State, ...],
    paths: dict[int, Path],
) -> ModuleInfo:
    trees: list[Any] = [jax.tree.structure(state.value) for state in compiled]
    num_leaves = sum(tree.num_leaves for tree in trees)
    jaxpr = open_jaxpr(closed)[0]
    num_out = len(jaxpr.outvars) - num_leaves
    in_trees = _split_by_tree(jaxpr.invars[len(jaxpr.invars) - num_leaves :], trees)
    out_trees = _split_by_tree(jaxpr.outvars[num_out:], trees)
    hidden_in: dict[Path, Var] = {}
    hidden_out: dict[Path, Var] = {}
    weights: dict[Path, list[Var]] = {}
    for state, before, after in zip(compiled, in_trees, out_trees, strict=True):
        path = paths[id(state)]
        if isinstance(state, brainstate.HiddenState):
            (hidden_in[path],), (hidden_out[path],) = jax.tree.leaves(before), jax.tree.leaves(after)
        elif isinstance(state, brainstate.ParamState):
            weights[path] = jax.tree.leaves(before)
    check_hidden(hidden_in, hidden_out)
    return ModuleInfo(
        stateful_model=stateful,
        closed_jaxpr=closed,
        retrieved_model_states={**states, **{paths[id(state)]: state for state in compiled}},
        compiled_model_states=tuple(compiled),
        state_id_to_path=paths,
        state_tree_invars=in_trees,
        state_tree_outvars=out_trees,
        hidden_path_to_invar=hidden_in,
        hidden_path_to_outvar=hidden_out,
        invar_to_hidden_path={v: p for p, v in hidden_in.items()},
        outvar_to_hidden_path={v: p for p, v in hidden_out.items()},
        hidden_outvar_to_invar={hidden_out[p]: v for p, v in hidden_in.items()},
        weight_invars=[v for vs in weights.values() for v in vs],
        weight_path_to_invars=weights,
        invar_to_weight_path={v: p for p, vs in weights.items() for v in vs},
        num_var_out=num_out,
        num_var_state=num_leaves,
    )


def _leaf_owners(compiled: Sequence[brainstate.State]) -> list[brainstate.State]:
    """The state of each leaf, in the order of the jaxpr."""
    return [state for state in compiled for _ in jax.tree.leaves(state.value)]


def _hidden_outputs(closed: ClosedJaxpr, compiled: Sequence[brainstate.State]) -> list[int]:
    """Which outputs are hidden states."""
    owners = _leaf_owners(compiled)
    first = len(open_jaxpr(closed)[0].outvars) - len(owners)
    return [first + i for i, state in enumerate(owners) if isinstance(state, brainstate.HiddenState)]


def _with_distinct_outputs(closed: ClosedJaxpr, hidden_outputs: Sequence[int]) -> ClosedJaxpr:
    """The same jaxpr, each hidden state a variable of its own: not another's, nor an input or a literal."""
    jaxpr, consts = open_jaxpr(closed)
    free = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    needs_copy = set()
    for i in hidden_outputs:
        out = jaxpr.outvars[i]
        if isinstance(out, Var) and out in free:
            free.remove(out)
        else:
            needs_copy.add(i)
    if not needs_copy:
        return closed

    def run(*args: Any) -> list[Any]:
        values = eval_jaxpr(jaxpr, consts, *args)
        return [jnp.copy(value) if i in needs_copy else value for i, value in enumerate(values)]

    return jax.make_jaxpr(run)(*(v.aval for v in jaxpr.invars))


def _split_by_tree(variables: Sequence[Any], trees: Sequence[Any]) -> list[Any]:
    result, start = [], 0
    for tree in trees:
        result.append(jax.tree.unflatten(tree, variables[start : start + tree.num_leaves]))
        start += tree.num_leaves
    return result


def _paths_of(compiled: Sequence[brainstate.State], states: dict[Path, brainstate.State]) -> dict[int, Path]:
    known = {id(state): path for path, state in states.items()}
    outside = [state for state in compiled if id(state) not in known]
    return {
        **{id(state): known[id(state)] for state in compiled if id(state) in known},
        **{id(state): ("outside", str(i)) for i, state in enumerate(outside)},
    }


def _leaf_states(
    tree: Any, root: str, kind: Callable[[Any, int], type[brainstate.State]]
) -> dict[Path, brainstate.State]:
    states: dict[Path, brainstate.State] = {}
    for i, (keys, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        states[tree_path(root, keys)] = kind(leaf, i)(_stand_in(leaf))
    return states


def _stand_in(leaf: Any) -> Any:
    """A value of the leaf's shape and dtype that takes no memory; keys and the like stay as they are."""
    if isinstance(leaf.dtype, np.dtype):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return leaf
