"""Linen modules: the carry protocol, a carry pytree, or hidden state in a mutable collection."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import Scope, init, unfreeze

from braintrace_core._compat import CALLS, inner_call, open_jaxpr

from .step import Parts, Step, check_arguments

__all__ = ["adapt_linen"]

# Collections that are no memory of the sequence, whatever else a module keeps.
NOT_HIDDEN = frozenset({"batch_stats", "intermediates", "losses", "perturbations"})


def adapt_linen(module: nn.Module, inputs: Any, params: Any, carry: Any) -> Step:
    """A Linen module as a step.

    With the carry protocol ``module(carry, *inputs) -> (carry, out)``, and ``initialize_carry`` or a given ``carry``;
    without it, hidden state is what the module keeps in its mutable collections.
    """
    has_carry = carry is not None or hasattr(module, "initialize_carry")
    check_arguments(module, inputs, has_carry)

    def first_carry(key: Any) -> Any:
        if carry is not None:
            return jax.tree.map(jnp.array, carry)
        return module.initialize_carry(key, jax.tree.leaves(inputs)[0].shape)

    def call(variables: Any, first: Any, values: Any, key: Any, mutable: Any) -> Any:
        arguments = (first, *values) if has_carry else tuple(values)
        return module.apply(variables, *arguments, rngs=key, mutable=mutable)

    def first_values(key: Any) -> tuple[Any, Any]:
        """All variables as they are before any step, and the carry."""
        keys = jax.random.split(key)
        first = first_carry(keys[1]) if has_carry else None
        zeros = _zeros(tuple(inputs))
        arguments = (first, *zeros) if has_carry else zeros
        initial: dict[Any, Any] = {}

        def run(scope: Scope) -> None:
            _record(scope, initial)
            module.clone(parent=scope, _deep_clone=True)(*arguments)

        _, variables = init(run, mutable=nn.DenyList("intermediates"))({"params": keys[0], "dropout": keys[1]})
        variables = unfreeze(variables)
        _check_known({} if has_carry else variables, initial)
        return _before_any_step(variables, initial), first

    def initial_variables(key: Any) -> Any:
        variables, _ = first_values(key)
        if params is not None:
            variables = {**variables, "params": _without_outer(params)}
        return variables

    key = jax.eval_shape(lambda: jax.random.key(0))
    variables, first = jax.eval_shape(first_values, key)
    if params is not None:
        variables = {**variables, "params": jax.eval_shape(lambda: _without_outer(params))}
    mutable = [name for name in variables if name != "params"]
    memory = [name for name in mutable if name not in NOT_HIDDEN]
    random = _uses_key(lambda k: call(_zeros(variables), _zeros(first), _zeros(inputs), k, mutable))
    parts = Parts(
        [
            *(["carry"] if has_carry else []),
            *(["hidden"] if memory and not has_carry else []),
            *(["state"] if (mutable if has_carry else set(mutable) - set(memory)) else []),
            *(["key"] if random else []),
        ]
        or ["hidden"]
    )

    def join(first: Any, collections: Any, key: Any) -> Any:
        kept = {} if has_carry else {name: collections[name] for name in memory}
        others = {name: value for name, value in collections.items() if name not in kept and name != "params"}
        return parts.join({"carry": first, "hidden": kept, "state": others, "key": key})

    def run(params: Any, carry: Any, *values: Any) -> tuple[Any, Any]:
        given = parts.split(carry)
        collections = {**given.get("hidden", {}), **given.get("state", {})}
        key, draw = jax.random.split(given["key"]) if random else (None, None)
        result = call({"params": params, **collections}, given.get("carry"), values, draw, mutable or False)
        out, changed = result if mutable else (result, {})
        first, out = out if has_carry else (None, out)
        return join(first, {**collections, **unfreeze(changed)}, key), out

    def initial_carry(key: Any) -> Any:
        keys = jax.random.split(key)
        variables, first = first_values(keys[0])
        return join(first, variables, keys[1])

    shapes = jax.eval_shape(initial_carry, key)
    hidden = {
        name: jax.tree.map(lambda leaf, name=name: name in ("carry", "hidden") and _is_float(leaf), part)
        for name, part in parts.split(shapes).items()
    }
    return Step(
        run=run,
        init=lambda key: initial_variables(key)["params"],
        initial_carry=initial_carry,
        hidden=parts.join(hidden),
        random=random,
        names=f"Linen module {type(module).__name__}",
    )


class _Recording(Scope):
    """A scope that remembers the first value of every variable: ``init`` already runs a step."""

    initial: dict[Any, Any]

    def push(self, *args: Any, **kwargs: Any) -> Scope:
        child = super().push(*args, **kwargs)
        _record(child, self.initial)
        return child

    def variable(self, col: str, name: str, *args: Any, **kwargs: Any) -> Any:
        is_new = not self.has_variable(col, name)
        result = super().variable(col, name, *args, **kwargs)
        if is_new:
            self.initial[(col, *self.path, name)] = self.get_variable(col, name)
        return result


def _record(scope: Any, initial: dict[Any, Any]) -> None:
    scope.__class__ = _Recording
    scope.initial = initial


def _check_known(variables: Any, initial: dict[Any, Any]) -> None:
    """Raise if a hidden state's first value was not seen: lifted transformations make scopes of their own."""
    memory = {name: tree for name, tree in variables.items() if name != "params" and name not in NOT_HIDDEN}
    lost = [path for keys, _ in jax.tree_util.tree_leaves_with_path(memory) if (path := _path(keys)) not in initial]
    if lost:
        raise ValueError(
            f"The hidden state {', '.join('/'.join(map(str, path)) for path in lost)} is made inside a lifted "
            "transformation (`nn.remat`, `nn.jit`, ...), where its value before the first step cannot be known. Keep "
            "the variable outside and transform what is computed from it, or use the carry protocol."
        )


def _path(keys: Any) -> tuple[Any, ...]:
    return tuple(getattr(key, "key", getattr(key, "idx", None)) for key in keys)


def _before_any_step(variables: Any, initial: dict[Any, Any]) -> Any:
    def value(keys: Any, leaf: Any) -> Any:
        return initial.get(_path(keys), leaf)

    kept = {name: tree for name, tree in variables.items() if name != "params"}
    return {**jax.tree_util.tree_map_with_path(value, kept), "params": nn.meta.unbox(variables.get("params", {}))}


def _uses_key(function: Any) -> bool:
    """Whether the result of ``function(key)`` depends on the key, or cannot be had without one."""
    closed = jax.make_jaxpr(lambda data: jax.tree.leaves(function(jax.random.wrap_key_data(data))))(
        jnp.zeros((2,), jnp.uint32)
    )
    jaxpr, _ = open_jaxpr(closed)
    (data,) = jaxpr.invars
    (wrap,) = (eqn for eqn in jaxpr.eqns if data in _variables(eqn))
    return _is_read(jaxpr, wrap.outvars[0])


def _is_read(jaxpr: Any, variable: Any) -> bool:
    """Whether an equation takes the variable; to hand it on to an inner function that does not is nothing."""
    for eqn in jaxpr.eqns:
        if variable not in _variables(eqn):
            continue
        if eqn.primitive.name not in CALLS:
            return True
        inner, _ = open_jaxpr(inner_call(eqn))
        if any(v is variable and _is_read(inner, inside) for v, inside in zip(eqn.invars, inner.invars, strict=True)):
            return True
    return False


def _variables(eqn: Any) -> list[Any]:
    return [v for v in eqn.invars if not hasattr(v, "val")]


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _is_float(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _without_outer(params: Any) -> Any:
    """Parameters of a module, from them or from all its variables."""
    inner = params["params"] if isinstance(params, dict) and set(params) == {"params"} else params
    return jax.tree.map(jnp.array, unfreeze(nn.meta.unbox(inner)))
