"""Ctrl-C: a run ends between two steps, so that what it saves is whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from ..preemption import Preemption

__all__ = ["interrupt"]


@contextmanager
def interrupt() -> Iterator[Preemption]:
    """Take the first Ctrl-C meanwhile as a notice; a second one interrupts as ever.

    Where interrupts are ignored, as in jobs that a shell has put aside, they still are. With several processes it is
    passed on as SIGTERM, upon which JAX lets all of them stop at the same step.

    >>> ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    >>> with interrupt() as notice:
    ...     signal.raise_signal(signal.SIGINT)
    ...     bool(notice) != ignored
    True
    """
    notice = Preemption()
    former = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or former in (None, signal.SIG_IGN):
        yield notice
        return

    def told(number: int, frame: Any) -> None:
        del number, frame
        if jax.process_count() > 1:
            signal.raise_signal(signal.SIGTERM)
        else:
            notice.set()
        signal.signal(signal.SIGINT, former)

    signal.signal(signal.SIGINT, told)
    try:
        yield notice
    finally:
        signal.signal(signal.SIGINT, former)
