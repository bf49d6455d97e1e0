"""Sums over steps, examples and rows, each in the form that suits the platform.

XLA's CPU backend transposes, copies or writes out what it need not in some forms of the same sum. On other platforms,
and where arrays are divided among devices, the plain form is left to the compiler.
"""

from __future__ import annotations

import math
from functools import partial, reduce
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .in_place import on_one_device, unless_silent

__all__ = ["product_over_steps", "sum_leading", "sum_of_parts", "weighted_sum"]


def product_over_steps(x_axes: str, theta_axes: str, y_axes: str, x: Array, cotangent: Array, precision: Any) -> Array:
    """The gradient of ``theta`` in ``y = einsum(x, theta)``: time, batch and what ``theta`` lacks are summed over.

    The derivative of the operator's product would come out transposed, for which XLA's CPU backend transposes the
    cotangent; and an einsum sums over axes in an order of its own, for which it transposes both. A product over leading
    axes transposes its first operand: that is the cotangent where it and the result are small (a readout). Some rows
    as one axis are left as they lie, to products that are divided among cores earlier. A few are added one by one.

    Args:
      x_axes, theta_axes, y_axes: a letter for each axis.
      x, cotangent: ``(time, batch, ...)``; the cotangent is of ``y``.
      precision: of the product.
    """
    shared = [letter for letter in x_axes if letter in y_axes]
    kept = [letter for letter in shared if letter in theta_axes]
    summed = [letter for letter in shared if letter not in theta_axes]

    def places(letters: list[str], axes: str) -> list[int]:
        return [2 + axes.index(letter) for letter in letters]

    def product(first: Array, second: Array, its_axes: str, other_axes: str) -> Array:
        contracting = [0, 1, *places(summed, its_axes)], [0, 1, *places(summed, other_axes)]
        dimensions = contracting, (places(kept, its_axes), places(kept, other_axes))
        return lax.dot_general(first, second, dimensions, precision=precision)

    def as_theta(found: Array, axes: str) -> Array:
        order = [*kept, *(letter for letter in axes if letter not in shared)]
        return found.transpose(*map(order.index, theta_axes))

    def input_first(x: Array, cotangent: Array) -> Array:
        return as_theta(product(x, cotangent, x_axes, y_axes), x_axes + y_axes)

    def cotangent_first(x: Array, cotangent: Array) -> Array:
        found = product(cotangent, x, y_axes, x_axes)
        # Without a barrier the compiler would turn the product around to spare the last transposition.
        return as_theta(lax.optimization_barrier(found), y_axes + x_axes)

    def as_rows(x: Array, cotangent: Array) -> tuple[Array, Array]:
        return x.reshape(-1, x.shape[-1]), cotangent.reshape(-1, cotangent.shape[-1])

    def one_by_one(x: Array, cotangent: Array) -> Array:
        # Without a barrier, what the operands are made of would be made again for each row of the result.
        x, cotangent = lax.optimization_barrier(as_rows(x, cotangent))
        return reduce(jnp.add, [a[:, None] * b[None] for a, b in zip(x, cotangent, strict=True)])

    def of_some_rows(x: Array, cotangent: Array) -> Array:
        x, cotangent = as_rows(x, cotangent)
        return lax.dot_general(x, cotangent, (([0], [0]), ([], [])), precision=precision)

    sizes = dict(zip(x_axes + y_axes, (*x.shape[2:], *cotangent.shape[2:]), strict=True))
    is_plain = len(x_axes) == len(y_axes) == 1 and theta_axes == x_axes + y_axes
    if is_plain and _are_few(x, cotangent):
        return lax.platform_dependent(x, cotangent, cpu=one_by_one, default=input_first)
    if is_plain and _are_some(x, cotangent):
        return lax.platform_dependent(x, cotangent, cpu=of_some_rows, default=input_first)
    if x.size <= 2 * (cotangent.size + math.prod(sizes[letter] for letter in theta_axes)):
        return input_first(x, cotangent)
    return lax.platform_dependent(x, cotangent, cpu=cotangent_first, default=input_first)


def _are_few(x: Array, cotangent: Array) -> bool:
    """Whether there are a few rows, of a type in which a sum of results is as good as one."""
    is_wide = x.dtype == cotangent.dtype and x.dtype.itemsize >= 4
    return on_one_device() and is_wide and 1 < math.prod(x.shape[:2]) <= _FEW_ROWS


def _are_some(x: Array, cotangent: Array) -> bool:
    """Whether there are some rows, but not many, and the product is neither small nor large."""
    rows = math.prod(x.shape[:2])
    return on_one_device() and 1 < rows <= _SOME_ROWS and _SMALL <= x.size * cotangent.shape[-1] <= _LARGE


def weighted_sum(weights: Array, values: Array) -> Array:
    """``sum_r weights[r] * values[r]``, where ``weights`` broadcasts against ``values``.

    The one place where traces are read for a gradient, so it is worth its own form on each platform: XLA's CPU
    backend reads the values once if the sum is written out, and otherwise transposes or materialises them.
    """
    rows = values.shape[0]

    def some(start: int, values: Array, weights: Array) -> Array:
        result = weights[0] * values[start]
        for r in range(1, weights.shape[0]):
            result = result + weights[r] * values[start + r]
        return result

    def written_out(weights: Array, values: Array) -> Array:
        if rows <= _ROWS_AT_ONCE:
            return some(0, values, weights)
        result: Any = None
        for start in range(0, rows, _ROWS_AT_ONCE):
            part = weights[start : start + _ROWS_AT_ONCE]
            result = unless_silent(partial(some, start), values, part, onto=result)
        return result

    def reduced(weights: Array, values: Array) -> Array:
        return sum_of_parts(weights * values, 0)

    if rows > _MOST_WRITTEN_OUT or not on_one_device():  # written out, a sharded axis would be gathered
        return reduced(weights, values)
    return lax.platform_dependent(weights, values, cpu=written_out, default=reduced)


def sum_leading(values: Array, count: int) -> Array:
    """The sum over the first ``count`` axes: time, or time and batch."""
    shape = values.shape[count:]
    rows = int(np.prod(values.shape[:count]))
    if rows == 1:
        return values.reshape(shape)

    def product(values: Array) -> Array:  # XLA's own sum over leading axes is many times slower on CPU
        flat = values.reshape(rows, -1)
        return (jnp.ones(rows, flat.dtype) @ flat).reshape(shape)

    def reduced(values: Array) -> Array:
        return sum_of_parts(values, tuple(range(count)))

    if not on_one_device():  # several axes as one could not be divided among devices
        return reduced(values)
    return lax.platform_dependent(values, cpu=product, default=reduced)


def sum_of_parts(values: Array, axes: int | tuple[int, ...]) -> Array:
    """The sum over some axes, of real and imaginary parts apart: a TPU gathers complex sums from all chips."""
    if not jnp.iscomplexobj(values):
        return values.sum(axes)
    return lax.complex(jnp.real(values).sum(axes), jnp.imag(values).sum(axes))


_FEW_ROWS, _SOME_ROWS = 20, 128
_SMALL, _LARGE = 1 << 20, 1 << 25  # multiplications
_MOST_WRITTEN_OUT = 256
_ROWS_AT_ONCE = 8  # often a power of two apart: of more, the first cache holds no line until it has been read whole
