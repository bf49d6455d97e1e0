"""A batch in shares, each on devices of its own: what is summed over examples is summed within a share first.

A gradient has several terms: what a window says, what its past says, what waits from the step before. Summed over the
batch one by one, each would be sent between devices. In shares all terms are added where they are, and what is sent is
their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array

from .rule import Traces

__all__ = ["can_be_shared", "in_shares"]


def can_be_shared(traces: Traces) -> bool:
    """Whether all traces belong to examples; a random key or a synthesiser's parameters do not."""
    return not any(name == "key" or name.startswith("synthesiser.") for name in traces)


def in_shares(
    function: Callable[..., tuple[list[Array], Traces]], shares: int, args: Sequence[Any], axes: Sequence[int]
) -> tuple[list[Array], Traces]:
    """``function(*args)`` in shares of the batch.

    Args:
      function: gives gradients, sums over examples, and traces, whose first axis is the batch.
      shares: how many; they divide the batch.
      args: trees of arrays.
      axes: which axis of each is the batch.

    Returns:
      Gradients with the shares as a first axis, to be summed, and the traces of the whole batch.
    """

    def cut(axis: int) -> Callable[[Array], Array]:
        return lambda leaf: leaf.reshape(*leaf.shape[:axis], shares, -1, *leaf.shape[axis + 1 :])

    parts = [jax.tree.map(cut(axis), arg) for arg, axis in zip(args, axes, strict=True)]
    gradients, traces = jax.vmap(function, in_axes=tuple(axes))(*parts)
    return gradients, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), traces)
