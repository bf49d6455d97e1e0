"""Index patterns: which elements of a source each element of a value depends on.

A pattern lists up to a few source elements for each element (exactly), and says whether units are mixed beyond that
(a reduction over units, a matrix product). The list alone tells which unit an element belongs to; together with
the mixing flag it bounds where the Jacobian can be non-zero.

An entry is *direct*, or *spread* if a broadcast took it to several elements (the mean in ``y - y.mean()``). Where an
element of the source reaches some units directly and others by being spread, it belongs to the former.
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
      entries: ``(*value shape, k)``, one entry for each listed source element: twice its flat index, plus one if it is
        spread; ``-1`` where there are fewer than ``k``.
      mixed: whether every element may depend on every source element, besides those listed.
    """

    __slots__ = ("entries", "mixed")

    def __init__(self, entries: np.ndarray, mixed: bool = False):
        self.entries = entries
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
        return self.entries.shape[:-1]

    @property
    def width(self) -> int:
        """How many source elements are listed for an element, at most."""
        return self.entries.shape[-1]

    @property
    def is_empty(self) -> bool:
        """Whether there is no dependence at all."""
        return not self.mixed and not (self.entries >= 0).any()

    def listed(self, start: int = 0, step: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The listed pairs, of the elements ``[start::step]`` of the flattened value.

        Returns:
          For each pair, the row (element of the value, counted among those chosen), the flat index of the source
          element, and whether it is spread.
        """
        flat = self.entries.reshape(int(np.prod(self.shape, dtype=np.int64)), self.width)[start::step]
        rows, columns = np.nonzero(flat >= 0)
        entries = flat[rows, columns]
        return rows, entries >> 1, (entries & 1).astype(bool)

    def moved(self, entries: np.ndarray) -> Pattern:
        """The same dependence for elements in another arrangement."""
        return Pattern(entries, self.mixed)

    def repeated(self, entries: np.ndarray) -> Pattern:
        """The same dependence for elements of which a broadcast may have made several each."""
        # Setting the lowest bit marks an entry as spread, and leaves -1 as it is.
        return self.moved(entries | 1 if entries.size > self.entries.size else entries)

    def broadcast(self, shape: tuple[int, ...]) -> Pattern:
        """For a value that is broadcast implicitly (a scalar, or axes of size one) to ``shape``."""
        if self.shape == tuple(shape):
            return self
        entries = self.entries.reshape((1,) * (len(shape) - len(self.shape)) + self.entries.shape)
        return self.repeated(np.broadcast_to(entries, (*shape, self.width)))

    def merged(self, axes: Sequence[int]) -> Pattern:
        """For a value whose ``axes`` are combined into one element (a reduction)."""
        rest = [i for i in range(len(self.shape)) if i not in axes]
        count = int(np.prod([self.shape[i] for i in axes], dtype=np.int64))
        shape = tuple(self.shape[i] for i in rest)
        if count * self.width > MAX_LISTED:
            return Pattern.mixing(shape)
        entries = self.entries.transpose(*rest, *axes, self.entries.ndim - 1).reshape(*shape, count * self.width)
        return Pattern(_normalised(entries), self.mixed)


@lru_cache(maxsize=256)
def _identity(shape: tuple[int, ...]) -> Pattern:
    entries = 2 * np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.int32).reshape(*shape, 1)
    entries.setflags(write=False)
    return Pattern(entries)


def union(patterns: Sequence[Pattern]) -> Pattern:
    """Dependence of an element-wise result of values with these patterns, all of one shape."""
    first, *others = patterns
    for other in others:
        first = _union(first, other)
    return first


def _union(a: Pattern, b: Pattern) -> Pattern:
    mixed = a.mixed or b.mixed
    if a.entries is b.entries or b.width == 0:
        return a if a.mixed == mixed else Pattern(a.entries, mixed)
    if a.width == 0:
        return b if b.mixed == mixed else Pattern(b.entries, mixed)
    entries = _normalised(np.concatenate([a.entries, b.entries], axis=-1))
    if entries.shape[-1] > MAX_LISTED:
        direct = _normalised(np.where(entries & 1, -1, entries))
        return Pattern(direct, True) if direct.shape[-1] <= MAX_LISTED else Pattern.mixing(a.shape)
    return Pattern(entries, mixed)


def _normalised(entries: np.ndarray) -> np.ndarray:
    """Each list sorted downwards without repetition, ``-1`` last, no wider than needed; direct entries win."""
    entries = -np.sort(-entries, axis=-1)
    if entries.shape[-1] > 1:
        # The direct entry of an element is the lower one, so it stands right behind the spread ones.
        repeated = (entries[..., :-1] >> 1) == (entries[..., 1:] >> 1)
        if repeated.any():
            entries = entries.copy()
            entries[..., :-1][repeated] = -1
            entries = -np.sort(-entries, axis=-1)
    if entries.size == 0:
        return entries
    width = int((entries >= 0).sum(axis=-1).max())
    return entries[..., :width]
