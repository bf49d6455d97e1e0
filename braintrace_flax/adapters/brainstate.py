"""brainstate modules: parameters in ``ParamState``, hidden state in ``HiddenState``."""

from __future__ import annotations

from typing import Any

import brainstate
import jax
import jax.numpy as jnp

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
    touched = [name_of[id(state)] for state in traced.get_states(*example)]
    own = {n: s.value for n, s in states.items() if isinstance(s, brainstate.ParamState)}
    memory = {n: s.value for n, s in states.items() if n in touched and n not in own}
    is_hidden = {n: isinstance(states[n], brainstate.HiddenState) for n in memory}
    if params is not None:
        own = jax.tree.unflatten(jax.tree.structure(own), jax.tree.leaves(params))

    def run(params: Any, carry: Any, *values: Any) -> tuple[Any, Any]:
        known = {**params, **carry}
        new, out = traced.jaxpr_call([known[n] for n in touched], *values)
        after = dict(zip(touched, new, strict=True))
        return {n: after[n] for n in carry}, out

    def initial_carry(key: Any) -> Any:
        del key
        if carry is not None:
            return jax.tree.map(jnp.array, carry)
        return jax.tree.map(jnp.array, memory)

    return Step(
        run=run,
        init=lambda key: jax.tree.map(jnp.array, own),
        initial_carry=initial_carry,
        hidden={n: jax.tree.map(lambda _, n=n: is_hidden[n], value) for n, value in memory.items()},
        random=False,
        names=f"brainstate module {type(module).__name__}",
    )
