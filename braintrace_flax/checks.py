"""Checks of what users pass: one error that names every leaf at fault, before anything runs."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp

from braintrace_core.rules import DNI, TBPTT, Rule

__all__ = [
    "check_compiled",
    "check_credit",
    "check_mask",
    "check_modulator",
    "check_reset",
    "check_state",
    "check_targets",
    "check_time",
    "check_tree",
    "leaf_paths",
    "split_inputs",
]


def leaf_paths(tree: Any) -> list[str]:
    """A path for each leaf, ``cell/kernel``, spelt the same for every kind of tree."""
    return [_spell(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _spell(keys: Any) -> str:
    parts = [jax.tree_util.keystr((key,), simple=True) for key in keys]
    # NNX spells the same parameter with and without its wrapper.
    return "/".join(re.sub(r"^\.|\.value$", "", part) for part in parts if part not in (".value", "value")) or "."


def check_tree(what: str, tree: Any, expected: Any) -> list[Any]:
    """The leaves of ``tree``; an error names all that are missing, unknown or of another kind."""
    found = dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))
    wanted = dict(zip(leaf_paths(expected), jax.tree.leaves(expected), strict=True))
    if list(found) != list(wanted) and len(found) == len(wanted) and _same_kinds(found, wanted):
        return list(found.values())  # other containers, the same arrays in the same order
    problems = [f"`{name}` is missing" for name in wanted if name not in found]
    problems += [f"`{name}` is unknown" for name in found if name not in wanted]
    for name in wanted:
        if name in found and (problem := _difference(found[name], wanted[name])):
            problems.append(f"`{name}` {problem}")
    if problems:
        shown = "; ".join(problems[:8]) + ("; ..." if len(problems) > 8 else "")
        raise ValueError(
            f"`{what}` is not that of the compiled model: {shown}. Pass the {what} of this model "
            f"({'`model.init(key)`' if what == 'params' else '`model.initial_carry()`' if what == 'carry' else what}), "
            "or compile again for the new one."
        )
    return [found[name] for name in wanted]


def _same_kinds(found: Any, wanted: Any) -> bool:
    return all(_difference(a, b) is None for a, b in zip(found.values(), wanted.values(), strict=True))


def _difference(leaf: Any, shape: Any) -> str | None:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return f"is a {type(leaf).__name__}, not an array"
    if tuple(leaf.shape) != tuple(shape.shape) or leaf.dtype != shape.dtype:
        return f"has shape {tuple(leaf.shape)} and dtype {leaf.dtype}, expected {tuple(shape.shape)} and {shape.dtype}"
    return None


def split_inputs(model: Any, inputs: Any) -> tuple[Any, ...]:
    """The inputs as a tuple, one for each input of the step."""
    return (inputs,) if len(model.inputs_shape) == 1 else tuple(inputs)


def check_time(model: Any, inputs: Any) -> int:
    """The number of time steps of ``inputs``; an error names what is wrong with them."""
    expected = model.inputs_shape
    if len(expected) > 1 and (not isinstance(inputs, (tuple, list)) or len(inputs) != len(expected)):
        raise ValueError(
            f"The step takes {len(expected)} inputs: pass `inputs` as a tuple of {len(expected)}, each with time first."
        )
    given = split_inputs(model, inputs)
    found, wanted = jax.tree.leaves(given), jax.tree.leaves(expected)
    tree: Any = jax.tree.structure(given)
    wanted_tree: Any = jax.tree.structure(expected)
    if tree != wanted_tree:
        raise ValueError(
            f"`inputs` has the structure {tree}; the model was compiled for {wanted_tree}, each leaf with time as its "
            "first axis."
        )
    for name, leaf, shape in zip(leaf_paths(given), found, wanted, strict=True):
        where = "`inputs`" if len(wanted) == 1 else f"`inputs` at {name}"
        like = ", ".join(["time", *map(str, shape.shape)])
        if not hasattr(leaf, "shape"):
            raise ValueError(f"{where} is a {type(leaf).__name__}, expected an array ({like}).")
        if tuple(leaf.shape) == tuple(shape.shape):
            raise ValueError(
                f"{where} has shape {tuple(leaf.shape)}: the time axis is missing. Expected ({like}); for one step "
                "write `inputs[None]`."
            )
        if tuple(leaf.shape[1:]) != tuple(shape.shape):
            hint = ""
            swapped = (*leaf.shape[1:2], *leaf.shape[:1], *leaf.shape[2:])
            if model.batch_size is not None and swapped[1:] == tuple(shape.shape):
                hint = " If the batch comes first, write `jnp.swapaxes(inputs, 0, 1)`."
            elif leaf.ndim == len(shape.shape) + 1 and model.batch_size not in (None, leaf.shape[1]):
                hint = (
                    f" The batch has {leaf.shape[1]} examples, the model was compiled for {model.batch_size}: compile "
                    "for the new size, or pad the batch and mask what is not there."
                )
            raise ValueError(f"{where} has shape {tuple(leaf.shape)}, expected ({like}).{hint}")
        if leaf.dtype != shape.dtype:
            raise ValueError(
                f"{where} has dtype {leaf.dtype}; the model was compiled for {shape.dtype}. Cast it, or compile again."
            )
    lengths = {leaf.shape[0] for leaf in found}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"`inputs` has {sorted(lengths)} time steps; all must have the same number, at least one.")
    return lengths.pop()


def check_targets(targets: Any, steps: int) -> None:
    """Raise unless each target has as many time steps as the inputs."""
    for name, leaf in zip(leaf_paths(targets), jax.tree.leaves(targets), strict=True):
        if not hasattr(leaf, "shape") or leaf.shape[:1] != (steps,):
            where = "`targets`" if name == "." else f"`targets` at {name}"
            raise ValueError(
                f"{where} has shape {getattr(leaf, 'shape', type(leaf).__name__)}; its first axis must be time, "
                f"{steps} steps as in `inputs`. A target of the whole sequence: repeat it over time, and mask the "
                "steps before the last."
            )


def check_reset(model: Any, reset: Any, steps: int) -> None:
    """Raise unless ``reset`` is a bool for each step and example."""
    if reset is None:
        return
    expected = (steps,) if model.batch_size is None else (steps, model.batch_size)
    if tuple(getattr(reset, "shape", ())) != expected or reset.dtype != jnp.bool_:
        raise ValueError(
            f"`reset` has shape {getattr(reset, 'shape', None)} and dtype {getattr(reset, 'dtype', None)}; expected "
            f"bools of shape {expected}: one for each step{'' if model.batch_size is None else ' and example'}."
        )
    if model.is_batched:
        raise ValueError(
            "The examples of this model are coupled (batch statistics, or a step that is written for the whole batch), "
            "so single rows cannot be reset. Start a new sequence for the whole batch with `reset_traces` and "
            "`model.initial_carry()`."
        )


def check_mask(model: Any, mask: Any, steps: int) -> None:
    """Raise unless ``mask`` has an entry for each step, or for each step and example."""
    if mask is None:
        return
    shapes = [(steps,)] if model.batch_size is None else [(steps,), (steps, model.batch_size)]
    if tuple(getattr(mask, "shape", ())) not in shapes:
        raise ValueError(
            f"`mask` has shape {getattr(mask, 'shape', None)}; expected {' or '.join(map(str, shapes))}: one entry "
            "for each step, or for each step and example."
        )


def check_modulator(model: Any, modulator: Any, steps: int, credit: str) -> None:
    """Raise unless ``modulator`` has an entry for each step and example, and step credit to act on."""
    if modulator is None:
        return
    if credit != "step":
        raise ValueError('A `modulator` acts on each step: use `credit="step"`, here and in `online_grad`.')
    expected = (steps,) if model.batch_size is None else (steps, model.batch_size)
    if tuple(getattr(modulator, "shape", ())) != expected:
        raise ValueError(
            f"`modulator` has shape {getattr(modulator, 'shape', None)}; expected {expected}: one number for each "
            f"step{'' if model.batch_size is None else ' and example'}."
        )


def check_state(opt_state: Any, expected: Any) -> None:
    """Raise unless ``opt_state`` is such as the optimizer makes; ``expected`` are shapes."""
    structure: Any = jax.tree.structure(opt_state)
    other = structure != jax.tree.structure(expected)
    leaves = zip(leaf_paths(expected), jax.tree.leaves(opt_state), jax.tree.leaves(expected), strict=not other)
    problems = [f"`{name}` {problem}" for name, a, b in leaves if not other and (problem := _difference(a, b))]
    if other or problems:
        raise ValueError(
            f"`state.opt_state` is of another optimizer or another model{': ' + problems[0] if problems else ''}. "
            "Start from this step's own, `state = step.init(key)`; with `step.init(key, params=state.params)` the "
            "parameters are kept."
        )


def check_compiled(model: Any, where: str) -> None:
    """Raise unless ``model`` is compiled."""
    if not hasattr(model, "inputs_shape"):
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        raise TypeError(
            f"`{where}` got a {name} that is not compiled: write `model = braintrace.compile({name}(...), "
            "example_input)` first, and pass that `model` everywhere."
        )


def check_credit(credit: Any, rule: Rule | None = None) -> None:
    """Raise unless ``credit`` is one of the two, and one that the rule can do with."""
    if credit not in ("window", "step"):
        raise ValueError(f'`credit` is "window" or "step", got {credit!r}.')
    if isinstance(rule, TBPTT) and credit == "step":
        raise ValueError(f'{rule} keeps no traces for each step\'s signal to act on: use `credit="window"`.')
    if isinstance(rule, DNI) and credit == "step":
        raise ValueError(
            f"{rule} estimates what will be said of a window's end, where step credit does not look: use "
            '`credit="window"`.'
        )
    if rule is not None and rule.feedback_seed is not None and credit == "window":
        raise ValueError('Random feedback changes each step\'s own signal: use `credit="step"`.')
