"""brainstate modules: parameters in ``ParamState``, hidden state in ``HiddenState``."""

from __future__ import annotations

from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from ..checks import check_tree
from .step import Step

__all__ = ["adapt_brainstate"]


def adapt_brainstate(module: brainstate.nn.Module, inputs: Any, params: Any, carry: Any) -> Step:
    """A brainstate module as a step; its states are made anew, for inputs like these."""
    brainstate.nn.init_all_states(module)
    states = {"/".join(map(str, path)): state for path, state in module.states().items()}
    traced = brainstate.transform.StatefulFunction(module, return_only_write=False)
    example = [jnp.zeros(x.shape, x.dtype) for x in inputs]
    traced.make_jaxpr(*example)
    name_of = {id(state): name for name, state in states.items()}
    for state in traced.get_states(*example):
        if id(state) not in name_of:
            name_of[id(state)] = _outer_name(state, len(states))
            states[name_of[id(state)]] = state
    touched = [name_of[id(state)] for state in traced.get_states(*example)]
    drawing = [n for n in touched if isinstance(states[n], brainstate.random.RandomState)]
    own = {n: s.value for n, s in states.items() if isinstance(s, brainstate.ParamState)}
    memory = {n: s.value for n, s in states.items() if n in touched and n not in own}
    is_hidden = {n: isinstance(states[n], brainstate.HiddenState) for n in memory}
    if params is not None:
        own = jax.tree.unflatten(jax.tree.structure(own), check_tree("params", params, own))

    def run(params: Any, carry: Any, *values: Any) -> tuple[Any, Any]:
        known = {**params, **carry}
        new, out = traced.jaxpr_call([known[n] for n in touched], *values)
        after = dict(zip(touched, new, strict=True))
        return {n: after[n] for n in carry}, out

    def initial_carry(key: Any) -> Any:
        if carry is not None:
            return jax.tree.map(jnp.array, carry)
        fresh = {n: _key_like(memory[n], jax.random.fold_in(key, i)) for i, n in enumerate(drawing)}
        return {**jax.tree.map(jnp.array, memory), **fresh}

    return Step(
        run=run,
        init=lambda key: jax.tree.map(jnp.array, own),
        initial_carry=initial_carry,
        hidden={n: jax.tree.map(lambda _, n=n: is_hidden[n], value) for n, value in memory.items()},
        random=bool(drawing),
        names=f"brainstate module {type(module).__name__}",
    )


def _outer_name(state: Any, place: int) -> str:
    """A name for a state that the module does not hold: only sources of random numbers may be such."""
    if not isinstance(state, brainstate.random.RandomState):
        raise ValueError(
            f"The step uses a state that the module does not hold: {state!r}. Make it an attribute of the module, so "
            "that it can be carried from step to step."
        )
    return f"random {place}"


def _key_like(old: Any, key: Any) -> Any:
    """``key`` as a typed key or as its bits, whichever the old one is."""
    return key if jnp.issubdtype(old.dtype, jax.dtypes.prng_key) else jax.random.key_data(key)
