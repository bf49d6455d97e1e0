"""Traces of a large table, of the rows that were looked up: a place for each, given to the newest.

An embedding's trace has a row for each row of the table, and nearly all are zero: those that an example has not looked
up since it began. Here an example has a few places, each for one row of the table. A row that is looked up and has no
place takes that of the row which was looked up longest ago. As long as an example looks up no more rows than there are
places, nothing is lost and the trace is exact; what is lost is counted.

Stored: the places' traces, whose rows they are (plus one: zero is nobody), and how lately each was looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..ops.dtypes import storage_dtype
from ..ops.trace_rules import EmbeddingTrace
from .rule import Traces, times

__all__ = ["contract_rows", "has_rows", "init_rows", "roll_rows"]

_NOW = 2**30  # how lately a row was looked up that was looked up just now


def has_rows(traces: Traces, name: str) -> bool:
    """Whether the traces of a link are of touched rows."""
    return f"{name}.rows.ids" in traces


def init_rows(
    name: str, rule: EmbeddingTrace, places: int, batch: int, stored: tuple[int, ...], dtype: object
) -> Traces:
    """Empty places for each example."""
    shape = (batch, *rule.index_shape, places)
    traces: Traces = {
        f"{name}.rows.{a}": jnp.zeros((*shape, *_row_shape(rule)), storage_dtype(dtype, rule.dtype)) for a in stored
    }
    traces[f"{name}.rows.ids"] = jnp.zeros(shape, jnp.int32)
    traces[f"{name}.rows.seen"] = jnp.zeros(shape, jnp.int32)
    traces[f"{name}.rows.lost"] = jnp.zeros((batch,), jnp.int32)
    return traces


def roll_rows(
    name: str,
    rule: EmbeddingTrace,
    traces: Traces,
    x: Array,
    decayed: Callable[[int, Mapping[int, Array]], Array | None],
    cotangents: Mapping[int, Array],
    stored: tuple[int, ...],
) -> Traces:
    """The places after a window.

    Args:
      name: of the link.
      rule: of its table.
      traces: before the window.
      x: the rows that were looked up, ``(time, batch, *index shape)``.
      decayed: ``decayed(a, traces by component)`` is what remains of them for component ``a``; None for nothing.
      cotangents: what each component gets from each step.
      stored: the components.
    """
    wanted = jnp.where(x < 0, x + rule.rows, x).astype(jnp.int32) + 1
    old = traces[f"{name}.rows.ids"]
    (ids, seen), places = lax.scan(_place, (old, traces[f"{name}.rows.seen"]), wanted)
    same = ids == old
    # A step whose row has lost its place since then says nothing any more.
    still = jnp.take_along_axis(ids, jnp.moveaxis(places, 0, -1), axis=-1) == jnp.moveaxis(wanted, 0, -1)
    number = ids.shape[-1]
    places = jnp.where(jnp.moveaxis(still, -1, 0), places, number)
    small = EmbeddingTrace(rule.index_shape, jax.ShapeDtypeStruct((number, *_row_shape(rule)), rule.dtype))
    new: Traces = {f"{name}.rows.ids": ids, f"{name}.rows.seen": seen}
    lost = jnp.zeros(ids.shape, bool)
    before = {a: traces[f"{name}.rows.{a}"] for a in stored}
    for a in stored:
        kept = decayed(a, before)
        kept = jnp.zeros_like(before[a]) if kept is None else kept
        gone = ~_wide(same, kept)
        lost |= (gone & (kept != 0)).any(tuple(range(ids.ndim, kept.ndim)))
        kept = jnp.where(gone, jnp.zeros_like(kept), kept)
        found = small.add(kept, places, cotangents[a]) if a in cotangents else kept
        new[f"{name}.rows.{a}"] = found.astype(before[a].dtype)
    lost_now = lost.sum(tuple(range(1, lost.ndim)), dtype=jnp.int32)
    new[f"{name}.rows.lost"] = traces[f"{name}.rows.lost"] + lost_now
    return new


def contract_rows(name: str, rule: EmbeddingTrace, traces: Traces, signal: Mapping[int, Array]) -> Array:
    """The gradient of the table for a signal at each stored component."""
    ids = traces[f"{name}.rows.ids"]
    table = (rule.rows, *_row_shape(rule))
    parts = [times(rule.align(s), traces[f"{name}.rows.{a}"]) for a, s in signal.items()]
    dtype = parts[0].dtype
    rows = jnp.where(ids == 0, table[0], ids - 1).reshape(-1)
    values = sum((part.astype(dtype) for part in parts[1:]), parts[0].astype(dtype)).reshape(-1, *table[1:])
    return jnp.zeros(table, dtype).at[rows].add(values, mode="drop")


def _place(state: tuple[Array, Array], wanted: Array) -> tuple[tuple[Array, Array], Array]:
    """One step: the place of the row that is looked up, which takes the stalest if it has none."""
    ids, seen = state
    is_there = ids == wanted[..., None]
    place = jnp.where(is_there.any(-1), is_there.argmax(-1), seen.argmin(-1)).astype(jnp.int32)
    here = lax.broadcasted_iota(jnp.int32, ids.shape, ids.ndim - 1) == place[..., None]
    seen = jnp.where(here, _NOW, jnp.where(seen > 0, jnp.maximum(seen - 1, 1), 0))
    return (jnp.where(here, wanted[..., None], ids), seen), place


def _row_shape(rule: EmbeddingTrace) -> tuple[int, ...]:
    return rule.shape[len(rule.index_shape) + 1 :]


def _wide(mask: Array, like: Array) -> Array:
    return mask.reshape(mask.shape + (1,) * (like.ndim - mask.ndim))
