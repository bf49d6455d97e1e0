"""The traced step: a jaxpr whose variables are known by the paths of the states that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp

from .._compat import ClosedJaxpr, Jaxpr, Var, close_jaxpr, eval_jaxpr, new_jaxpr, open_jaxpr
from .checks import check_leaf, check_names, leaf_names
from .diagnostics import Path, spell

__all__ = ["ModuleInfo", "TracedStep", "is_differentiable"]


class TracedStep(brainstate.transform.StatefulFunction):
    """A stateful function that was traced once and remembers what it was given and what it returned.

    Attributes:
      in_names: a name for each input array.
      out_tree: the structure of outputs and states.
    """

    in_names: list[str]
    out_tree: Any

    def trace(self, *args: Any, **kwargs: Any) -> ClosedJaxpr:
        """Trace for these arguments: the jaxpr, returning outputs and all touched states."""
        self.make_jaxpr(*args, **kwargs)
        self.in_names = _input_names(args, kwargs)
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
        check_names("input", self.stateful_model.in_names, _input_names(args, kwargs))
        leaves = jax.tree.leaves((tuple(args), kwargs))
        for name, leaf, var in zip(self.stateful_model.in_names, leaves, self.input_invars, strict=True):
            check_leaf(name, leaf, var.aval)
        if len(state_vals) != len(self.state_tree_invars):
            raise ValueError(
                f"The step has {len(self.state_tree_invars)} state(s) ({', '.join(map(spell, self.paths))}) "
                f"and was given values for {len(state_vals)}."
            )
        for path, value, tree in zip(self.paths, state_vals, self.state_tree_invars, strict=True):
            names = leaf_names(f"state '{spell(path)}'", tree)
            check_names(f"leaf of state '{spell(path)}'", names, leaf_names(f"state '{spell(path)}'", value))
            for name, leaf, var in zip(names, jax.tree.leaves(value), jax.tree.leaves(tree), strict=True):
                check_leaf(name, leaf, var.aval)
            leaves.extend(jax.tree.leaves(value))
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


def is_differentiable(leaf: Any) -> bool:
    """Whether an array (or its shape and dtype) has a derivative: floating or complex."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _input_names(args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """``input 0``, ``input 1['key']``, ``input name``, ...: one for each array."""
    positional = [name for i, arg in enumerate(args) for name in leaf_names(f"input {i}", arg)]
    return positional + [name for key in sorted(kwargs) for name in leaf_names(f"input {key}", kwargs[key])]
