"""``einsum``: any product of an input and a weight that two lists of letters can describe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from .hooks import prepare
from .primitive import register_primitive
from .trace_rules import OperatorTraces, einsum_traces

__all__ = ["einsum", "etp_einsum_p"]


def einsum(
    equation: str,
    x: ArrayLike,
    weight: ArrayLike,
    *,
    weight_fn: Callable[[Array], Array] | None = None,
    mask: ArrayLike | None = None,
) -> Array:
    """``y = jnp.einsum(equation, x, weight)``, marked as trainable.

    Args:
      equation: ``"letters of x,letters of weight->letters of y"``, one letter for each axis and no ``...``. A letter
        stands once in an operand; one that is not in ``y`` is summed, and is then in both operands.
      x, weight: arrays with the axes that ``equation`` names.
      weight_fn: applied to the weight first; gradients go back through it.
      mask: multiplies the weight after ``weight_fn``.

    >>> import jax.numpy as jnp
    >>> einsum("hi,hio->ho", jnp.ones((2, 3)), jnp.ones((2, 3, 1))).tolist()
    [[3.0], [3.0]]
    """
    x, weight = jnp.asarray(x), prepare(weight, weight_fn, mask)
    equation = equation.replace(" ", "")
    _check_equation(equation)
    _check_shapes(equation, x.shape, weight.shape)
    return etp_einsum_p.bind(x, weight, equation=equation, precision=None, preferred_element_type=None)


def _check_equation(equation: str) -> None:
    def refuse(reason: str) -> ValueError:
        return ValueError(f'einsum cannot use the equation "{equation}": {reason}')

    if "." in equation:
        raise refuse("'...' is not supported. Name every axis, or map over the others with jax.vmap.")
    operands, arrow, y = equation.partition("->")
    if not arrow:
        raise refuse("it has no '->'. Say which axes the result has, as in 'bi,io->bo'.")
    if operands.count(",") != 1:
        raise refuse("it needs two operands, x and the weight, with one comma between, as in 'bi,io->bo'.")
    x, weight = operands.split(",")
    for name, letters in (("x", x), ("weight", weight), ("the result", y)):
        others = sorted({letter for letter in letters if not (letter.isascii() and letter.isalpha())})
        if others:
            raise refuse(f"an axis is a letter from a to z or A to Z, got {others} in {name}.")
        repeated = sorted({letter for letter in letters if letters.count(letter) > 1})
        if repeated:
            raise refuse(f"{repeated} repeats in {name}. Take the diagonal before, or give each axis its own letter.")
    unknown = sorted(set(y) - set(x + weight))
    if unknown:
        raise refuse(f"{unknown} of the result is in neither operand.")
    lonely = sorted((set(x) ^ set(weight)) - set(y))
    if lonely:
        raise refuse(f"{lonely} is in one operand only and not in the result. Sum that axis before, or keep it.")


def _check_shapes(equation: str, *shapes: tuple[int, ...]) -> None:
    sizes: dict[str, int] = {}
    operands = equation.partition("->")[0].split(",")
    for name, letters, shape in zip(("x", "weight"), operands, shapes, strict=True):
        if len(letters) != len(shape):
            raise ValueError(f'einsum "{equation}" needs {name} with {len(letters)} axes, got shape {shape}.')
        for letter, size in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f'einsum "{equation}" needs one size for "{letter}", got {sizes[letter]} in x and {size} in weight.'
                )


def _einsum(x: Array, weight: Array, *, equation: str, precision: Any, preferred_element_type: Any) -> Array:
    return jnp.einsum(equation, x, weight, precision=precision, preferred_element_type=preferred_element_type)


etp_einsum_p = register_primitive("etp_einsum", _einsum, trainable={"weight": 1})


def _traces(params: dict[str, Any], operands: Sequence[Any], y: Any) -> OperatorTraces:
    del y
    return einsum_traces(params["equation"], operands, precision=params["precision"])


etp_einsum_p.traces = _traces
