"""``embedding``: rows of a table, chosen by integer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from .hooks import prepare
from .primitive import register_primitive
from .trace_rules import EmbeddingTrace, OperatorTraces

__all__ = ["embedding", "etp_embedding_p"]


def embedding(
    indices: ArrayLike,
    weight: ArrayLike,
    *,
    weight_fn: Callable[[Array], Array] | None = None,
    mask: ArrayLike | None = None,
) -> Array:
    """``y = weight[indices]``, marked as trainable.

    Indices mean what they mean in ``weight[indices]``: negative ones count from the end, and they are promised to be
    in range (past the end, the last row is read and gets no gradient).

    Args:
      indices: integers of any shape.
      weight: ``(rows, ...)``.
      weight_fn: applied to the whole table first; gradients go back through it.
      mask: multiplies the table after ``weight_fn``.

    Returns:
      ``(*indices.shape, ...)``.

    >>> import jax.numpy as jnp
    >>> embedding(jnp.array([2, 0]), jnp.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])).tolist()
    [[4.0, 5.0], [0.0, 1.0]]
    """
    indices, weight = jnp.asarray(indices), prepare(weight, weight_fn, mask)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(f"embedding needs integer indices, got {indices.dtype}. Cast them with .astype(int).")
    if weight.ndim < 1:
        raise ValueError(f"embedding needs weight of shape (rows, ...), got {weight.shape}.")
    return etp_embedding_p.bind(indices, weight, mode="promise_in_bounds")


def _embedding(indices: Array, weight: Array, *, mode: Any) -> Array:
    # On an explicit mesh JAX asks for the result's sharding: the axes keep those that they come with.
    rows, table = jax.typeof(indices).sharding.spec, jax.typeof(weight).sharding.spec
    sharded = any(axis is not None for axis in (*rows, *table))
    return weight.at[indices].get(mode=mode, out_sharding=PartitionSpec(*rows, *table[1:]) if sharded else None)


etp_embedding_p = register_primitive("etp_embedding", _embedding, trainable={"weight": 1})
etp_embedding_p.batch_into = etp_embedding_p


def _traces(params: dict[str, Any], operands: Sequence[Any], y: Any) -> OperatorTraces:
    del params, y
    indices, weight = operands
    return OperatorTraces({"weight": EmbeddingTrace(indices.shape, weight)})


etp_embedding_p.traces = _traces
