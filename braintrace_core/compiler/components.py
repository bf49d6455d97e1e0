"""Components: the real numbers that a unit of a hidden group consists of.

A plain state gives one component, a state with several stacked on its last axis gives that many, and a complex state
gives its real and its imaginary part. Factors are between components, so they are real and mean the same for every
kind of state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

__all__ = ["Component", "Components"]


class Component(NamedTuple):
    """One real number of each unit.

    Attributes:
      state: which hidden state of the group it belongs to.
      slot: its place on the state's last axis; None if the state is not stacked.
      imaginary: whether it is the imaginary part of a complex state.
    """

    state: int
    slot: int | None
    imaginary: bool


class Components:
    """The components of a group of states, in order.

    Args:
      avals: shape and dtype of each state.
      stacked: whether each state has several states on its last axis.
    """

    def __init__(self, avals: Sequence[Any], stacked: Sequence[bool]):
        self.avals = tuple(avals)
        self.stacked = tuple(stacked)

    @property
    def varshapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each state, a unit for each position."""
        return tuple(tuple(a.shape[:-1] if s else a.shape) for a, s in zip(self.avals, self.stacked, strict=True))

    @property
    def varshape(self) -> tuple[int, ...]:
        """The shape of the group."""
        return self.varshapes[0]

    @property
    def widths(self) -> tuple[int, ...]:
        """How many states each array holds."""
        return tuple(a.shape[-1] if s else 1 for a, s in zip(self.avals, self.stacked, strict=True))

    @cached_property
    def items(self) -> tuple[Component, ...]:
        """All components."""
        return tuple(
            Component(i, slot if stacked else None, imaginary)
            for i, (aval, stacked, width) in enumerate(zip(self.avals, self.stacked, self.widths, strict=True))
            for slot in range(width)
            for imaginary in ((False, True) if jnp.issubdtype(aval.dtype, jnp.complexfloating) else (False,))
        )

    def __len__(self) -> int:
        return len(self.items)

    def real_dtype(self, component: int) -> Any:
        """The dtype of a component."""
        return jnp.finfo(self.avals[self.items[component].state].dtype).dtype

    @property
    def state_dtype(self) -> Any:
        """The dtype that holds every state."""
        return _common_dtype(aval.dtype for aval in self.avals)

    @property
    def dtype(self) -> Any:
        """The dtype that holds every component."""
        return _common_dtype(self.real_dtype(a) for a in range(len(self)))

    def of_cotangents(self, cotangents: Sequence[Any], component: int) -> Array:
        """``dL / d component`` from JAX's gradients ``dL / d state`` (for a complex state: ``dL/dre - i dL/dim``)."""
        state, slot, imaginary = self.items[component]
        value = cotangents[state] if slot is None else cotangents[state][..., slot]
        if not jnp.issubdtype(self.avals[state].dtype, jnp.complexfloating):
            return value
        return -jnp.imag(value) if imaginary else jnp.real(value)

    def cotangents_of(self, component: int, weights: Array) -> list[Array]:
        """The states' cotangents that weigh ``component`` by ``weights``, of shape ``varshape``, and nothing else."""
        state, slot, imaginary = self.items[component]
        result = [jnp.zeros(a.shape, a.dtype) for a in self.avals]
        value = weights.astype(self.avals[state].dtype)
        if imaginary:
            value = value * jnp.asarray(-1j, value.dtype)
        result[state] = value if slot is None else result[state].at[..., slot].set(value)
        return result

    def dense_jacobian(self, entries: Mapping[tuple[int, int], Array]) -> Array:
        """``(*varshape, num_state, num_state)`` from entries between components; complex states count as one each."""
        real = [i for i, c in enumerate(self.items) if not c.imaginary]
        rows = [[self._combined(entries, a, b) for b in real] for a in real]
        return jnp.stack([jnp.stack(row, axis=-1) for row in rows], axis=-2)

    def _combined(self, entries: Mapping[tuple[int, int], Array], a: int, b: int) -> Array:
        dtype = self.state_dtype
        value = entries.get((a, b), jnp.zeros(self.varshape, dtype)).astype(dtype)
        has_imaginary = jnp.issubdtype(self.avals[self.items[a].state].dtype, jnp.complexfloating)
        if has_imaginary and (a + 1, b) in entries:
            value = value + entries[a + 1, b].astype(dtype) * jnp.asarray(1j, dtype)
        return value


def _common_dtype(dtypes: Iterable[Any]) -> Any:
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)
