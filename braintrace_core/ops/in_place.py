"""Large arrays that are read, and then written, without a copy of them or of what is added to them.

XLA's CPU backend copies an array that one computation reads and another overwrites unless it sees that the first comes
before the second. It also merges computations, and with them loses what it saw. Here what must not be merged stands in
a branch of its own, and what is written waits for what was read. On other platforms, and where arrays are divided among
devices, all this is left to the compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

__all__ = [
    "add_in_place",
    "after",
    "concatenated",
    "in_turn",
    "is_worth_turns",
    "made_once",
    "on_one_device",
    "unless_silent",
]


def on_one_device() -> bool:
    """Whether what is being traced runs on one device: what suits it would be gathered where arrays are divided."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 and (mesh.empty or mesh.size == 1)


def unless_silent(read: Callable[[Array, Array], Any], array: Array, signal: Array, onto: Any = None) -> Any:
    """``read(array, signal)``, linear in a signal, added to ``onto``: where it is zero, the array need not be read."""

    def added(array: Array, signal: Array, onto: Any) -> Any:
        found = read(array, signal)
        return found if onto is None else jax.tree.map(jnp.add, onto, found)

    if not _is_worth_it(array):
        return added(array, signal, onto)

    def apart(array: Array, signal: Array, onto: Any) -> Any:
        def silent(array: Array, signal: Array, onto: Any) -> Any:
            shapes = jax.eval_shape(read, array, signal)
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes) if onto is None else onto

        return lax.cond(jnp.any(signal != 0), added, silent, array, signal, onto)

    return lax.platform_dependent(array, signal, onto, cpu=apart, default=added)


def made_once(value: Array, large: Sequence[Any]) -> Array:
    """``value``, made before any of the large arrays that are made of it, and not again for each of their rows."""
    if not any(map(_is_worth_it, large)):
        return value

    def same(value: Array) -> Array:
        return value

    return lax.platform_dependent(value, cpu=partial(_apart, same), default=same)


def concatenated(pieces: Sequence[Array]) -> Array:
    """Arrays one after the other along their first axis.

    Merged with a transposition, joining them is slow; apart from it, they are written once more. That is worth it where
    they stay in the second cache meanwhile, or where rows of the merged one want the same places of the first.
    """
    row = pieces[0].shape[-1] * pieces[0].dtype.itemsize
    is_small = sum(piece.nbytes for piece in pieces) <= _HALF_SECOND_CACHE
    if len(pieces) == 1 or not _is_worth_it(pieces) or not (is_small or row % _SAME_PLACES == 0):
        return jnp.concatenate(pieces)
    return lax.platform_dependent(list(pieces), cpu=partial(_apart, jnp.concatenate), default=jnp.concatenate)


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
      kept: the array; its first axis is the batch.
      terms: arrays with the number of terms as first axis, the batch as second.
      add: ``add(kept, term)`` adds one of them; element by element, so that several are added in one pass.
      together: ``together(kept, terms)`` adds all of them, where that is left to the compiler.
    """
    count = jax.tree.leaves(terms)[0].shape[0]
    if count == 1:
        return add(kept, jax.tree.map(itemgetter(0), terms))
    at_once = _terms_of_a_pass(kept)
    if not _is_worth_it(kept) or (_are_for_a_product(kept, count) and 2 * kept.nbytes <= _MOST_IN_CACHE):
        return together(kept, terms)  # the cache holds what is added too

    def in_passes(kept: Array, terms: Any) -> Array:
        first = (count - 1) % at_once + 1
        always = _always()

        def add_from(start: Any, some: int, kept: Array) -> Array:
            def take(start: Any) -> Any:
                return jax.tree.map(lambda of: _side_by_side(lax.dynamic_slice_in_dim(of, start, some)), terms)

            taken = _apart(take, start, always=always)
            sums = [kept] + [jnp.zeros_like(kept)] * ((some - 1) // _IN_ONE_SUM)
            for t in range(some):
                place = t % len(sums)
                sums[place] = add(sums[place], jax.tree.map(partial(_one_of, t), taken, terms))
            return reduce(jnp.add, sums)

        kept = add_from(0, first, kept)
        if count == first:
            return kept
        return lax.fori_loop(
            0,
            always * ((count - first) // at_once),
            lambda i, kept: add_from(first + i * at_once, at_once, kept),
            kept,
        )

    return lax.platform_dependent(kept, terms, cpu=in_passes, default=together)


def is_worth_turns(arrays: Sequence[Array], terms: int, interlocked: bool) -> bool:
    """Whether arrays that no cache holds, read and then written, are better served by :func:`in_turn`.

    So are interlocked ones, each of which is made anew of all of them: done at once, some would be copied. So are
    several that more terms are added to than a pass takes: of one example, the cache holds the product of all terms.
    """
    batch = arrays[0].shape[0]
    if not on_one_device() or batch == 1 or arrays[0].size < _LARGE_IN_TURN * batch:
        return False
    if not interlocked and (len(arrays) == 1 or not _are_for_a_product(arrays[0], terms)):
        return False
    return sum(array.nbytes for array in arrays) > _MOST_IN_CACHE


def in_turn(turn: Callable[..., tuple[Any, Any]], arrays: Any, over_batch: Any, over_time: Any) -> tuple[Any, Any]:
    """Arrays that are replaced example by example, and the sum of what is read of them on the way.

    What belongs to one example stays in the cache while it is read and written; no array is copied as a whole.

    Args:
      turn: ``turn(arrays, over_batch, over_time) -> (new arrays, read)``, for a batch of one.
      arrays, over_batch: trees; the first axis of each array is the batch.
      over_time: a tree; the second axis is.
    """
    batch = jax.tree.leaves(arrays)[0].shape[0]
    always = _always()

    def example(tree: Any, i: Any, axis: int = 0) -> Any:
        return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, i, 1, axis), tree)

    def one(arrays: Any, i: Any) -> tuple[Any, Any]:
        parts = _apart(example, arrays, i, always=always)
        return turn(parts, example(over_batch, i), example(over_time, i, 1))

    def body(i: Any, now: tuple[Any, Any]) -> tuple[Any, Any]:
        arrays, total = now
        new, read = one(arrays, i)
        put = jax.tree.map(lambda leaf, part: lax.dynamic_update_slice_in_dim(leaf, part, i, 0), arrays, new)
        return put, jax.tree.map(jnp.add, total, read)

    _, read = jax.eval_shape(one, arrays, 0)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), read)
    return lax.fori_loop(0, always * batch, body, (arrays, zeros))


def _apart(make: Callable[..., Any], *args: Any, always: Array | None = None) -> Any:
    """``make(*args)`` in a branch of its own; inside of a loop, ``always`` is from outside of it."""

    def nothing(*args: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(make, *args))

    return lax.cond((_always() if always is None else always) > 0, make, nothing, *args)


def _always() -> Array:
    """One, but that is not known to the compiler, or it would do without the branch and merge what it holds."""
    return lax.optimization_barrier(jnp.int32(1))


def _terms_of_a_pass(kept: Array) -> int:
    """How many terms a pass over an array takes: their rows stay in the first cache while the array passes by."""
    return max(1, min(_IN_ONE_PASS, _HALF_FIRST_CACHE // (kept.shape[-1] * kept.dtype.itemsize)))


def _are_for_a_product(kept: Array, count: int) -> bool:
    """Whether so many terms are better multiplied out, where a cache holds their product, than added in passes."""
    return count * kept.shape[-1] * kept.dtype.itemsize > _HALF_FIRST_CACHE


def _side_by_side(terms: Array) -> Array:
    """``(terms, batch, ...)`` as ``(batch, ...)``, the terms of an example one after the other.

    Terms a whole batch apart, often a power of two, would want the same places of the first cache, which has eight of
    each. Their axes are made one, or the compiler would leave them where they are.
    """
    return jnp.moveaxis(terms, 0, 1).reshape(terms.shape[1], -1)


def _one_of(t: int, side_by_side: Array, terms: Array) -> Array:
    """Term ``t``, ``(batch, ...)``, of what :func:`_side_by_side` made of terms like these."""
    shape = terms.shape[1:]
    size = math.prod(shape[1:])
    return side_by_side[:, t * size : (t + 1) * size].reshape(shape)


def _is_worth_it(arrays: Any) -> bool:
    return on_one_device() and sum(leaf.size for leaf in jax.tree.leaves(arrays)) >= _LARGE


_LARGE = 1 << 14  # numbers; below, a branch or a loop costs more than a copy
_HALF_FIRST_CACHE = 1 << 14  # bytes of it; what passes by takes its places, too
_HALF_SECOND_CACHE = 1 << 19  # bytes of it; an array beside what is made of it
_MOST_IN_CACHE = 1 << 25  # bytes of the last one; beyond, a product that is written and read again is slower
_SAME_PLACES = 1 << 11  # bytes; rows so far apart want the same few places of the first cache
_LARGE_IN_TURN = 1 << 15  # numbers of one example; below, taking turns costs more than it spares
_IN_ONE_PASS = 16  # terms; of more at once, the sum does not fit the registers
_IN_ONE_SUM = 4  # terms; each of them waits for the one before it, and other sums need not
