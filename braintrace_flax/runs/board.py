"""Metrics of a run for TensorBoard, beside those in its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["Board"]


class Board:
    """Writes scalars into a folder that ``tensorboard --logdir`` shows.

    Args:
      folder: of the event files.
      start: the step that the run goes on from; what an earlier process wrote of later ones is not shown.
    """

    def __init__(self, folder: Path, start: int = 0):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "`--tensorboard` needs tensorboardX: `pip install 'braintrace-flax[tensorboard]'`."
            ) from error
        self._writer = SummaryWriter(str(folder), purge_step=start + 1 if start else None)

    def write(self, step: int, kind: str, metrics: dict[str, Any]) -> None:
        """The metrics of one step, as ``train/loss`` or ``test/accuracy``."""
        for name, value in metrics.items():
            self._writer.add_scalar(f"{kind}/{name.removeprefix('test_')}", value, step)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
