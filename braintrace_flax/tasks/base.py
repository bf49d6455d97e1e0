"""What a task is: batches by position, and held-out batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

__all__ = ["Batch", "Task"]

TRAIN, TEST, ORDER = 0, 1, 2  # what random numbers are drawn for


class Batch(NamedTuple):
    """Sequences side by side, time first.

    Attributes:
      inputs: ``(time, batch, features)`` float32, or ``(time, batch)`` int32 where they are tokens.
      targets: ``(time, batch)`` int32 classes, or ``(time, batch, outputs)`` float32 values.
      mask: ``(time, batch)`` float32: 1 at steps that count in loss and metrics, 0 elsewhere.
      reset: ``(time, batch)`` bool: where a new sequence starts. That is the first step of every trial; a stream goes
        on from batch to batch and has none.
    """

    inputs: np.ndarray
    targets: np.ndarray
    mask: np.ndarray
    reset: np.ndarray


@dataclass(frozen=True)
class Task(ABC):
    """Something to learn: training batches by position, and fixed held-out batches.

    >>> from braintrace_flax.tasks import Copy
    >>> task = Copy(symbols=4, length=3, delay=5)
    >>> task.num_inputs, task.num_outputs, task.kind, task.steps
    (5, 4, 'class', 11)
    >>> batch = task.batch(0, 16)
    >>> batch.inputs.shape, batch.targets.shape
    ((11, 16, 5), (11, 16))
    """

    @property
    @abstractmethod
    def num_inputs(self) -> int:
        """Features of an input, or the number of tokens there are."""

    @property
    @abstractmethod
    def num_outputs(self) -> int:
        """Classes, or values to predict at each step."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Time steps of one batch."""

    @property
    def kind(self) -> Literal["class", "value"]:
        """What targets are: classes or values."""
        return "class"

    @property
    def is_tokens(self) -> bool:
        """Whether inputs are whole numbers, one for each step, rather than features."""
        return False

    def batch(self, position: int, batch_size: int, *, seed: int = 0, part: tuple[int, int] = (0, 1)) -> Batch:
        """The batch at a position; the same bits in every process.

        Args:
          position: 0, 1, 2, ...: how many batches came before.
          batch_size: rows of the whole batch.
          seed: of the order of the data, or of the data themselves where they are generated.
          part: ``(i, n)`` for the i-th of n equal parts of the rows, for several processes.
        """
        position, batch_size, seed = _plain(position), _plain(batch_size), _plain(seed)
        name = f"{type(self).__name__}.batch"
        check_whole(name, 0, position=position, seed=seed)
        check_whole(name, 1, batch_size=batch_size)
        return self._batch(position, batch_size, seed, _rows(name, part, batch_size))

    def test_batches(self, batch_size: int) -> Iterator[Batch]:
        """All held-out data, in a fixed order.

        Every batch has ``batch_size`` rows and ``steps`` steps; what the data do not fill is masked. Streams go on from
        one batch to the next, so that a fresh carry belongs before the first.
        """
        batch_size = _plain(batch_size)
        check_whole(f"{type(self).__name__}.test_batches", 1, batch_size=batch_size)
        return self._test_batches(batch_size)

    @abstractmethod
    def _batch(self, position: int, batch_size: int, seed: int, rows: range) -> Batch:
        """The given rows of a batch; all arguments are checked."""

    @abstractmethod
    def _test_batches(self, batch_size: int) -> Iterator[Batch]:
        """The held-out batches; the argument is checked."""


def random(purpose: int, seed: int, position: int = 0) -> np.random.Generator:
    """A generator for one purpose, seed and position, independent of all others."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(purpose, position)))


def trials(inputs: np.ndarray, targets: np.ndarray, answer: int) -> Batch:
    """Rows that are one trial each, answered in the last steps."""
    steps, rows = inputs.shape[:2]
    mask, reset = np.zeros((steps, rows), np.float32), np.zeros((steps, rows), bool)
    mask[steps - answer :] = 1
    reset[0] = True
    return Batch(inputs, targets, mask, reset)


def in_batches(found: Batch, batch_size: int) -> Iterator[Batch]:
    """Trials in batches of one size; the last is filled up with empty trials that do not count."""
    rows = found.mask.shape[1]
    for first in range(0, rows, batch_size):
        batch = Batch(*(leaf[:, first : first + batch_size] for leaf in found))
        missing = batch_size - batch.mask.shape[1]
        if missing:
            batch = Batch(*(np.pad(leaf, [(0, 0), (0, missing)] + [(0, 0)] * (leaf.ndim - 2)) for leaf in batch))
            batch.reset[0] = True
        yield batch


def check_whole(name: str, least: int, **values: Any) -> None:
    """Refuse values that are not whole numbers of at least ``least``."""
    for argument, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} needs {argument} as a whole number of at least {least}, got {value!r}.")


def check_chance(name: str, **values: Any) -> None:
    """Refuse values that are not numbers in ``[0, 1]``."""
    for argument, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise ValueError(f"{name} needs {argument} as a number in [0, 1], got {value!r}.")


def check_choice(name: str, argument: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not one of the choices."""
    if value not in choices:
        known = " or ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"{name} needs {argument} to be {known}, got {value!r}.")


def _plain(value: Any) -> Any:
    """A position that comes out of a checkpoint may be NumPy's."""
    return int(value) if isinstance(value, np.integer) else value


def _rows(name: str, part: tuple[int, int], batch_size: int) -> range:
    index, count = map(_plain, part)
    check_whole(f"{name}'s part (i, n)", 1, n=count)
    check_whole(f"{name}'s part (i, n)", 0, i=index)
    if index >= count:
        raise ValueError(f"{name} needs part (i, n) with i below n, got {(index, count)}.")
    if batch_size % count:
        raise ValueError(f"{name} cannot cut batch_size={batch_size} into {count} equal parts.")
    size = batch_size // count
    return range(index * size, (index + 1) * size)
