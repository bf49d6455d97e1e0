"""Checks of what users pass: one error that names every leaf at fault, before anything runs."""

from __future__ import annotations

import re
from typing import Any

import jax

__all__ = ["check_tree", "leaf_paths"]


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
