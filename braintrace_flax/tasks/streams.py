"""Endless streams: every row of a batch reads its own stretch of one long record, on and on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .base import ORDER, Batch, Task, random

__all__: list[str] = []


@dataclass(frozen=True)
class Streams(Task):
    """Predict the next value of a record.

    The training part is a ring. ``batch_size`` streams start at equal distances on it, where the seed says, and each
    goes on where it stopped at the position before. The held-out part comes after the training part; it is cut into
    one stretch for each row, and each of its values is predicted once.
    """

    length: int = 64

    @property
    @abstractmethod
    def _parts(self) -> tuple[np.ndarray, np.ndarray]:
        """The training and the held-out part, time first."""

    @property
    def steps(self) -> int:
        """Steps in one batch."""
        return self.length

    def _batch(self, position: int, batch_size: int, seed: int, rows: range) -> Batch:
        ring = self._parts[0]
        needed = batch_size * (self.length + 1)
        if len(ring) < needed:
            raise ValueError(
                f"{type(self).__name__} has {len(ring)} steps to train on, too few for batch_size={batch_size} streams "
                f"of length={self.length}, which need {needed}."
            )
        start = int(random(ORDER, seed).integers(len(ring))) + position * self.length
        starts = np.array([(start + row * len(ring) // batch_size) % len(ring) for row in rows])
        at = (starts + np.arange(self.length + 1)[:, None]) % len(ring)
        return _stream(ring[at[:-1]], ring[at[1:]], np.ones((self.length, len(rows)), bool))

    def _test_batches(self, batch_size: int) -> Iterator[Batch]:
        record = self._parts[1]
        if len(record) <= batch_size:
            raise ValueError(
                f"{type(self).__name__} holds out {len(record)} steps, too few for batch_size={batch_size} streams."
            )
        return self._stretches(record, batch_size)

    def _stretches(self, record: np.ndarray, batch_size: int) -> Iterator[Batch]:
        edges = np.arange(batch_size + 1) * (len(record) - 1) // batch_size
        for first in range(0, int(np.diff(edges).max()), self.length):
            at = edges[:-1] + first + np.arange(self.length)[:, None]
            inside = at < edges[1:]
            at = np.where(inside, at, 0)
            yield _stream(record[at], record[at + 1], inside)


def _stream(inputs: np.ndarray, targets: np.ndarray, counts: np.ndarray) -> Batch:
    return Batch(inputs, targets, counts.astype(np.float32), np.zeros_like(counts))


def cut(record: np.ndarray, held_out: float) -> tuple[np.ndarray, np.ndarray]:
    """The beginning of a record for training, the end for testing."""
    last = len(record) - round(len(record) * held_out)
    return record[:last], record[last:]
