"""Handwritten digits, read pixel by pixel or row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from .base import ORDER, TEST, Batch, Task, check_choice, check_whole, in_batches, random, trials

__all__ = ["Digits"]

SIDE = 8  # of an image, in pixels
HELD_OUT = 5  # one image in so many is for testing


@dataclass(frozen=True)
class Digits(Task):
    """Which digit is it? scikit-learn's 1797 images of 8 x 8 pixels, as sequences.

    1437 images are for training and 360 for testing, each digit in the same share. An epoch shows every training image
    once, in an order of its own; epochs follow each other without a gap, even within a batch. The target is given at
    every step and counts in the last ``answer``.

    Attributes:
      by: ``"pixel"`` for 64 steps of 1 feature, ``"row"`` for 8 steps of 8; features lie in [0, 1].
      answer: how many steps count; by default the last eighth of 64 pixels, the last quarter of 8 rows.

    >>> batch = Digits(by="row").batch(0, 32)
    >>> batch.inputs.shape, batch.targets.shape, batch.mask[:, 0].tolist()
    ((8, 32, 8), (8, 32), [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    """

    by: Literal["pixel", "row"] = "pixel"
    answer: int | None = None

    def __post_init__(self) -> None:
        check_choice("Digits", "by", self.by, ("pixel", "row"))
        if self.answer is not None:
            check_whole("Digits", 1, answer=self.answer)
            if self.answer > self.steps:
                raise ValueError(f"Digits by {self.by} needs answer of at most {self.steps} steps, got {self.answer}.")

    @property
    def num_inputs(self) -> int:
        """Pixels at a time."""
        return 1 if self.by == "pixel" else SIDE

    @property
    def num_outputs(self) -> int:
        """Ten digits."""
        return 10

    @property
    def steps(self) -> int:
        """Pixels or rows of an image."""
        return SIDE * SIDE // self.num_inputs

    def _batch(self, position: int, batch_size: int, seed: int, rows: range) -> Batch:
        train = self._split[0]
        first = position * batch_size
        epochs: dict[int, np.ndarray] = {}
        chosen = []
        for row in rows:
            epoch, place = divmod(first + row, len(train))
            if epoch not in epochs:
                epochs[epoch] = random(ORDER, seed, epoch).permutation(train)
            chosen.append(epochs[epoch][place])
        return self._trials(np.array(chosen))

    def _test_batches(self, batch_size: int) -> Iterator[Batch]:
        return in_batches(self._trials(self._split[1]), batch_size)

    def _trials(self, chosen: np.ndarray) -> Batch:
        images, labels = self._data
        inputs = images[chosen].reshape(len(chosen), self.steps, self.num_inputs).swapaxes(0, 1)
        targets = np.tile(labels[chosen], (self.steps, 1))
        usual = 8 if self.by == "pixel" else 2
        return trials(np.ascontiguousarray(inputs), targets, self.answer or usual)

    @cached_property
    def _data(self) -> tuple[np.ndarray, np.ndarray]:
        """Images in [0, 1] and their labels."""
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "Digits needs scikit-learn, where its images are: install scikit-learn."
            ) from error
        images, labels = load_digits(return_X_y=True)
        return (images / 16).astype(np.float32), labels.astype(np.int32)

    @cached_property
    def _split(self) -> tuple[np.ndarray, np.ndarray]:
        """Which images are for training and which for testing: every fifth, sorted by digit and shuffled within."""
        labels = self._data[1]
        shuffled = random(TEST, 0).permutation(len(labels))
        ordered = shuffled[np.argsort(labels[shuffled], kind="stable")]
        held_out = np.arange(len(labels)) % HELD_OUT == 0
        return np.sort(ordered[~held_out]), np.sort(ordered[held_out])
