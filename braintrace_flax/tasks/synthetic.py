"""Generated trials that take memory: copying, matching, accumulating, adding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .base import TEST, TRAIN, Batch, Task, check_chance, check_choice, check_whole, in_batches, random, trials

__all__ = ["Adding", "Copy", "DelayedMatch", "EvidenceAccumulation", "MemoryChain"]

TEST_TRIALS = 256


@dataclass(frozen=True)
class _Generated(Task):
    """Trials out of random numbers. Those for testing are drawn apart from those for training, whatever the seed."""

    @abstractmethod
    def _trials(self, draws: np.random.Generator, count: int) -> Batch:
        """So many new trials."""

    def _batch(self, position: int, batch_size: int, seed: int, rows: range) -> Batch:
        # All rows are drawn in every process: a row's numbers depend on those before it.
        found = self._trials(random(TRAIN, seed, position), batch_size)
        return Batch(*(leaf[:, rows.start : rows.stop] for leaf in found))

    def _test_batches(self, batch_size: int) -> Iterator[Batch]:
        return in_batches(self._trials(random(TEST, 0), TEST_TRIALS), batch_size)


@dataclass(frozen=True)
class Copy(_Generated):
    """Repeat a row of symbols after a delay.

    Symbols come one a step, each a feature of its own; after blank steps one more feature says that the answer is due,
    and the symbols are asked for in their order.

    Attributes:
      symbols: how many there are to choose from.
      length: of the row.
      delay: blank steps before the answer.

    >>> batch = Copy(symbols=3, length=2, delay=4).batch(0, 5)
    >>> batch.inputs.shape, batch.mask[:, 0].tolist()
    ((8, 5, 4), [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    """

    symbols: int = 8
    length: int = 10
    delay: int = 20

    def __post_init__(self) -> None:
        check_whole("Copy", 2, symbols=self.symbols)
        check_whole("Copy", 1, length=self.length)
        check_whole("Copy", 0, delay=self.delay)

    @property
    def num_inputs(self) -> int:
        """Symbols and the cue."""
        return self.symbols + 1

    @property
    def num_outputs(self) -> int:
        """Symbols."""
        return self.symbols

    @property
    def steps(self) -> int:
        """Showing, waiting, answering."""
        return 2 * self.length + self.delay

    def _trials(self, draws: np.random.Generator, count: int) -> Batch:
        shown = draws.integers(self.symbols, size=(self.length, count), dtype=np.int32)
        inputs = np.zeros((self.steps, count, self.num_inputs), np.float32)
        inputs[: self.length] = np.eye(self.num_inputs, dtype=np.float32)[shown]
        inputs[-self.length, :, -1] = 1
        targets = np.zeros((self.steps, count), np.int32)
        targets[-self.length :] = shown
        return trials(inputs, targets, self.length)


@dataclass(frozen=True)
class MemoryChain(_Generated):
    """Remember one bit from the first step to the last.

    The first feature shows the bit as -1 or 1 at the first step, the second one asks for it at the last.

    Attributes:
      length: steps from the first to the last.

    >>> batch = MemoryChain(length=4).batch(0, 1)
    >>> np.abs(batch.inputs[:, 0]).tolist()
    [[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    """

    length: int = 20

    def __post_init__(self) -> None:
        check_whole("MemoryChain", 2, length=self.length)

    @property
    def num_inputs(self) -> int:
        """The bit and the question."""
        return 2

    @property
    def num_outputs(self) -> int:
        """Two classes."""
        return 2

    @property
    def steps(self) -> int:
        """Length of the chain."""
        return self.length

    def _trials(self, draws: np.random.Generator, count: int) -> Batch:
        bits = draws.integers(2, size=count, dtype=np.int32)
        inputs = np.zeros((self.steps, count, 2), np.float32)
        inputs[0, :, 0] = 2 * bits - 1
        inputs[-1, :, 1] = 1
        return trials(inputs, np.tile(bits, (self.steps, 1)), 1)


@dataclass(frozen=True)
class Adding(_Generated):
    """Add the two marked numbers.

    The first feature is a number in [0, 1) at every step, the second marks one step of each half. Who always answers 1
    has a mean squared error of 1/6.

    Attributes:
      length: steps.

    >>> batch = Adding(length=10).batch(0, 3)
    >>> batch.inputs.shape, batch.targets.shape, batch.inputs[:, :, 1].sum(0).tolist()
    ((10, 3, 2), (10, 3, 1), [2.0, 2.0, 2.0])
    """

    length: int = 50

    def __post_init__(self) -> None:
        check_whole("Adding", 2, length=self.length)

    @property
    def num_inputs(self) -> int:
        """A number and a mark."""
        return 2

    @property
    def num_outputs(self) -> int:
        """The sum."""
        return 1

    @property
    def kind(self) -> Literal["class", "value"]:
        """Targets are values."""
        return "value"

    @property
    def steps(self) -> int:
        """Numbers of a trial."""
        return self.length

    def _trials(self, draws: np.random.Generator, count: int) -> Batch:
        half, row = self.length // 2, np.arange(count)
        inputs = np.zeros((self.steps, count, 2), np.float32)
        inputs[:, :, 0] = draws.random((self.steps, count), np.float32)
        for low, high in ((0, half), (half, self.length)):
            inputs[draws.integers(low, high, size=count), row, 1] = 1
        total = (inputs[:, :, 0] * inputs[:, :, 1]).sum(0)
        return trials(inputs, np.tile(total[:, None], (self.steps, 1, 1)), 1)


@dataclass(frozen=True)
class DelayedMatch(_Generated):
    """Is the second stimulus the same as the first? Delayed match to sample, with spikes.

    Each stimulus makes a group of neurons of its own fire; a last group fires while the answer is due: class 1 for a
    match, which half of the trials are.

    Attributes:
      stimuli: how many there are.
      neurons: in each group.
      sample, delay, probe, answer: steps of the four phases.
      rate: chance of a spike at each step in a neuron that is driven.
      noise: the same in all others.
      coding: ``"spikes"`` for zeros and ones, ``"rates"`` for the chances themselves.

    >>> task = DelayedMatch(sample=5, delay=10, probe=5, answer=3)
    >>> task.batch(0, 4).inputs.shape
    (23, 4, 30)
    """

    stimuli: int = 2
    neurons: int = 10
    sample: int = 8
    delay: int = 16
    probe: int = 8
    answer: int = 4
    rate: float = 0.4
    noise: float = 0.02
    coding: Literal["spikes", "rates"] = "spikes"

    def __post_init__(self) -> None:
        check_whole("DelayedMatch", 2, stimuli=self.stimuli)
        check_whole("DelayedMatch", 1, neurons=self.neurons, sample=self.sample, probe=self.probe, answer=self.answer)
        check_whole("DelayedMatch", 0, delay=self.delay)
        check_chance("DelayedMatch", rate=self.rate, noise=self.noise)
        check_choice("DelayedMatch", "coding", self.coding, ("spikes", "rates"))

    @property
    def num_inputs(self) -> int:
        """Neurons of all groups."""
        return (self.stimuli + 1) * self.neurons

    @property
    def num_outputs(self) -> int:
        """Two classes."""
        return 2

    @property
    def steps(self) -> int:
        """All four phases."""
        return self.sample + self.delay + self.probe + self.answer

    def _trials(self, draws: np.random.Generator, count: int) -> Batch:
        first = draws.integers(self.stimuli, size=count)
        match = draws.integers(2, size=count, dtype=np.int32)
        other = (first + draws.integers(1, self.stimuli, size=count)) % self.stimuli
        driven = np.zeros((self.steps, count, self.stimuli + 1), bool)
        row, due = np.arange(count), self.steps - self.answer
        driven[: self.sample, row, first] = True
        driven[due - self.probe : due, row, np.where(match, first, other)] = True
        driven[due:, :, -1] = True
        chances = np.where(driven, np.float32(self.rate), np.float32(self.noise)).repeat(self.neurons, axis=2)
        inputs = _spikes(draws, chances) if self.coding == "spikes" else chances
        return trials(inputs, np.tile(match, (self.steps, 1)), self.answer)


@dataclass(frozen=True)
class EvidenceAccumulation(_Generated):
    """Were there more cues on the left or on the right? The T-maze of Bellec et al. (2020), with spikes.

    Cues follow each other, each on one side; after a delay a recall cue asks for the side that had more: class 0 for
    left, 1 for right, equally often. Four groups of neurons: left, right, recall, and one that fires at random all the
    time. The defaults give a cue as many spikes as the paper does, in fewer steps.

    Attributes:
      cues: how many, an odd number.
      neurons: in each group.
      cue, gap: steps of a cue and of the silence after it.
      delay, recall: steps between the last gap and the recall cue, and of that cue.
      rate: chance of a spike at each step in a group that is on.
      noise: the same in the random group.
      bias: chance of a cue to be on the side that the trial favours.

    >>> task = EvidenceAccumulation()
    >>> batch = task.batch(0, 4)
    >>> batch.inputs.shape, int(batch.mask[:, 0].sum())
    ((114, 4, 40), 10)
    """

    cues: int = 7
    neurons: int = 10
    cue: int = 8
    gap: int = 4
    delay: int = 20
    recall: int = 10
    rate: float = 0.5
    noise: float = 0.1
    bias: float = 0.7

    def __post_init__(self) -> None:
        check_whole("EvidenceAccumulation", 1, cues=self.cues, neurons=self.neurons, cue=self.cue, recall=self.recall)
        check_whole("EvidenceAccumulation", 0, gap=self.gap, delay=self.delay)
        check_chance("EvidenceAccumulation", rate=self.rate, noise=self.noise, bias=self.bias)
        if self.cues % 2 == 0:
            raise ValueError(f"EvidenceAccumulation needs an odd number of cues, lest sides tie, got cues={self.cues}.")

    @property
    def num_inputs(self) -> int:
        """Neurons of all four groups."""
        return 4 * self.neurons

    @property
    def num_outputs(self) -> int:
        """Left and right."""
        return 2

    @property
    def steps(self) -> int:
        """Cues with their gaps, delay, recall."""
        return self.cues * (self.cue + self.gap) + self.delay + self.recall

    def _trials(self, draws: np.random.Generator, count: int) -> Batch:
        favoured = draws.integers(2, size=count)
        follows = draws.random((self.cues, count)) < self.bias
        sides = np.where(follows, favoured, 1 - favoured)
        chances = np.zeros((self.steps, count, 4), np.float32)
        row = np.arange(count)
        for i, side in enumerate(sides):
            start = i * (self.cue + self.gap)
            chances[start : start + self.cue, row, side] = self.rate
        chances[-self.recall :, :, 2] = self.rate
        chances[:, :, 3] = self.noise
        label = (2 * sides.sum(0) > self.cues).astype(np.int32)
        inputs = _spikes(draws, chances.repeat(self.neurons, axis=2))
        return trials(inputs, np.tile(label, (self.steps, 1)), self.recall)


def _spikes(draws: np.random.Generator, chances: np.ndarray) -> np.ndarray:
    return (draws.random(chances.shape, np.float32) < chances).astype(np.float32)
