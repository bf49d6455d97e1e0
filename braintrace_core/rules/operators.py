"""Gradients of operators' operands over a whole window: one product over all steps and examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._compat import JaxprEqn, Var
from ..compiler.schedule import Operator
from ..ops import etp_embedding_p
from ..ops.in_place import made_once
from ..ops.trace_rules import traces_of

__all__ = ["add_to", "encoded_gradient", "encoded_input", "operator_gradient"]


def operator_gradient(operator: Operator, operands: Sequence[Any], x: Any, cotangent: Array) -> dict[str, Array]:
    """The gradient of each trainable operand, from ``x`` and the gradient of the result, ``(time, batch, ...)``.

    One product over all steps and examples.
    """
    eqn, primitive = operator.eqn, operator.eqn.primitive
    if cotangent.shape[:2] == (1, 1):  # no sum: a product of two vectors, which would be merged with what makes them
        cotangent = made_once(cotangent, [v.aval for v in operator.operands.values()])
    traces = traces_of(primitive, eqn.params, _one_example(eqn, operands), operator.y.aval)
    found = {key: value for key, value in traces.gradients(x, cotangent).items() if key in operator.operands}
    missing = [key for key in operator.operands if key not in found]
    if not missing:
        return found
    places = primitive.trainable_operands(eqn.params)

    def result(*values: Any) -> Array:
        full = list(operands)
        for key, value in zip(missing, values, strict=True):
            full[places[key]] = value

        def one(x_one: Any) -> Any:
            if x is not None:
                full[primitive.x_index] = x_one
            y = primitive.bind(*full, **eqn.params)
            return y[primitive.y_index] if primitive.multiple_results else y

        # Two axes rather than one of both sizes: the batch may be divided among devices.
        steps, batch = cotangent.shape[:2]
        return jax.vmap(jax.vmap(one, axis_size=batch), axis_size=steps)(x)

    _, pull_back = jax.vjp(result, *(operands[places[key]] for key in missing))
    gradients = pull_back(cotangent.astype(operator.y.aval.dtype))  # a short operator may feed wide states
    return {**found, **dict(zip(missing, gradients, strict=True))}


def encoded_input(operator: Operator, x: Any) -> Any:
    """An operator's input as numbers that can be summed over time; rows of a table become their indicators.

    Takes an array with any leading axes, or a shape and dtype.
    """
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    dtype = operator.y.aval.dtype
    if operator.eqn.primitive is not etp_embedding_p:
        return x.astype(dtype) if isinstance(x, Array) else jax.ShapeDtypeStruct(x.shape, dtype)
    rows = operator.eqn.invars[1].aval.shape[0]
    if not isinstance(x, Array):
        return jax.ShapeDtypeStruct((*x.shape, rows), dtype)
    return jax.nn.one_hot(jnp.where(x < 0, x + rows, x), rows, dtype=dtype)


def encoded_gradient(operator: Operator, operands: Sequence[Any], x: Any, cotangent: Array) -> dict[str, Array]:
    """As :func:`operator_gradient`, for an input from :func:`encoded_input`."""
    if operator.eqn.primitive is etp_embedding_p:
        table = operator.eqn.invars[1].aval
        given = list(range(x.ndim - 1))  # time, batch, and the indices' own axes
        return {"weight": jnp.tensordot(x.astype(cotangent.dtype), cotangent, (given, given)).reshape(table.shape)}
    if x is not None:
        own = operator.x.aval.dtype
        x = x.astype(own if jnp.issubdtype(own, jnp.inexact) else cotangent.dtype)
    return operator_gradient(operator, operands, x, cotangent)


def add_to(gradients: dict[Var, Array], var: Var, value: Array) -> None:
    """Add to a gradient, or start it."""
    gradients[var] = gradients[var] + value if var in gradients else value


def _one_example(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Operands as one example sees them: known values, and shapes for those that change in time."""
    return [v.aval if value is None else value for v, value in zip(eqn.invars, operands, strict=True)]
