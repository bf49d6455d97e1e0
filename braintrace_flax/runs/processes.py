"""Several processes as one run: they meet, start JAX's runtime, agree on what they compiled, and watch one another."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from ..manifest import versions
from ..restoring import CheckpointError
from .meeting import MeetingFailed, difference, meet, split_address
from .watch import Watch

__all__ = ["Processes", "agree", "is_first", "together"]

AUTO = "auto"
_EXCHANGED = 2**14  # bytes


@dataclass(frozen=True)
class Processes:
    """Which process this is, and how it finds the others.

    Attributes:
      coordinator: ``host:port`` of the first process; ``"auto"`` to ask the cluster (TPU pods, SLURM, ...); empty for a
        run of one process.
      num_processes: how many there are.
      process_id: which one this is, from 0.
      peer_timeout: seconds to wait for the others at the start, and of silence after which one counts as lost.
    """

    coordinator: str = ""
    num_processes: int = 1
    process_id: int = 0
    peer_timeout: float = 60.0

    def __post_init__(self) -> None:
        if not self.coordinator and self.num_processes > 1:
            raise MeetingFailed("Several processes need `--coordinator host:port`, the address of process 0.")
        if self.num_processes < 1 or not 0 <= self.process_id < self.num_processes:
            raise MeetingFailed(
                f"`--process-id` is below `--num-processes`, got {self.process_id} and {self.num_processes}."
            )
        if not 1 <= self.peer_timeout < 1e6:
            raise MeetingFailed(f"`--peer-timeout` is a number of seconds, at least 1; got {self.peer_timeout:g}.")
        if self.coordinator not in ("", AUTO):
            split_address(self.coordinator)


@contextlib.contextmanager
def together(processes: Processes, about: dict[str, Any]) -> Iterator[None]:
    """Be one of several processes meanwhile; nothing for a run of one.

    Args:
      processes: which, and how many.
      about: what must be the same in all of them; where it is not, each is told so.
    """
    if not processes.coordinator:
        yield
        return
    timeout = processes.peer_timeout
    about = {**about, **versions()}
    known: dict[str, Any] = {}
    if processes.coordinator != AUTO:
        meet(processes.coordinator, processes.num_processes, processes.process_id, about, timeout)
        known = {
            "coordinator_address": processes.coordinator,
            "num_processes": processes.num_processes,
            "process_id": processes.process_id,
        }
    # On CPUs, steps that are under way together take the threads that the collectives of others wait for.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # JAX ends processes by itself when one is silent; ours is the clearer word, so that it comes first.
    limits: dict[str, Any] = {
        "initialization_timeout": int(timeout) + 10,
        "heartbeat_timeout_seconds": int(2 * timeout) + 30,
    }
    try:
        jax.distributed.initialize(**known, **limits)
    except ValueError as error:
        if known:
            raise
        raise MeetingFailed(
            f"`--coordinator auto` finds no cluster here ({error}): give `--coordinator host:port --num-processes N "
            "--process-id I`."
        ) from error
    watch = _watch(processes)
    try:
        agree("run", about)
        yield
    except BaseException as error:
        # Where a process is lost, JAX raises in the middle of something; the watch knows better and ends us.
        time.sleep(2.0 if isinstance(error, (RuntimeError, ValueError)) and not _is_ours(error) else 0.0)
        watch.close(_first_line(error))
        if isinstance(error, (OSError, ValueError, CheckpointError)):
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if isinstance(error, KeyboardInterrupt) else 2)  # an ordinary exit would wait for the others
    watch.close()
    jax.distributed.shutdown()


def agree(what: str, mine: dict[str, Any]) -> None:
    """Compare with all other processes; each is told of the first that differs.

    Long texts are compared by their fingerprints.
    """
    if jax.process_count() == 1:
        return
    texts = multihost_utils.process_allgather(_packed({name: _short(value) for name, value in mine.items()}))
    first, *others = map(_unpacked, texts)
    for index, other in enumerate(others, 1):
        if problem := difference(first, other, f"process {index}"):
            raise MeetingFailed(f"The processes differ in their {what}: {problem}.")


def is_first() -> bool:
    """Whether this process writes what one alone writes."""
    return jax.process_index() == 0


def _watch(processes: Processes) -> Watch:
    watch, count, me = Watch(processes.peer_timeout), jax.process_count(), jax.process_index()
    if count == 1:
        return watch
    if me == 0:
        host = socket.gethostname() if processes.coordinator == AUTO else split_address(processes.coordinator)[0]
        port = watch.listen(count)
        multihost_utils.broadcast_one_to_all(_packed([host, port]))
    else:
        host, port = _unpacked(multihost_utils.broadcast_one_to_all(_packed(None)))
        watch.connect((host, port), me)
    return watch


def _packed(value: Any) -> np.ndarray:
    """What JSON knows as an array of one size, for all processes to exchange."""
    text = json.dumps(value).encode()
    if len(text) > _EXCHANGED:
        text = json.dumps({"all": _digest(text)}).encode()
    return np.frombuffer(text.ljust(_EXCHANGED), np.uint8)


def _unpacked(array: Any) -> Any:
    return json.loads(np.asarray(array, np.uint8).tobytes())


def _short(value: Any) -> Any:
    text = json.dumps(value)
    return value if len(text) < 500 else _digest(text.encode())


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def _is_ours(error: BaseException) -> bool:
    return type(error).__module__.startswith("braintrace_")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
