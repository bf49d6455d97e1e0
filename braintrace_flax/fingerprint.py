"""Fingerprints: one number for the bits of an array, the same on any mesh; and what a compiled model is, as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from braintrace_core import ETraceGraph

from .checks import leaf_paths
from .explicit import on_any_mesh
from .online_grad import is_online_state

__all__ = ["begin_fingerprints", "describe", "fingerprints", "is_key"]


def fingerprints(arrays: Sequence[Any]) -> list[int]:
    """A number below 2^32 for each array, of any dtype, computed where the arrays are.

    An array is read as 32-bit words. Each is scrambled together with its position, and the results are summed modulo
    2^32. One word that differs always changes the sum; the order of summing, hence the mesh, does not.

    >>> import jax.numpy as jnp
    >>> a = jnp.arange(3.0)
    >>> first, same, moved, zero, negative = fingerprints([a, a + 0, a[::-1], jnp.zeros(3), -jnp.zeros(3)])
    >>> first == same, first == moved, zero == negative
    (True, False, False)
    """
    return begin_fingerprints(arrays, copy=False)[1]()


def begin_fingerprints(arrays: Sequence[Any], *, copy: bool) -> tuple[list[Any], Callable[[], list[int]]]:
    """The arrays, or copies of them, with keys as numbers; and a function that waits for their fingerprints.

    All is begun, nothing is waited for: with copies the arrays may be donated at once.
    """
    values = [array if isinstance(array, jax.Array) else jnp.asarray(array) for array in arrays]
    together: dict[Any, list[int]] = {}  # one program for what is on the same devices
    for i, value in enumerate(values):
        together.setdefault(frozenset(value.sharding.device_set), []).append(i)
    begun: list[tuple[list[int], Array]] = []
    for places in together.values():
        named = [s for i in places if isinstance(s := values[i].sharding, NamedSharding)]
        numbers, copies = _program(named[0].mesh if named else None, copy)([values[i] for i in places])
        begun.append((places, numbers))
        for i, value in zip(places, copies, strict=True) if copy else ():
            values[i] = value

    def finish() -> list[int]:
        found = {
            i: int(number) for places, numbers in begun for i, number in zip(places, np.asarray(numbers), strict=True)
        }
        return [found[i] for i in range(len(found))]

    return [jax.random.key_data(value) if is_key(value) else value for value in values], finish


@cache
def _program(mesh: Any, copy: bool) -> Any:
    def run(values: list[Array]) -> tuple[Array, list[Array]]:
        numbers = on_any_mesh(
            lambda values: jnp.stack([_fingerprint(value) for value in values]), values, results=PartitionSpec
        )
        if not copy:
            return numbers, []
        return numbers, [jnp.copy(jax.random.key_data(value) if is_key(value) else value) for value in values]

    return jax.jit(run) if mesh is None else jax.jit(run, out_shardings=(NamedSharding(mesh, PartitionSpec()), None))


def _fingerprint(value: Array) -> Array:
    words = _words(value)
    place, stride = jnp.zeros(words.shape, jnp.uint32), 1
    for axis in reversed(range(words.ndim)):  # not by `reshape`, which would gather an array that is divided
        place += lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    return jnp.sum(_scramble(words + _scramble(place)), dtype=jnp.uint32)


def _words(value: Array) -> Array:
    """The bits, as 32-bit words; shorter numbers take a word each."""
    if is_key(value):
        value = jax.random.key_data(value)
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        return jnp.stack([_words(jnp.real(value)), _words(jnp.imag(value))])
    if value.dtype == bool:
        return value.astype(jnp.uint32)
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    bits = jnp.finfo(value.dtype).bits if is_float else jnp.iinfo(value.dtype).bits
    return lax.bitcast_convert_type(value, f"uint{min(bits, 32)}").astype(jnp.uint32)


def _scramble(words: Array) -> Array:
    """A permutation of the 32-bit words, each bit of which depends on all (the last steps of MurmurHash3)."""
    words = (words ^ (words >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> jnp.uint32(16))


def is_key(leaf: Any) -> bool:
    """Whether ``leaf`` holds typed random keys; shapes will do."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def describe(opt_state: Any) -> dict[str, Any]:
    """What the traces of an optimizer state mean: rule, credit, batch size and graph, as text.

    The same in every process and on every machine. Empty for an optimizer without ``online_grad``.

    >>> import jax, jax.numpy as jnp, braintrace_flax as braintrace
    >>> from flax import linen as nn
    >>> tx = braintrace.online_grad(nn.SimpleCell(4), jnp.zeros((2, 3)), rule="e_prop")
    >>> found = describe(jax.eval_shape(tx.init, {}))
    >>> found["rule"], found["batch size"]
    ("EProp(kappa=0.0, feedback='symmetric', seed=0)", 2)
    >>> found["hidden groups"]
    ['HiddenGroup(0: carry; shape (4,), 1 state(s) a unit)']
    """
    found = [node for node in jax.tree.leaves(opt_state, is_leaf=is_online_state) if is_online_state(node)]
    if not found:
        return {}
    settings = found[0].settings
    model, graph = settings.model, settings.model.graph
    names, shapes = leaf_paths(model.params_shape), jax.tree.leaves(model.params_shape)
    return {
        "rule": _without_addresses(repr(settings.rule)),
        "credit": settings.credit,
        "batch size": model.batch_size,
        "frozen": sorted(model.frozen),
        "parameters": [f"{name}: {leaf.dtype}{list(leaf.shape)}" for name, leaf in zip(names, shapes, strict=True)],
        "hidden groups": list(map(repr, graph.hidden_groups)),
        "relations": _relations(graph),
    }


def _relations(graph: ETraceGraph) -> list[str]:
    return [_without_addresses(repr(relation)) for relation in graph.hidden_param_op_relations]


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)
