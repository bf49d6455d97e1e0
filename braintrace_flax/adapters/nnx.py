"""NNX modules: the carry protocol, or hidden state in :class:`Hidden` variables."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..checks import check_tree
from .step import Parts, Step, check_arguments

__all__ = ["Hidden", "adapt_nnx"]


class Hidden(nnx.Variable):
    """What an NNX module remembers from step to step: hidden state of a recurrent network.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> class Leaky(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.dense = nnx.Linear(3, 4, rngs=rngs)
    ...         self.h = Hidden(jnp.zeros(4))
    ...
    ...     def __call__(self, x):
    ...         self.h[...] = 0.9 * self.h[...] + self.dense(x)
    ...         return self.h[...]
    >>> _ = Leaky(nnx.Rngs(0))(jnp.ones(3))
    """


def adapt_nnx(module: nnx.Module, inputs: Any, params: Any, carry: Any) -> Step:
    """An NNX module as a step.

    With the carry protocol ``module(carry, *inputs) -> (carry, out)``, and ``initialize_carry`` or a given ``carry``;
    without it, hidden state is what the module keeps in :class:`Hidden` variables. Other variables (batch statistics,
    random number streams) are carried along.
    """
    graph, (own, memory, others) = _split(module)
    has_hidden = bool(jax.tree.leaves(memory))
    has_carry = carry is not None or (hasattr(module, "initialize_carry") and not has_hidden)
    check_arguments(module, inputs, has_carry)
    if params is not None:
        own = jax.tree.unflatten(jax.tree.structure(own), check_tree("params", params, own))
    names = [
        *(["carry"] if has_carry else []),
        *(["hidden"] if has_hidden else []),
        *(["state"] if jax.tree.leaves(others) else []),
    ]
    parts = Parts(names or ["hidden"])

    def first_carry() -> Any:
        if carry is not None:
            return jax.tree.map(jnp.array, carry)
        cell: Any = module
        return cell.initialize_carry(jax.tree.leaves(inputs)[0].shape, nnx.Rngs(0)) if has_carry else None

    def run(params: Any, carry: Any, *values: Any) -> tuple[Any, Any]:
        given = parts.split(carry)
        remembered, rest = given.get("hidden", memory), given.get("state", others)
        copy = nnx.merge(graph, params, remembered, rest, copy=True)
        out = copy(given["carry"], *values) if has_carry else copy(*values)
        first, out = out if has_carry else (None, out)
        _, (_, remembered, rest) = _split(copy)
        return parts.join({"carry": first, "hidden": remembered, "state": rest}), out

    def initial_carry(key: Any) -> Any:
        return parts.join({"carry": first_carry(), "hidden": _copy(memory), "state": _reseed(_copy(others), key)})

    shapes = jax.eval_shape(initial_carry, jax.eval_shape(lambda: jax.random.key(0)))
    hidden = {
        name: jax.tree.map(lambda leaf, name=name: name != "state" and _is_float(leaf), part)
        for name, part in parts.split(shapes).items()
    }
    return Step(
        run=run,
        init=lambda key: _copy(own),
        initial_carry=initial_carry,
        hidden=parts.join(hidden),
        random=bool(jax.tree.leaves(nnx.filter_state(others, nnx.RngState))) if "state" in names else False,
        names=f"NNX module {type(module).__name__}",
    )


def _split(module: nnx.Module) -> tuple[Any, Any]:
    """The module's structure, and its parameters, its hidden state and the rest."""
    graph, *states = nnx.split(module, nnx.Param, Hidden, ...)
    return graph, states


def _copy(state: Any) -> Any:
    return jax.tree.map(jnp.array, state)


def _reseed(state: Any, key: Any) -> Any:
    """Random streams drawn anew from ``key``, each by its place."""
    leaves, tree = jax.tree.flatten(state)
    fresh = [
        jax.random.fold_in(key, i) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, fresh)


def _is_float(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))
