"""Checks: what a step, its states and its inputs must be like; every error names the leaf at fault."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._compat import Var
from ..errors import CompilationError
from .diagnostics import Path, spell

__all__ = [
    "check_call",
    "check_hidden",
    "check_leaf",
    "check_names",
    "check_result",
    "check_states",
    "leaf_names",
    "tree_path",
]


def tree_path(root: str, keys: Any) -> Path:
    """The path of a leaf below ``root``, from JAX's keys."""
    if keys and keys[-1] == jax.tree_util.GetAttrKey("value"):
        keys = keys[:-1]  # a wrapper, such as an NNX variable, has no part in the name
    return (root, *(jax.tree_util.keystr((key,), simple=True) for key in keys))


def leaf_names(root: str, tree: Any) -> list[str]:
    """A name for each leaf: ``root`` and how to get there, as in ``root['key'][0]``."""
    return [root + jax.tree_util.keystr(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(tree)]


def check_names(what: str, expected: Sequence[str], found: Sequence[str]) -> None:
    """Raise unless a call gives the leaves that the step was compiled for."""
    if list(expected) != list(found):
        raise ValueError(
            f"The step was compiled for {len(expected)} {what} array(s) ({', '.join(expected)}) and was called with "
            f"{len(found)} ({', '.join(found)}). Pass the same ones, in the same structure, as at compile time."
        )


def check_leaf(name: str, leaf: Any, aval: Any) -> None:
    """Raise unless ``leaf`` has the shape and dtype that the step was compiled for."""
    found = leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else jax.typeof(leaf)
    if tuple(found.shape) != tuple(aval.shape) or found.dtype != aval.dtype:
        raise ValueError(
            f"The {name} has shape {tuple(found.shape)} and dtype {found.dtype}; the step was compiled for "
            f"{tuple(aval.shape)} and {aval.dtype}. Compile again for the new kind, or pass the old one."
        )


def check_call(step: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise if ``step`` does not take these arguments."""
    try:
        inspect.signature(step).bind(*args, **kwargs)
    except ValueError:
        return  # no signature to go by
    except TypeError as error:
        raise CompilationError(
            f"The step does not take the example inputs that it is compiled with: {error}. Its signature is "
            f"{inspect.signature(step)}. Give one example of each input that it takes, in order."
        ) from error


def check_result(result: Any, carry: Any) -> tuple[Any, Any]:
    """What a plain step function returned, as ``(carry, out)``; raise if the carry is not of the kind it was."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise CompilationError(f"A step function returns `(carry, out)`, this one returned a {type(result).__name__}.")
    new = result[0]
    before: Any = jax.tree.structure(carry)
    after: Any = jax.tree.structure(new)
    if before != after:
        raise CompilationError(
            f"The step returned a carry of another structure than it was given: {after} instead of {before}. Return "
            "`(carry, out)` with the carry's structure unchanged."
        )
    for (keys, a), b in zip(jax.tree_util.tree_leaves_with_path(carry), jax.tree.leaves(new), strict=True):
        a = a if hasattr(a, "dtype") else np.asarray(a)
        name = spell(tree_path("carry", keys))
        _check_same_kind(name, (tuple(a.shape), a.dtype), (tuple(jnp.shape(b)), jnp.result_type(b)))
    return result


def _check_same_kind(name: str, before: tuple[Any, Any], after: tuple[Any, Any]) -> None:
    if before != after:
        raise CompilationError(
            f"Hidden state '{name}' changes between steps: it enters with shape {before[0]} and dtype {before[1]} and "
            f"leaves with shape {after[0]} and dtype {after[1]}. A recurrent state must keep its shape and dtype: cast "
            "or reshape the new value, or start from an initial value of the new kind."
        )


def check_hidden(before: dict[Path, Var], after: dict[Path, Var]) -> None:
    """Raise if a hidden state leaves the step with another shape or dtype than it had before."""
    for path, var in before.items():
        out = after[path]
        _check_same_kind(spell(path), (tuple(var.aval.shape), var.aval.dtype), (tuple(out.aval.shape), out.aval.dtype))


def check_states(compiled: Sequence[brainstate.State], paths: dict[int, Path], written: set[int]) -> None:
    """Raise unless the step has hidden states and parameters, and leaves the parameters alone."""
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
