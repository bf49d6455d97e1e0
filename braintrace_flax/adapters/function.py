"""Plain functions ``step(params, carry, *inputs) -> (carry, out)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from braintrace_core._compat import is_traced

from .step import Step, shape_of

__all__ = ["adapt_function"]


def adapt_function(step: Callable[..., Any], inputs: Any, params: Any, carry: Any) -> Step:
    """A plain function as a step; ``params`` are given, or a function ``init(key) -> params``."""
    del inputs
    name = getattr(step, "__name__", type(step).__name__)
    if params is None or carry is None:
        missing = "params" if params is None else "carry"
        raise ValueError(
            f"A plain step function needs `{missing}=`: `compile({name}, example_input, params=params, carry=carry)`, "
            f"where `{name}(params, carry, *inputs)` returns `(carry, out)`."
        )

    def init(key: Any) -> Any:
        if callable(params):
            return params(key)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            raise ValueError(
                "The parameters were given as shapes only, so they cannot be initialised: pass arrays, or a function "
                "`params=lambda key: ...` that makes them."
            )
        return jax.tree.map(jnp.array, params)

    def initial_carry(key: Any) -> Any:
        del key
        return jax.tree.map(_concrete, carry)

    return Step(
        run=step,
        init=init if callable(params) or not _is_abstract(params) else _known_shapes(init, params),
        initial_carry=initial_carry,
        hidden=jax.tree.map(lambda leaf: jnp.issubdtype(shape_of(leaf).dtype, jnp.inexact), carry),
        random=False,
        names=f"function {name}",
    )


def _is_abstract(tree: Any) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def _known_shapes(init: Callable[[Any], Any], params: Any) -> Callable[[Any], Any]:
    """``init`` that can be asked for shapes (with an abstract key), though not for values."""

    def with_shapes(key: Any) -> Any:
        if is_traced(key):
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
        return init(key)

    return with_shapes


def _concrete(leaf: Any) -> Any:
    return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.array(leaf)
