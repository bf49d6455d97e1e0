"""Trace rules: how an operator's eligibility trace is shaped, fed, decayed and contracted.

A trace belongs to one operand ``theta`` of ``y = op(x, theta)`` and holds, for one hidden component, ``d h / d theta``
of every example. All operators here are linear in each operand, so ``d y / d theta`` only depends on ``x``, and four
small functions say everything: which shape the trace has, what ``x`` and a cotangent of ``y`` add to it, how an array
of the shape of ``y`` lines up with it, and how a signal of the shape of ``y`` contracts it to a gradient.

Shapes: a trace is ``(batch, *shape)``; ``x`` and cotangents of a window are ``(time, batch, ...)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .dtypes import common_dtype
from .in_place import add_in_place
from .primitive import ETPPrimitive
from .sums import product_over_steps, sum_leading, weighted_sum

__all__ = [
    "LEAD",
    "EinsumTrace",
    "EmbeddingTrace",
    "JacobianTrace",
    "OperatorTraces",
    "SparseTrace",
    "TraceRule",
    "einsum_traces",
    "letters_of",
    "traces_of",
]

LEAD = "ABCDEFGH"  # letters for leading axes


class TraceRule(ABC):
    """The trace of one operand.

    Attributes:
      shape: the trace's shape for one example.
      dtype: the dtype of ``theta``, and of the trace unless another one is asked for.
    """

    shape: tuple[int, ...]
    dtype: Any

    @abstractmethod
    def instant(self, x: Any, cotangent: Array) -> Array:
        """What a window adds: ``sum_t d (cotangent_t . y_t) / d theta``, example by example, ``(batch, *shape)``."""

    def add(self, kept: Array, x: Any, cotangent: Array) -> Array:
        """``kept`` and what a window adds to it."""
        added = self.instant(x, cotangent)
        dtype = common_dtype(kept.dtype, added.dtype)
        return kept.astype(dtype) + added.astype(dtype)

    @abstractmethod
    def align(self, value: Array) -> Array:
        """``(..., *y shape)`` lined up with the trace, ``(..., *shape)`` with axes of one where it does not vary."""

    @abstractmethod
    def contract(self, trace: Array, signal: Array) -> Array:
        """The gradient of ``theta`` from a trace and a signal ``(batch, *y shape)``, summed over the batch."""

    def gradient(self, x: Any, cotangent: Array) -> Array | None:
        """``sum_t d (cotangent_t . y_t) / d theta`` over the batch too; None if plain differentiation is as good."""
        del x, cotangent
        return None


class EinsumTrace(TraceRule):
    """``y = einsum(x, theta)``; also an operand that is added (``x`` has no axes and is one).

    Every element of the trace acts on one element of ``y``: its axes are those of ``y`` that ``theta`` lacks (positions
    at which the operand is used again), then those of ``theta``.

    Args:
      equation: ``"x,theta->y"`` with one letter an axis.
      sizes: the size of each letter.
      dtype: the dtype of ``theta``.
      prepare: applied to the window's ``x`` first (patches of a convolution, for one).
      precision: of the operator's own product.
    """

    def __init__(
        self,
        equation: str,
        sizes: Mapping[str, int],
        dtype: Any,
        prepare: Callable[[Any], Any] | None = None,
        precision: Any = None,
    ):
        operands, self.y = equation.split("->")
        self.dtype = jnp.dtype(dtype)
        self.is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        self.x, self.theta = operands.split(",")
        self.letters = "".join(letter for letter in self.y if letter not in self.theta) + self.theta
        self.shape = tuple(sizes[letter] for letter in self.letters)
        self.prepare, self.precision = prepare, precision
        unused = [letter for letter in _ALPHABET if letter not in set(self.x + self.theta + self.y)]
        self.time, self.batch = unused[:2]

    def instant(self, x: Any, cotangent: Array) -> Array:
        if not self.x:
            return self._real(sum_leading(cotangent, 1))
        return self._sum_of_terms(*self._prepared(x, cotangent))

    def add(self, kept: Array, x: Any, cotangent: Array) -> Array:
        if not self.x:
            return super().add(kept, x, cotangent)
        terms = self._prepared(x, cotangent)
        added = terms[0].dtype if self.is_complex else jnp.finfo(terms[0].dtype).dtype
        dtype = common_dtype(kept.dtype, added)
        return add_in_place(
            kept.astype(dtype),
            terms,
            lambda kept, term: kept + self._term(*term).astype(dtype),
            lambda kept, terms: kept + self._sum_of_terms(*terms).astype(dtype),
        )

    def _prepared(self, x: Any, cotangent: Array) -> tuple[Array, Array]:
        return _same_dtype(x if self.prepare is None else self.prepare(x), cotangent)

    def _term(self, x: Array, cotangent: Array) -> Array:
        """What one step adds."""
        return self._real(self._lined_up(x, self.x) * self._lined_up(cotangent, self.y))

    def _sum_of_terms(self, x: Array, cotangent: Array) -> Array:
        if x.shape[0] == 1:
            return self._term(x[0], cotangent[0])
        t, b = self.time, self.batch
        return self._real(jnp.einsum(f"{t}{b}{self.x},{t}{b}{self.y}->{b}{self.letters}", x, cotangent))

    def _real(self, value: Array) -> Array:
        return value if self.is_complex else jnp.real(value)

    def gradient(self, x: Any, cotangent: Array) -> Array | None:
        if not self.x and self.theta and self.y == self.theta:
            return self._real(sum_leading(cotangent, 2))
        if not self.x or self.prepare is not None or not (x.dtype == cotangent.dtype == self.dtype):
            return None
        return product_over_steps(self.x, self.theta, self.y, x, cotangent, self.precision)

    def align(self, value: Array) -> Array:
        return self._lined_up(value, self.y)

    def contract(self, trace: Array, signal: Array) -> Array:
        signal, trace = _same_dtype(signal, trace)
        # The axes that theta lacks come first: contracting is a weighted sum over them and the batch.
        lead = 1 + len(self.letters) - len(self.theta)
        weights = self.align(signal)
        weights = weights.reshape(-1, *weights.shape[lead:])
        return weighted_sum(weights, trace.reshape(-1, *trace.shape[lead:]))

    def _lined_up(self, value: Array, axes: str) -> Array:
        """``(..., *axes)`` with its last axes in the order of the trace's, of size one where it has none."""
        lead = value.ndim - len(axes)
        order = [lead + axes.index(letter) for letter in self.letters if letter in axes]
        value = value.transpose(*range(lead), *order)
        return jnp.expand_dims(value, [lead + i for i, letter in enumerate(self.letters) if letter not in axes])


class EmbeddingTrace(TraceRule):
    """``y = theta[x]`` on the first axis.

    Args:
      index_shape: the shape of ``x``.
      table: ``theta``, or its shape and dtype.
    """

    def __init__(self, index_shape: Sequence[int], table: Any):
        self.dtype, table_shape = table.dtype, table.shape
        self.index_shape, self.rows = tuple(index_shape), table_shape[0]
        self.shape = (*index_shape, *table_shape)

    def instant(self, x: Any, cotangent: Array) -> Array:
        return self.add(jnp.zeros((x.shape[1], *self.shape), cotangent.dtype), x, cotangent)

    def add(self, kept: Array, x: Any, cotangent: Array) -> Array:
        # Only the rows that were looked up are touched.
        places = np.indices((x.shape[1], *self.index_shape), np.int32, sparse=True)
        x = jnp.where(x < 0, x + self.rows, x)
        dtype = common_dtype(kept.dtype, cotangent.dtype)
        at = (*(jnp.broadcast_to(p, x.shape) for p in places), x)
        return kept.astype(dtype).at[at].add(cotangent.astype(dtype), mode="drop")

    def align(self, value: Array) -> Array:
        row_ndim = len(self.shape) - len(self.index_shape) - 1
        return jnp.expand_dims(value, value.ndim - row_ndim)

    def contract(self, trace: Array, signal: Array) -> Array:
        signal, trace = _same_dtype(signal, trace)
        return (trace * self.align(signal)).sum(tuple(range(1 + len(self.index_shape))))


class SparseTrace(TraceRule):
    """``y[..., cols] += x[..., rows] * theta``: one entry of the trace for each stored entry of the matrix.

    Args:
      lead: the shape of the leading axes of ``x``.
      entries: the stored entries ``theta``, or their shape and dtype.
      rows, cols: their places.
    """

    def __init__(self, lead: Sequence[int], entries: Any, rows: Array, cols: Array):
        self.shape, self.dtype = (*lead, *entries.shape), entries.dtype
        self.rows, self.cols = rows, cols

    def instant(self, x: Any, cotangent: Array) -> Array:
        x, cotangent = _same_dtype(x, cotangent)
        taken = jnp.take(x, self.rows, axis=-1)
        return (taken * jnp.take(cotangent, self.cols, axis=-1)).sum(0)

    def align(self, value: Array) -> Array:
        return jnp.take(value, self.cols, axis=-1)

    def contract(self, trace: Array, signal: Array) -> Array:
        signal, trace = _same_dtype(signal, trace)
        product = trace * self.align(signal)
        return product.sum(tuple(range(product.ndim - 1)))


class JacobianTrace(TraceRule):
    """Any operator that is linear in ``theta``: the trace keeps ``d h / d theta`` for each element of ``y`` apart.

    The fallback for operators without a rule of their own. It needs ``size of y`` times as much memory as ``theta``.

    Args:
      apply: ``(x, theta) -> y`` for one example.
      theta: an operand's value.
      y_shape: the shape of ``y``.
    """

    def __init__(self, apply: Callable[[Any, Any], Array], theta: Any, y_shape: Sequence[int]):
        self.apply, self.theta = apply, theta
        self.y_ndim = len(y_shape)
        self.shape, self.dtype = (*y_shape, *theta.shape), theta.dtype

    def instant(self, x: Any, cotangent: Array) -> Array:
        def one(x_t: Any, cotangent_t: Array) -> Array:
            jacobian = jax.jacrev(partial(self.apply, x_t), holomorphic=jnp.iscomplexobj(self.theta))(self.theta)
            return self.align(cotangent_t) * jacobian

        return jax.vmap(jax.vmap(one, in_axes=(None if x is None else 0, 0)), in_axes=(None if x is None else 0, 0))(
            x, cotangent
        ).sum(0)

    def align(self, value: Array) -> Array:
        return jnp.expand_dims(value, tuple(range(value.ndim, value.ndim + self.theta.ndim)))

    def contract(self, trace: Array, signal: Array) -> Array:
        signal, trace = _same_dtype(signal, trace)
        return (trace * self.align(signal)).sum(tuple(range(1 + self.y_ndim)))


class OperatorTraces:
    """The traces of an operator, and how gradients of what they stand for reach its operands.

    Args:
      rules: name -> trace rule.
      to_operands: gradients by trace name -> gradients by operand key; None if the names are the keys.
    """

    def __init__(
        self,
        rules: Mapping[str, TraceRule],
        to_operands: Callable[[Mapping[str, Array]], dict[str, Array]] | None = None,
    ):
        self.rules = dict(rules)
        self.to_operands = to_operands or dict

    def gradients(self, x: Any, cotangent: Array) -> dict[str, Array]:
        """Gradients of a whole window for those operands that have a quicker way than plain differentiation."""
        found = {key: rule.gradient(x, cotangent) for key, rule in self.rules.items()}
        return {key: value for key, value in found.items() if value is not None}


def traces_of(primitive: ETPPrimitive, params: Mapping[str, Any], operands: Sequence[Any], y: Any) -> OperatorTraces:
    """The traces of an operator called with these operands (values, or shapes and dtypes, of one example)."""
    found = None
    if primitive.traces is not None and not params.get("vmapped"):
        found = primitive.traces(dict(params), operands, y)
    return _jacobian_traces(primitive, params, operands, y) if found is None else found


def einsum_traces(
    equation: str, operands: Sequence[Any], bias: str | None = None, precision: Any = None
) -> OperatorTraces:
    """The traces of ``einsum(equation, x, weight) + bias``.

    Args:
      equation: with explicit output.
      operands: ``x``, ``weight`` and, if it has one, the bias.
      bias: the axes of ``y`` that the bias has; None if there is none.
      precision: of the product.
    """
    inputs, y = equation.split("->")
    sizes = {
        letter: size
        for letters, operand in zip(inputs.split(","), operands, strict=False)
        for letter, size in zip(letters, operand.shape, strict=True)
    }
    rules: dict[str, TraceRule] = {"weight": EinsumTrace(equation, sizes, operands[1].dtype, precision=precision)}
    if bias is not None:
        rules["bias"] = EinsumTrace(f",{bias}->{y}", sizes, operands[2].dtype)
    return OperatorTraces(rules)


def letters_of(shape: Sequence[int]) -> tuple[str, dict[str, int]]:
    """A letter for each axis, and their sizes."""
    letters = "".join(_ALPHABET[: len(shape)])
    return letters, dict(zip(letters, shape, strict=True))


def _jacobian_traces(
    primitive: ETPPrimitive, params: Mapping[str, Any], operands: Sequence[Any], y: Any
) -> OperatorTraces:
    def apply(key_index: int, x: Any, theta: Any) -> Array:
        values = list(operands)
        if primitive.x_index is not None:
            values[primitive.x_index] = x
        values[key_index] = theta
        result = primitive.apply(*values, **params)
        return result[primitive.y_index] if primitive.multiple_results else result

    keys = primitive.trainable_operands(params)
    return OperatorTraces({key: JacobianTrace(partial(apply, i), operands[i], y.shape) for key, i in keys.items()})


def _same_dtype(a: Array, b: Array) -> tuple[Array, Array]:
    dtype = common_dtype(a.dtype, b.dtype)
    return a.astype(dtype), b.astype(dtype)


_ALPHABET = tuple(chain(map(chr, range(97, 123)), map(chr, range(65, 91))))
