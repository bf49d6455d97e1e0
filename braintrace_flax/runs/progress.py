"""What a run says while it goes: a bar in a terminal, lines in a log."""

from __future__ import annotations

import resource
import sys
import time
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

__all__ = ["Reporter"]


class Reporter:
    """Shows steps, rate, time left, memory and metrics; a context manager.

    Args:
      total: steps of the run.
      start: steps that were done before.
      every: steps between two lines of a log; 0 for the last alone.
      quiet: whether to show nothing but messages.
      stream: where to write; standard output if None.
    """

    def __init__(self, total: int, start: int = 0, every: int = 10, quiet: bool = False, stream: TextIO | None = None):
        self.total, self.first, self.every, self.quiet = total, start, every, quiet
        self.console = Console(file=stream or sys.stdout, soft_wrap=True, highlight=False, markup=False)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._began = time.perf_counter()

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        if self.console.is_terminal and not self.quiet:
            columns = [
                TextColumn("{task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
            ]
            self._bar = Progress(*columns, console=self.console)
            self._task = self._bar.add_task("train", total=self.total, completed=self.first, text="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """Say how the run stands after ``step`` steps."""
        elapsed = max(time.perf_counter() - self._began, 1e-9)
        rate = (step - self.first) / elapsed
        text = f"{_spelt(metrics)}  {rate:.1f} steps/s  {_memory()}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, text=text)
        elif not self.quiet and (step == self.total or (self.every and step % self.every == 0)):
            left = (self.total - step) / rate if rate > 0 else float("nan")
            self.console.print(f"step {step}/{self.total}  {text}  {_clock(left)} left")

    def say(self, text: str) -> None:
        """A line of its own."""
        self.console.print(text)


def _spelt(metrics: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _clock(seconds: float) -> str:
    if seconds != seconds:
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _memory() -> str:
    """The most memory that the process has held."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return f"{size / 2**20:.0f} MiB"
