"""Large arrays that are read, and then written, without a copy of them or of what is added to them.

XLA's CPU backend copies an array that one computation reads and another overwrites unless it sees that the first comes
before the second. It also merges computations, and with them loses what it saw. Here what must not be merged stands in
a branch of its own, and what is written waits for what was read. On other platforms, and where arrays are divided among
devices, all this is left to the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

__all__ = ["add_in_place", "after", "in_turn", "is_worth_turns", "on_one_device", "unless_silent"]


def on_one_device() -> bool:
    """Whether what is being traced runs on one device: what suits it would be gathered where arrays are divided."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 and (mesh.empty or mesh.size == 1)


def unless_silent(read: Callable[[Array, Array], Any], array: Array, signal: Array) -> Any:
    """``read(array, signal)``, linear in a signal: where that is zero, the array need not be read."""
    if not _is_worth_it(array):
        return read(array, signal)

    def apart(array: Array, signal: Array) -> Any:
        def silent(*_: Array) -> Any:
            shapes = jax.eval_shape(read, array, signal)
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        return lax.cond(jnp.any(signal != 0), read, silent, array, signal)

    return lax.platform_dependent(array, signal, cpu=apart, default=read)


def after(results: Sequence[Array], value: Array) -> Array:
    """``value``, which is not known before the results are; its numbers do not depend on theirs."""
    if not results or not on_one_device():
        return value

    def waiting(results: Sequence[Array], value: Array) -> Array:
        first = jnp.stack([jnp.real(result).ravel()[0].astype(jnp.float32) for result in results])
        return jnp.where(jnp.any(first > jnp.inf), jnp.zeros_like(value), value)  # nothing is above infinity

    return lax.platform_dependent(list(results), value, cpu=waiting, default=lambda _, value: value)


def add_in_place(kept: Array, terms: Any, add: Callable[[Array, Any], Array], together: Callable[..., Array]) -> Array:
    """``kept`` and the sum over the first axis of some terms that are small beside it.

    Args:
      kept: the array.
      terms: arrays with the number of terms as first axis.
      add: ``add(kept, term)`` adds one of them; element by element, so that several are added in one pass.
      together: ``together(kept, terms)`` adds all of them, where that is left to the compiler.
    """
    count = jax.tree.leaves(terms)[0].shape[0]

    def add_some(kept: Array, terms: Any, count: int) -> Array:
        for t in range(count):
            kept = add(kept, jax.tree.map(itemgetter(t), terms))
        return kept

    if count == 1:
        return add_some(kept, terms, 1)
    most = _IN_ONE_PASS if kept.nbytes > _MOST_IN_CACHE else _MOST_IN_PASSES
    if not _is_worth_it(kept) or count > most:
        return together(kept, terms)

    def in_passes(kept: Array, terms: Any) -> Array:
        first = (count - 1) % _IN_ONE_PASS + 1
        always = lax.optimization_barrier(jnp.int32(1))  # not known to the compiler, or it would merge what follows

        def add_from(start: Any, some: int, kept: Array) -> Array:
            def take(start: Any) -> Any:
                return jax.tree.map(lambda term: lax.dynamic_slice_in_dim(term, start, some), terms)

            def nothing(start: Any) -> Any:
                return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(take, start))

            return add_some(kept, lax.cond(always > 0, take, nothing, start), some)

        kept = add_from(0, first, kept)
        if count == first:
            return kept
        return lax.fori_loop(
            0,
            always * ((count - first) // _IN_ONE_PASS),
            lambda i, kept: add_from(first + i * _IN_ONE_PASS, _IN_ONE_PASS, kept),
            kept,
        )

    return lax.platform_dependent(kept, terms, cpu=in_passes, default=together)


def is_worth_turns(arrays: Sequence[Array], terms: int) -> bool:
    """Whether arrays that are read and written together are better served by :func:`in_turn`.

    Of several, each new one is made of all old ones: done at once, some would be copied. One alone is served worse,
    unless it is out of the cache's reach and a window adds many terms to it.
    """
    batch = arrays[0].shape[0]
    if not on_one_device() or batch == 1 or arrays[0].size < _LARGE_IN_TURN * batch:
        return False
    several = len(arrays) > 1 and sum(array.nbytes for array in arrays) > _MOST_COPIED
    return several or (terms > _IN_ONE_PASS and arrays[0].nbytes > _MOST_IN_CACHE)


def in_turn(turn: Callable[..., tuple[Any, Array]], arrays: Any, over_batch: Any, over_time: Any) -> tuple[Any, Array]:
    """Arrays that are replaced example by example, and the sum of what is read of them on the way.

    What belongs to one example stays in the cache while it is read and written; no array is copied as a whole.

    Args:
      turn: ``turn(arrays, over_batch, over_time) -> (new arrays, read)``, for a batch of one.
      arrays, over_batch: trees; the first axis of each array is the batch.
      over_time: a tree; the second axis is.
    """
    batch = jax.tree.leaves(arrays)[0].shape[0]
    always = lax.optimization_barrier(jnp.int32(1))  # not known to the compiler, or it would merge what follows

    def example(tree: Any, i: Any, axis: int = 0) -> Any:
        return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, i, 1, axis), tree)

    def nothing(tree: Any, _: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape[1:]), leaf.dtype), tree)

    def one(arrays: Any, i: Any) -> tuple[Any, Array]:
        parts = lax.cond(always > 0, example, nothing, arrays, i)
        return turn(parts, example(over_batch, i), example(over_time, i, 1))

    def body(i: Any, now: tuple[Any, Array]) -> tuple[Any, Array]:
        arrays, total = now
        new, read = one(arrays, i)
        return jax.tree.map(
            lambda leaf, part: lax.dynamic_update_slice_in_dim(leaf, part, i, 0), arrays, new
        ), total + read

    _, read = jax.eval_shape(one, arrays, 0)
    return lax.fori_loop(0, always * batch, body, (arrays, jnp.zeros(read.shape, read.dtype)))


def _is_worth_it(arrays: Any) -> bool:
    return on_one_device() and sum(leaf.size for leaf in jax.tree.leaves(arrays)) >= _LARGE


_LARGE = 1 << 14  # numbers; below, a branch or a loop costs more than a copy
_MOST_IN_CACHE = 1 << 25  # bytes; beyond, several passes are slower than one product of all terms and one pass
_LARGE_IN_TURN = 1 << 15  # numbers of one example; below, taking turns costs more than it spares
_MOST_COPIED = 1 << 23  # bytes of several arrays; below, a copy of one of them is quicker than taking turns
_IN_ONE_PASS = 8  # terms; of more at once, the sum does not fit the registers
_MOST_IN_PASSES = 16  # terms; for more, one product of all terms is quicker than its passes
