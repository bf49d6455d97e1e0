"""Metrics of a run, one JSON object a line."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, TextIO

from .board import Board

__all__ = ["Records", "read_records"]


class Records:
    """Appends metrics to a file; what comes after the checkpoint that a run goes on from is dropped.

    A checkpoint comes after the training of its step and before the test.

    Args:
      path: of the file; None to write nothing, as all processes but the first do.
      start: the step that the run goes on from.
      board: gets the same metrics.
    """

    def __init__(self, path: Path | None, start: int = 0, board: Board | None = None):
        self.path, self.board = path, board
        self._file: TextIO | None = None
        if path is None:
            return
        last = {"train": start, "test": start - 1}
        kept = [line for line in read_records(path) if line["step"] <= last[line["kind"]]]
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.new")  # whenever the process is killed, one of the two is whole
        beside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(beside, path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, kind: str, metrics: dict[str, Any]) -> None:
        """One line: the step, the kind of record, and its metrics."""
        if self._file is None:
            return
        known = {name: value if math.isfinite(value) else None for name, value in metrics.items()}  # JSON has no NaN
        self._file.write(json.dumps({"step": step, "kind": kind, **known}) + "\n")
        if self.board is not None:
            self.board.write(step, kind, metrics)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        if self.board is not None:
            self.board.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file; none if there is no such file."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break  # a line that was cut while it was written; nothing after it counts
    return found
