"""Preemption: whether this process was told to stop, so that there is time to save."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental import multihost_utils

__all__ = ["Preemption", "preemption"]


class Preemption:
    """Whether SIGTERM has come; true for ever after.

    >>> notice = Preemption()
    >>> bool(notice)
    False
    """

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Take it as told."""
        self._event.set()

    def __bool__(self) -> bool:
        return self._event.is_set()

    def agreed(self, count: int) -> bool:
        """Whether all processes are to stop now; each asks with the same counts, one after the other.

        After ``jax.distributed.initialize`` JAX catches SIGTERM in every process, and lets all of them stop at the
        same count.
        """
        if jax.distributed.is_initialized() and multihost_utils.reached_preemption_sync_point(count):
            self.set()
        return bool(self)


@contextmanager
def preemption() -> Iterator[Preemption]:
    """Catch SIGTERM meanwhile, if JAX does not; afterwards the former handler is back.

    Python calls handlers in the main thread only: in others this catches nothing.

    >>> import os, signal
    >>> with preemption() as notice:
    ...     os.kill(os.getpid(), signal.SIGTERM)  # what a cluster does some seconds before it takes the machine
    ...     bool(notice)
    True
    """
    notice = Preemption()
    if jax.distributed.is_initialized() or threading.current_thread() is not threading.main_thread():
        yield notice
        return

    def told(number: int, frame: Any) -> None:
        del number, frame
        notice.set()

    former = signal.signal(signal.SIGTERM, told)
    try:
        yield notice
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if former is None else former)
