"""Trace: one step of a model becomes a jaxpr whose variables are known by the paths of the states they stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._compat import ClosedJaxpr, Jaxpr, Var, close_jaxpr, eval_jaxpr, new_jaxpr, open_jaxpr
from ..errors import CompilationError
from .control_flow import ControlFlowPolicy
from .diagnostics import Path, Recorder, spell
from .inline import inline_calls
from .lift import lift_operators

__all__ = ["ModuleInfo", "extract_module_info", "extract_step_info", "is_differentiable"]


class TracedStep(brainstate.transform.StatefulFunction):
    """A stateful function that was traced once and remembers the structure of what it returned."""

    out_tree: Any

    def trace(self, *args: Any, **kwargs: Any) -> ClosedJaxpr:
        """Trace for these arguments: the jaxpr, returning outputs and all touched states."""
        self.make_jaxpr(*args, **kwargs)
        self.out_tree = self.get_out_treedef(*args, **kwargs)
        return self.get_jaxpr(*args, **kwargs)


class ModuleInfo(NamedTuple):
    """One step of a model as a jaxpr, with the meaning of its variables.

    The jaxpr's inputs are the step's arguments, then the leaves of every state; its outputs are the step's results,
    then the new leaves of every state. Calls are inlined and ordinary operators lifted, so every trainable operation
    is an equation of this one jaxpr.

    Attributes:
      stateful_model: the brainstate function that was traced.
      closed_jaxpr: its jaxpr after inlining and lifting.
      retrieved_model_states: path -> state, of all states of the model.
      compiled_model_states: the states that the step touches, in the order of the jaxpr.
      state_id_to_path: ``id(state)`` -> path, of the touched states.
      state_tree_invars, state_tree_outvars: for each touched state, its value with variables for leaves.
      hidden_path_to_invar, hidden_path_to_outvar, invar_to_hidden_path, outvar_to_hidden_path,
      hidden_outvar_to_invar: the hidden states' variables before and after the step.
      weight_invars, weight_path_to_invars, invar_to_weight_path: the parameters' variables.
      num_var_out, num_var_state: number of outputs that are results, and that are states.
    """

    stateful_model: TracedStep
    closed_jaxpr: ClosedJaxpr
    retrieved_model_states: dict[Path, brainstate.State]
    compiled_model_states: tuple[brainstate.State, ...]
    state_id_to_path: dict[int, Path]
    state_tree_invars: list[Any]
    state_tree_outvars: list[Any]
    hidden_path_to_invar: dict[Path, Var]
    hidden_path_to_outvar: dict[Path, Var]
    invar_to_hidden_path: dict[Var, Path]
    outvar_to_hidden_path: dict[Var, Path]
    hidden_outvar_to_invar: dict[Var, Var]
    weight_invars: list[Var]
    weight_path_to_invars: dict[Path, list[Var]]
    invar_to_weight_path: dict[Var, Path]
    num_var_out: int
    num_var_state: int

    @property
    def jaxpr(self) -> Jaxpr:
        """The jaxpr without its constants."""
        return open_jaxpr(self.closed_jaxpr)[0]

    @property
    def consts(self) -> list[Any]:
        """The values of the jaxpr's constants."""
        return open_jaxpr(self.closed_jaxpr)[1]

    @property
    def paths(self) -> list[Path]:
        """The paths of the touched states, in the order of the jaxpr."""
        return [self.state_id_to_path[id(state)] for state in self.compiled_model_states]

    @property
    def input_invars(self) -> list[Var]:
        """The variables of the step's arguments."""
        state_leaves = sum(len(jax.tree.leaves(tree)) for tree in self.state_tree_invars)
        return list(self.jaxpr.invars[: len(self.jaxpr.invars) - state_leaves])

    def jaxpr_call(self, *args: Any, old_state_vals: Sequence[Any] | None = None, **kwargs: Any) -> Any:
        """Run the step: ``(outputs, new state values)``, or ``(outputs, states, extra)`` after ``add_jaxpr_outs``.

        Args:
          *args: the step's arguments, as when it was compiled.
          old_state_vals: a value for each of ``compiled_model_states``; the states' own values if not given.
          **kwargs: the step's keyword arguments, as when it was compiled.
        """
        if old_state_vals is None:
            old_state_vals = [state.value for state in self.compiled_model_states]
        return self.unflatten_outputs(
            eval_jaxpr(self.jaxpr, self.consts, *self.flatten_inputs(args, kwargs, old_state_vals))
        )

    def flatten_inputs(self, args: Sequence[Any], kwargs: dict[str, Any], state_vals: Sequence[Any]) -> list[Any]:
        """The jaxpr's inputs from the step's arguments and its states' values; an error names the leaf that differs."""
        leaves = jax.tree.leaves((tuple(args), kwargs))
        expected = self.input_invars
        if len(leaves) != len(expected):
            raise ValueError(
                f"The step was compiled for {len(expected)} input array(s) and was called with {len(leaves)}. "
                "Pass the same inputs, in the same structure, as at compile time."
            )
        for i, (leaf, var) in enumerate(zip(leaves, expected, strict=True)):
            _check_leaf(f"input {i}", leaf, var)
        if len(state_vals) != len(self.state_tree_invars):
            raise ValueError(
                f"The step has {len(self.state_tree_invars)} state(s) ({', '.join(map(spell, self.paths))}) "
                f"and was given values for {len(state_vals)}."
            )
        for path, value, tree in zip(self.paths, state_vals, self.state_tree_invars, strict=True):
            state_leaves, variables = jax.tree.leaves(value), jax.tree.leaves(tree)
            if len(state_leaves) != len(variables):
                raise ValueError(
                    f"State '{spell(path)}' was compiled with {len(variables)} leaves and was given {len(state_leaves)}."
                )
            for leaf, var in zip(state_leaves, variables, strict=True):
                _check_leaf(f"state '{spell(path)}'", leaf, var)
            leaves.extend(state_leaves)
        return leaves

    def unflatten_outputs(self, flat: Sequence[Any]) -> Any:
        """Outputs and states (and extra outputs, if any were added) in their own structures."""
        flat = list(flat)
        body = self.num_var_out + self.num_var_state
        outputs, states = jax.tree.unflatten(self.stateful_model.out_tree, flat[:body])
        return (outputs, list(states)) if len(flat) == body else (outputs, list(states), flat[body:])

    def add_jaxpr_outs(self, variables: Sequence[Var]) -> ModuleInfo:
        """The same step, returning the values of ``variables`` too."""
        jaxpr = self.jaxpr
        wider = new_jaxpr(jaxpr.constvars, jaxpr.invars, [*jaxpr.outvars, *variables], jaxpr.eqns)
        return self._replace(closed_jaxpr=close_jaxpr(wider, self.consts))

    def split_state_outvars(self) -> tuple[dict[Path, Any], dict[Path, Any], dict[Path, Any]]:
        """The states' output variables by path: ``(weights, hidden, others)``."""
        weights: dict[Path, Any] = {}
        hidden: dict[Path, Any] = {}
        others: dict[Path, Any] = {}
        for path, tree in zip(self.paths, self.state_tree_outvars, strict=True):
            home = (
                weights
                if path in self.weight_path_to_invars
                else hidden
                if path in self.hidden_path_to_outvar
                else others
            )
            home[path] = tree
        return weights, hidden, others

    def num_states_of(self, path: Path) -> int:
        """How many states are stacked on the last axis of the hidden state at ``path``."""
        return getattr(self.retrieved_model_states[path], "num_state", 1)

    def is_group_state(self, path: Path) -> bool:
        """Whether the hidden state at ``path`` stacks several states on its last axis."""
        return isinstance(self.retrieved_model_states[path], (brainstate.HiddenGroupState, brainstate.HiddenTreeState))

    def dict(self) -> dict[str, Any]:
        """All fields by name."""
        return self._asdict()

    def __repr__(self) -> str:
        lines = [f"ModuleInfo({len(self.jaxpr.eqns)} equations"]
        lines += [f"  input   {v.aval.str_short()}" for v in self.input_invars]
        lines += [f"  hidden  {spell(p)}: {v.aval.str_short()}" for p, v in self.hidden_path_to_invar.items()]
        lines += [
            f"  weight  {spell(p)}: {', '.join(v.aval.str_short() for v in vs)}"
            for p, vs in self.weight_path_to_invars.items()
        ]
        return "\n".join(lines) + ")"


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
    states = {path: state for path, state in model.states().items()}
    return _trace(model, states, args, kwargs, control_flow, lift, recorder)


def extract_step_info(
    step: Callable[..., tuple[Any, Any]],
    params: Any,
    carry: Any,
    *args: Any,
    control_flow: ControlFlowPolicy | None = None,
    lift: bool = True,
    recorder: Recorder | None = None,
    **kwargs: Any,
) -> ModuleInfo:
    """Trace a plain function ``step(params, carry, *args, **kwargs) -> (carry, out)``.

    Each leaf of ``params`` is a parameter and each floating or complex leaf of ``carry`` a hidden state, at the path
    ``("params", ...)`` or ``("carry", ...)``; other leaves of ``carry`` (counters, keys) are carried along. Only shapes
    and dtypes are read, so ``params`` and ``carry`` may be abstract.
    """
    param_states = _leaf_states(params, "params", lambda _: brainstate.ParamState)
    carry_states = _leaf_states(
        carry, "carry", lambda leaf: brainstate.HiddenState if is_differentiable(leaf) else brainstate.ShortTermState
    )
    params_tree, carry_tree = jax.tree.structure(params), jax.tree.structure(carry)

    def stateful(*inputs: Any, **named: Any) -> Any:
        old = jax.tree.unflatten(carry_tree, [state.value for state in carry_states.values()])
        values = jax.tree.unflatten(params_tree, [state.value for state in param_states.values()])
        new, out = step(values, old, *inputs, **named)
        _check_carry(carry, new)
        for state, leaf in zip(carry_states.values(), jax.tree.leaves(new), strict=True):
            state.value = leaf
        return out

    return _trace(stateful, {**param_states, **carry_states}, args, kwargs, control_flow, lift, recorder)


def is_differentiable(leaf: Any) -> bool:
    """Whether an array (or its shape and dtype) has a derivative: floating or complex."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


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
    try:
        closed = stateful.trace(*args, **kwargs)
    except TypeError as error:
        if "argument" in str(error) and "positional" in str(error):
            raise CompilationError(
                f"The model's step does not take the {len(args)} input(s) that it was compiled with: {error}. "
                "Give one example of each input that the step takes, in order."
            ) from error
        raise
    compiled = stateful.get_states(*args, **kwargs)
    written = {id(state) for state in stateful.get_write_states(*args, **kwargs)}
    paths = _paths_of(compiled, states)
    _check_states(compiled, paths, written)
    is_param = [
        isinstance(state, brainstate.ParamState) for state in compiled for _ in jax.tree.leaves(state.value)
    ]
    num_inputs = len(jax.tree.leaves((tuple(args), kwargs)))
    weight_paths = [paths[id(state)] for state in compiled for _ in jax.tree.leaves(state.value)]
    parameters = {num_inputs + i: path for i, (path, yes) in enumerate(zip(weight_paths, is_param, strict=True)) if yes}
    closed = inline_calls(closed, parameters, control_flow or ControlFlowPolicy(), recorder)
    if lift:
        closed = lift_operators(closed, parameters, recorder)
    return _describe(stateful, closed, states, compiled, paths, num_inputs)


def _describe(
    stateful: Any,
    closed: ClosedJaxpr,
    states: dict[Path, brainstate.State],
    compiled: tuple[brainstate.State, ...],
    paths: dict[int, Path],
    num_inputs: int,
) -> ModuleInfo:
    trees = [jax.tree.structure(state.value) for state in compiled]
    num_leaves = sum(tree.num_leaves for tree in trees)
    closed = _with_distinct_outputs(closed, num_leaves)
    jaxpr = open_jaxpr(closed)[0]
    num_out = len(jaxpr.outvars) - num_leaves
    in_trees = _split_by_tree(jaxpr.invars[num_inputs:], trees)
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
    _check_hidden(hidden_in, hidden_out)
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


def _with_distinct_outputs(closed: ClosedJaxpr, num_state_leaves: int) -> ClosedJaxpr:
    """The same jaxpr in which no two state outputs share a variable and none is an input or a literal."""
    jaxpr, consts = open_jaxpr(closed)
    first = len(jaxpr.outvars) - num_state_leaves
    made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    taken: set[Any] = set()
    needs_copy = []
    for i, v in enumerate(jaxpr.outvars):
        copy = i >= first and (not isinstance(v, Var) or v not in made or v in taken)
        needs_copy.append(copy)
        if i >= first and isinstance(v, Var):
            taken.add(v)
    if not any(needs_copy):
        return closed

    def run(*args: Any) -> list[Any]:
        values = eval_jaxpr(jaxpr, consts, *args)
        return [jnp.copy(value) if copy else value for value, copy in zip(values, needs_copy, strict=True)]

    return jax.make_jaxpr(run)(*(v.aval for v in jaxpr.invars))


def _split_by_tree(variables: Sequence[Any], trees: Sequence[Any]) -> list[Any]:
    result, start = [], 0
    for tree in trees:
        result.append(jax.tree.unflatten(tree, variables[start : start + tree.num_leaves]))
        start += tree.num_leaves
    return result


def _paths_of(compiled: Sequence[brainstate.State], states: dict[Path, brainstate.State]) -> dict[int, Path]:
    known = {id(state): tuple(str(key) for key in path) for path, state in states.items()}
    outside = [state for state in compiled if id(state) not in known]
    return {
        **{id(state): known[id(state)] for state in compiled if id(state) in known},
        **{id(state): ("outside", str(i)) for i, state in enumerate(outside)},
    }


def _leaf_states(tree: Any, root: str, kind: Callable[[Any], type[brainstate.State]]) -> dict[Path, brainstate.State]:
    states: dict[Path, brainstate.State] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        path = (root, *(jax.tree_util.keystr((key,), simple=True) for key in keys))
        states[path] = kind(leaf)(_stand_in(leaf))
    return states


def _stand_in(leaf: Any) -> Any:
    """A value of the leaf's shape and dtype that takes no memory; keys and the like stay as they are."""
    if isinstance(leaf.dtype, np.dtype):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return leaf


def _check_leaf(what: str, leaf: Any, var: Var) -> None:
    aval = jax.typeof(leaf) if not hasattr(leaf, "aval") or not hasattr(leaf, "shape") else leaf
    if tuple(aval.shape) != tuple(var.aval.shape) or aval.dtype != var.aval.dtype:
        raise ValueError(
            f"The {what} has shape {tuple(aval.shape)} and dtype {aval.dtype}; the step was compiled for "
            f"{tuple(var.aval.shape)} and {var.aval.dtype}. Compile again for the new shape, or pass the old one."
        )


def _check_carry(old: Any, new: Any) -> None:
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise CompilationError(
            f"The step returned a carry of another structure than it was given: {jax.tree.structure(new)} instead of "
            f"{jax.tree.structure(old)}. Return `(carry, out)` with the carry's structure unchanged."
        )
    for (keys, a), b in zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True):
        a = a if hasattr(a, "dtype") else np.asarray(a)
        name = spell(("carry", *(jax.tree_util.keystr((key,), simple=True) for key in keys)))
        _check_same_kind(name, (tuple(a.shape), a.dtype), (tuple(jnp.shape(b)), jnp.result_type(b)))


def _check_same_kind(name: str, before: tuple[Any, Any], after: tuple[Any, Any]) -> None:
    if before != after:
        raise CompilationError(
            f"Hidden state '{name}' changes between steps: it enters with shape {before[0]} and dtype {before[1]} and "
            f"leaves with shape {after[0]} and dtype {after[1]}. A recurrent state must keep its shape and dtype: cast "
            "or reshape the new value, or start from an initial value of the new kind."
        )


def _check_hidden(before: dict[Path, Var], after: dict[Path, Var]) -> None:
    for path, var in before.items():
        out = after[path]
        _check_same_kind(
            spell(path), (tuple(var.aval.shape), var.aval.dtype), (tuple(out.aval.shape), out.aval.dtype)
        )


def _check_states(compiled: Sequence[brainstate.State], paths: dict[int, Path], written: set[int]) -> None:
    if not any(isinstance(state, brainstate.HiddenState) for state in compiled):
        raise CompilationError(
            "The step reads or writes no hidden state, so there is nothing to carry credit through time. Keep what "
            "the network remembers in a `brainstate.HiddenState` (in the carry, for a plain step function), and "
            "initialise the states before compiling."
        )
    if not any(isinstance(state, brainstate.ParamState) for state in compiled):
        raise CompilationError(
            "The step reads no parameter, so there is nothing to train. Hold trainable values in a "
            "`brainstate.ParamState` (in `params`, for a plain step function)."
        )
    for state in compiled:
        if isinstance(state, brainstate.ParamState) and id(state) in written:
            raise CompilationError(
                f"Parameter '{spell(paths[id(state)])}' is written inside the step. Parameters change through the "
                "optimizer only: keep a value that the step itself updates in a `brainstate.ShortTermState`."
            )
