"""Index patterns: which elements of a source each element of a value depends on.

A pattern lists up to a few source elements for each element (exactly), and says whether units are mixed beyond that
(a reduction over units, a matrix product). The list alone tells which unit an element belongs to; together with
the mixing flag it bounds where the Jacobian can be non-zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

__all__ = ["MAX_LISTED", "Pattern", "union"]

# An element that depends on more source elements than this counts as depending on all of them.
MAX_LISTED = 16


class Pattern:
    """Dependence of one value on one source.

    Attributes:
      index: ``(*value shape, k)``: the flat indices of source elements, ``-1`` where there are fewer than ``k``.
      mixed: whether every element may depend on every source element, besides those listed.
    """

    __slots__ = ("index", "mixed")

    def __init__(self, index: np.ndarray, mixed: bool = False):
        self.index = index
        self.mixed = mixed

    @staticmethod
    def identity(shape: tuple[int, ...]) -> Pattern:
        """Each element depends on itself."""
        return _identity(tuple(shape))

    @staticmethod
    def mixing(shape: tuple[int, ...]) -> Pattern:
        """Each element depends on the whole source, none in particular."""
        return Pattern(np.empty((*shape, 0), np.int32), mixed=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """The value's shape."""
        return self.index.shape[:-1]

    @property
    def is_empty(self) -> bool:
        """Whether there is no dependence at all."""
        return not self.mixed and not (self.index >= 0).any()

    def flat(self) -> np.ndarray:
        """The listed indices as ``(elements, k)``."""
        return self.index.reshape(int(np.prod(self.shape, dtype=np.int64)), self.index.shape[-1])

    def moved(self, index: np.ndarray) -> Pattern:
        """The same dependence for elements in another arrangement."""
        return Pattern(index, self.mixed)

    def broadcast(self, shape: tuple[int, ...]) -> Pattern:
        """For a value that is broadcast implicitly (a scalar, or axes of size one) to ``shape``."""
        if self.shape == tuple(shape):
            return self
        index = self.index.reshape((1,) * (len(shape) - len(self.shape)) + self.index.shape)
        return self.moved(np.broadcast_to(index, (*shape, self.index.shape[-1])))

    def merged(self, axes: Sequence[int]) -> Pattern:
        """For a value whose ``axes`` are combined into one element (a reduction)."""
        rest = [i for i in range(len(self.shape)) if i not in axes]
        count = int(np.prod([self.shape[i] for i in axes], dtype=np.int64))
        shape = tuple(self.shape[i] for i in rest)
        if count * self.index.shape[-1] > MAX_LISTED:
            return Pattern.mixing(shape)
        index = self.index.transpose(*rest, *axes, self.index.ndim - 1).reshape(*shape, -1)
        return Pattern(_normalised(index), self.mixed)


@lru_cache(maxsize=256)
def _identity(shape: tuple[int, ...]) -> Pattern:
    index = np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.int32).reshape(*shape, 1)
    index.setflags(write=False)
    return Pattern(index)


def union(patterns: Sequence[Pattern]) -> Pattern:
    """Dependence of an element-wise result of values with these patterns, all of one shape."""
    first, *others = patterns
    for other in others:
        first = _union(first, other)
    return first


def _union(a: Pattern, b: Pattern) -> Pattern:
    mixed = a.mixed or b.mixed
    if a is b or a.index is b.index or b.index.shape[-1] == 0:
        return a if a.mixed == mixed else Pattern(a.index, mixed)
    if a.index.shape[-1] == 0:
        return b if b.mixed == mixed else Pattern(b.index, mixed)
    index = _normalised(np.concatenate([a.index, b.index], axis=-1))
    if index.shape[-1] > MAX_LISTED:
        return Pattern.mixing(a.shape)
    return Pattern(index, mixed)


def _normalised(index: np.ndarray) -> np.ndarray:
    """Each list sorted downwards without repetition, ``-1`` last, no wider than needed."""
    index = -np.sort(-index, axis=-1)
    if index.shape[-1] > 1:
        repeated = index[..., 1:] == index[..., :-1]
        if repeated.any():
            index = index.copy()
            index[..., 1:][repeated] = -1
            index = -np.sort(-index, axis=-1)
    if index.size == 0:
        return index
    width = int((index >= 0).sum(axis=-1).max())
    return index[..., :width]
