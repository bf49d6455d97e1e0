"""A model that compiles fast, data for it, and its online gradients by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace_flax as braintrace

BATCH, FEATURES, UNITS, OUTPUTS = 2, 2, 3, 2


def step(params, carry, x):
    """Units that feed back to themselves alone: D-RTRL is exact here."""
    carry = jnp.tanh(params["a"] * carry + x @ params["w"])
    return carry, carry @ params["r"]


def params_of(seed: int = 0, dtype: Any = jnp.float64) -> Any:
    draws = np.random.default_rng(seed)
    values = {
        "a": draws.uniform(0.5, 0.9, UNITS),
        "r": draws.normal(size=(UNITS, OUTPUTS)),
        "w": draws.normal(size=(FEATURES, UNITS)),
    }
    return {name: jnp.asarray(value, dtype) for name, value in values.items()}


@cache
def model(batch: int | None = BATCH) -> braintrace.Model:
    if batch is None:
        example = jnp.zeros(FEATURES)
        return braintrace.compile(step, example, params=params_of(), carry=jnp.zeros(UNITS), batch_axis=None)
    return braintrace.compile(step, jnp.zeros((batch, FEATURES)), params=params_of(), carry=jnp.zeros(UNITS))


def data(steps: int, batch: int = BATCH, seed: int = 1) -> tuple[Any, Any]:
    """Inputs and targets, time first."""
    draws = np.random.default_rng(seed)
    return jnp.asarray(draws.normal(size=(steps, batch, FEATURES))), jnp.asarray(
        draws.normal(size=(steps, batch, OUTPUTS))
    )


def loss(outputs, targets):
    return jnp.mean(jnp.square(outputs - targets))


def windows(steps: int, length: int) -> list[slice]:
    return [slice(first, first + length) for first in range(0, steps, length)]


@cache
def online(rule: Any = "d_rtrl", credit: Any = "window") -> optax.GradientTransformationExtraArgs:
    """``online_grad``, its update compiled once for all tests; what follows it in a chain need not be."""
    tx = braintrace.online_grad(model(), rule=rule, credit=credit)
    return optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update))


@cache
def seen() -> tuple[tuple[Any, Any], ...]:
    """Three windows with the same parameters: ``(grads, window)`` of each."""
    inputs, targets = data(6)
    found = jax.jit(braintrace.value_and_grad(model(), loss))
    params, carry, result = params_of(), model().initial_carry(), []
    for now in windows(6, 2):
        (_, carry), grads, window = found(params, carry, inputs[now], targets[now])
        result.append((grads, window))
    return tuple(result)


def updates_of(tx: Any, *, by_hand: bool = False) -> tuple[list[Any], Any]:
    """What an optimizer makes of the three windows, and its state; or of their online gradients, by hand."""
    params = params_of()
    tx, first = optax.with_extra_args_support(tx), online()
    state, first_state, result = tx.init(params), first.init(params), []
    for grads, window in seen():
        if by_hand:
            grads, first_state = first.update(grads, first_state, params, online=window)
            updates, state = tx.update(grads, state, params)
        else:
            updates, state = tx.update(grads, state, params, online=window)
        result.append(updates)
    return result, state


def assert_same(found: Any, expected: Any, rtol: float = 1e-12) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-14)


def differs(a: Any, b: Any) -> bool:
    return any(float(jnp.abs(x - y).max()) > 1e-6 for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
