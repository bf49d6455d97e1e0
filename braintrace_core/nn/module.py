"""What layers and cells share: sizes, keys, dtypes, first values, and the life of hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

__all__ = [
    "Cell",
    "Initializer",
    "Layer",
    "Size",
    "axis_sizes",
    "check_batch",
    "constant",
    "expand",
    "initial",
    "matrix_shape",
    "split_key",
    "weight_and_bias",
]

Size = int | Sequence[int]
Initializer = Callable[[Array, tuple[int, ...], Any], Array] | ArrayLike


class Layer(brainstate.nn.Module):
    """A module with an input size, an output size and one dtype, that of its parameters and results.

    Inputs are cast to this dtype, so spikes may be booleans or integers. ``dtype=None`` means JAX's default float
    (float32, or float64 where x64 is enabled).
    """

    def __init__(self, in_size: Size, out_size: Size, dtype: DTypeLike | None = None) -> None:
        super().__init__()
        self.in_size = axis_sizes(self, "in_size", in_size)
        self.out_size = axis_sizes(self, "out_size", out_size)
        self.dtype = jnp.result_type(float) if dtype is None else jnp.dtype(dtype)
        if not jnp.issubdtype(self.dtype, jnp.inexact):
            raise TypeError(f"{_name(self)} needs a floating dtype, got dtype={self.dtype.name}.")

    def check_input(self, x: ArrayLike) -> Array:
        """``x`` of shape ``(..., *in_size)`` as an array of the layer's dtype."""
        x = jnp.asarray(x)
        if x.shape[max(x.ndim - len(self.in_size), 0) :] != self.in_size:
            expected = ", ".join(["...", *map(str, self.in_size)])
            raise ValueError(f"{_name(self)} needs x of shape ({expected}), got {x.shape}.")
        if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(self.dtype, jnp.complexfloating):
            raise TypeError(f"{_name(self)} has dtype {self.dtype.name} and cannot take x of dtype {x.dtype.name}.")
        return x.astype(self.dtype)


class Cell(Layer):
    """A layer with hidden states, one step per call.

    ``init_state()`` makes the states of one stream, of shape ``out_size``; ``init_state(batch_size=b)`` those of a
    batch, of shape ``(b, *out_size)``. Inputs lead with the same axes. A subclass names its states in
    ``state_names``; they start at zero unless it overrides ``first_value``.
    """

    state_names: ClassVar[tuple[str, ...]] = ("h",)
    state_class: ClassVar[type[brainstate.HiddenState]] = brainstate.HiddenState

    def first_value(self, name: str, shape: tuple[int, ...]) -> Array:
        """The value that state ``name`` starts from."""
        del name
        return jnp.zeros(shape, self.dtype)

    @property
    def state_size(self) -> tuple[int, ...]:
        """Shape of one state, batch aside."""
        return tuple(self.out_size)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The leading axes of the states: ``()`` for a single stream, ``(batch_size,)`` for a batch."""
        state = self._state(self.state_names[0]).value
        return state.shape[: state.ndim - len(self.state_size)]

    def init_state(self, batch_size: int | None = None) -> None:
        """Make the hidden states: shape ``state_size``, or ``(batch_size, *state_size)``."""
        shape = (*_batch_shape(self, batch_size), *self.state_size)
        for name in self.state_names:
            setattr(self, name, self.state_class(self.first_value(name, shape)))

    def reset_state(self, batch_size: int | None = None) -> None:
        """Put the hidden states back to where they start; ``None`` keeps the present batch size."""
        shape = (*(_batch_shape(self, batch_size) or self.batch_shape), *self.state_size)
        for name in self.state_names:
            self._state(name).value = self.first_value(name, shape)

    def check_input(self, x: ArrayLike) -> Array:
        """As for a layer; the leading axes must also be those of the states."""
        x = super().check_input(x)
        check_batch(self, x, self.batch_shape)
        return x

    def _state(self, name: str) -> brainstate.State:
        state = getattr(self, name, None)
        if state is None:
            raise RuntimeError(
                f"{_name(self)} has no states yet. Call init_state() for a single stream, init_state(batch_size=...) "
                "for a batch, or brainstate.nn.init_all_states(model, ...) for a whole model."
            )
        return state


def split_key(key: Array | None, count: int) -> list[Array]:
    """``count`` keys out of one; ``None`` stands for ``jax.random.key(0)``.

    >>> len(split_key(jax.random.key(7), 3))
    3
    """
    if key is None:
        key = jax.random.key(0)
    if not isinstance(key, jax.Array):
        raise TypeError(f"key must be a JAX key such as jax.random.key(0), got {key!r}.")
    return list(jax.random.split(key, count))


def initial(name: str, init: Initializer, key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """A parameter's first value, strongly typed.

    ``init`` is a function of ``(key, shape, dtype)``, such as those of ``jax.nn.initializers``, or the value itself.

    >>> initial("w_init", jax.nn.initializers.ones, jax.random.key(0), (2,), jnp.float32).tolist()
    [1.0, 1.0]
    """
    dtype = jnp.dtype(dtype)
    if callable(init):
        # Decompositions (orthogonal) do not exist in half precision.
        value = jnp.asarray(init(key, shape, dtype if dtype.itemsize > 2 else jnp.float32))
    else:
        value = jnp.asarray(init)
    if value.shape != shape:
        raise ValueError(f"{name} must give shape {shape}, got {value.shape}.")
    return jax.lax.convert_element_type(value, dtype)


def constant(layer: Layer, name: str, value: ArrayLike, *, positive: bool = False) -> float | np.ndarray:
    """``value`` as a number, or as an array with one entry for each unit of ``layer``."""
    array = np.asarray(value, float)
    if array.ndim and array.shape != tuple(layer.out_size):
        raise ValueError(
            f"{_name(layer)} needs {name} as a number or an array of shape {tuple(layer.out_size)}, got {array.shape}."
        )
    if not np.all(np.isfinite(array)) or (positive and np.any(array <= 0)):
        raise ValueError(f"{_name(layer)} needs a {'positive' if positive else 'finite'} {name}, got {value}.")
    return array if array.ndim else float(array)


def weight_and_bias(
    layer: Layer,
    w_init: Initializer,
    w_shape: tuple[int, ...],
    b_init: Initializer | None,
    b_shape: tuple[int, ...],
    key: Array | None,
) -> dict[str, Array]:
    """The first values ``{"weight": ..., "bias": ...}`` of a layer; no bias if ``b_init`` is None."""
    w_key, b_key = split_key(key, 2)
    value = {"weight": initial("w_init", w_init, w_key, w_shape, layer.dtype)}
    if b_init is not None:
        value["bias"] = initial("b_init", b_init, b_key, b_shape, layer.dtype)
    return value


def expand(value: float | np.ndarray | Array, like: Array) -> Any:
    """``value`` ready to meet ``like`` of shape ``(..., *value.shape)``: broadcast and cast, numbers untouched.

    >>> expand(np.array([1.0, 2.0]), jnp.zeros((3, 2))).shape
    (3, 2)
    """
    if isinstance(value, (int, float)):
        return float(value)
    return jnp.broadcast_to(jnp.asarray(value, like.dtype), like.shape)


def check_batch(layer: Layer, x: Array, batch_shape: tuple[int, ...]) -> None:
    """An error unless ``x`` leads with the axes that the states lead with."""
    leading = x.shape[: x.ndim - len(layer.in_size)]
    if leading != batch_shape:
        raise ValueError(
            f"{_name(layer)} got x with leading axes {leading}, but its states have {batch_shape}. "
            "Call init_state(batch_size=...) with the batch of x, or init_state() for a single stream."
        )


def matrix_shape(layer: Layer) -> tuple[int, int]:
    """``(in, out)`` of a layer that maps one axis to one axis; an error for others."""
    if len(layer.in_size) != 1 or len(layer.out_size) != 1:
        raise ValueError(
            f"{_name(layer)} maps one axis to one axis, got in_size={tuple(layer.in_size)} and "
            f"out_size={tuple(layer.out_size)}. Flatten the input first."
        )
    return layer.in_size[0], layer.out_size[0]


def axis_sizes(layer: Layer, name: str, size: Size) -> tuple[int, ...]:
    """``size`` as a tuple of positive integers."""
    axes = tuple(size) if isinstance(size, Sequence) else (size,)
    if not axes or not all(isinstance(axis, (int, np.integer)) and axis > 0 for axis in axes):
        raise ValueError(f"{_name(layer)} needs {name} as a positive integer or a tuple of them, got {size!r}.")
    return tuple(int(axis) for axis in axes)


def _batch_shape(layer: Layer, batch_size: int | None) -> tuple[int, ...]:
    return () if batch_size is None else axis_sizes(layer, "batch_size", batch_size)


def _name(layer: Layer) -> str:
    return type(layer).__name__
