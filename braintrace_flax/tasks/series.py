"""A measured time series of several channels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from .base import check_whole
from .streams import Streams, cut

__all__ = ["Series"]

HELD_OUT = 0.2
CHANNELS = 4  # of the recording that comes with matplotlib


@dataclass(frozen=True)
class Series(Streams):
    """What comes next? Endless streams of a recording, all channels at once.

    The recording is the electroencephalogram among matplotlib's sample data, 800 steps of 4 channels, or a file of the
    user's. Its last fifth is held out. Each channel is scaled to mean 0 and variance 1 on the training part. Inputs and
    targets are ``(length, batch, channels)`` float32.

    Attributes:
      length: steps of one batch.
      file: numbers, one row for each step and one column for each channel: an ``.npy`` file, or text with commas, whose
        first line may hold names. None for the electroencephalogram.

    >>> task = Series(length=16)
    >>> batch = task.batch(0, 8)
    >>> batch.inputs.shape, batch.targets.shape, task.kind
    ((16, 8, 4), (16, 8, 4), 'value')
    """

    length: int = 32
    file: str | None = None

    def __post_init__(self) -> None:
        check_whole("Series", 1, length=self.length)

    @property
    def num_inputs(self) -> int:
        """Channels."""
        return self._parts[0].shape[1]

    @property
    def num_outputs(self) -> int:
        """Channels."""
        return self.num_inputs

    @property
    def kind(self) -> Literal["class", "value"]:
        """Targets are values."""
        return "value"

    @cached_property
    def _parts(self) -> tuple[np.ndarray, np.ndarray]:
        train, test = cut(_recording() if self.file is None else _read(self.file), HELD_OUT)
        mean, deviation = train.mean(0), train.std(0)
        deviation = np.where(deviation > 0, deviation, 1.0)  # a channel that never moves
        return ((train - mean) / deviation).astype(np.float32), ((test - mean) / deviation).astype(np.float32)


def _recording() -> np.ndarray:
    try:
        from matplotlib.cbook import get_sample_data

        path = get_sample_data("eeg.dat", asfileobj=False)
        return np.fromfile(path, "<f8").reshape(-1, CHANNELS)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise type(error)(
            "Series needs matplotlib with its sample data, where its recording is: install braintrace-flax[plot], or "
            "give file."
        ) from error


def _read(file: str) -> np.ndarray:
    if not Path(file).is_file():
        raise FileNotFoundError(f"Series needs file to be an .npy or text file, found none at {file!r}.")
    try:
        values = np.load(file) if Path(file).suffix == ".npy" else _read_text(file)
        values = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"Series needs numbers in rows of one length, but {file!r} has none: {error}") from error
    if values.ndim != 2 or len(values) < 2 or not values.shape[1]:
        raise ValueError(f"Series needs rows of time and columns of channels, but {file!r} has shape {values.shape}.")
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0]
        raise ValueError(
            f"Series needs finite numbers, but {file!r} has {values[row, column]} in row {row}, column {column}."
        )
    return values


def _read_text(file: str) -> np.ndarray:
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    try:
        [float(word) for word in lines[0].split(",")] if lines else None
    except ValueError:
        lines = lines[1:]
    rows = [[float(word) for word in line.split(",")] for line in lines if line.strip()]
    if len({len(row) for row in rows}) > 1:
        raise ValueError("rows differ in length.")
    return np.array(rows)
