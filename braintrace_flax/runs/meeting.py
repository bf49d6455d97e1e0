"""Before a run of several processes: do all come, are they as many as each believes, and do they mean the same run?

The first process waits at the coordinator's address, the others call there and say what they are about to do; each is
told the same in return. JAX's own runtime, which starts afterwards at the same address, would end the process where one
is missing, and wait for ever where two differ.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

__all__ = ["MeetingFailed", "difference", "meet", "split_address"]

_LARGEST = 2**20  # bytes of one message


class MeetingFailed(ValueError):
    """The processes of a run do not come together; the same text in all of them."""


def meet(coordinator: str, count: int, index: int, about: dict[str, Any], timeout: float) -> None:
    """Return when all processes are there and are about the same.

    Args:
      coordinator: ``host:port`` of the first process.
      count: of processes.
      index: of this one.
      about: what must be the same in all of them, made of what JSON knows.
      timeout: seconds to wait for the others.

    Raises:
      MeetingFailed: one is missing, came twice, or is about something else.
    """
    address = split_address(coordinator)
    about = json.loads(json.dumps(about))
    if index == 0:
        _host(address, count, about, timeout)
    else:
        _visit(address, count, index, about, timeout)


def split_address(text: str) -> tuple[str, int]:
    """Host and port.

    >>> split_address("10.0.0.1:1234")
    ('10.0.0.1', 1234)
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise MeetingFailed(f"A coordinator is written host:port, as in 10.0.0.1:1234; got {text!r}.")
    return host, int(port)


def difference(mine: dict[str, Any], other: dict[str, Any], who: str) -> str:
    """What another process has that the first has not, in a line; empty if nothing.

    >>> difference({"window": 8, "rule": "rtrl"}, {"window": 4, "rule": "rtrl"}, "process 1")
    'process 1 has window = 4 where process 0 has 8'
    """
    changed = [name for name in {**mine, **other} if mine.get(name) != other.get(name)]
    told = [f"{name} = {other.get(name)!r} where process 0 has {mine.get(name)!r}" for name in changed]
    return f"{who} has {'; '.join(told)}" if told else ""


def _host(address: tuple[str, int], count: int, about: dict[str, Any], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    here: list[tuple[int, socket.socket]] = []
    problems: list[str] = []
    with contextlib.ExitStack() as exits:
        try:
            server = exits.enter_context(socket.create_server(("", address[1]), backlog=max(count, 16)))
        except OSError as error:
            raise MeetingFailed(f"Process 0 cannot wait at port {address[1]}: {error.strerror or error}.") from error
        while len(here) < count - 1:  # also after a problem: all are to hear of it
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                caller = exits.enter_context(server.accept()[0])
            except TimeoutError:
                missing = [str(i) for i in range(1, count) if i not in dict(here)]
                problems.append(f"Of {count} processes, {', '.join(missing)} did not come within {timeout:g} s.")
                break
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a stranger's call means nothing
                caller.settimeout(min(5.0, timeout))
                said = json.loads(_read(caller))
                place = int(said["index"])
                problems += _problems(place, said["count"], said["about"], count, about, dict(here))
                here.append((place, caller))
        for _, caller in here:
            with contextlib.suppress(OSError):
                caller.sendall(json.dumps(problems[:1]).encode() + b"\n")
    if problems:
        raise MeetingFailed(problems[0])


def _problems(
    place: int, told: int, other: dict[str, Any], count: int, about: dict[str, Any], here: dict[int, Any]
) -> list[str]:
    if told != count:
        return [f"Process {place} was told of {told} processes, process 0 of {count}."]
    if place in here or not 0 < place < count:
        return [f"Two processes have the number {place}, or it is not below {count}."]
    changed = difference(about, other, f"process {place}")
    return [f"The processes are about different runs: {changed}."] if changed else []


def _visit(address: tuple[str, int], count: int, index: int, about: dict[str, Any], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    where = f"{address[0]}:{address[1]}"
    while True:
        try:
            host = socket.create_connection(address, timeout=max(deadline - time.monotonic(), 0.1))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise MeetingFailed(
                    f"The coordinator {where} cannot be reached within {timeout:g} s ({error.strerror or error}): is "
                    "process 0 running there, and does the network let this through?"
                ) from error
            time.sleep(0.1)
    with host:
        host.settimeout(timeout + 10)  # the first process may have begun to wait later
        try:
            host.sendall(json.dumps({"index": index, "count": count, "about": about}).encode() + b"\n")
            problems = json.loads(_read(host))
        except (OSError, ValueError) as error:
            raise MeetingFailed(f"The coordinator {where} does not answer: it is busy, gone, or not ours.") from error
    if problems:
        raise MeetingFailed(problems[0])


def _read(connection: socket.socket) -> bytes:
    """One line; an error if there is none."""
    found = b""
    while not found.endswith(b"\n"):
        more = connection.recv(65536)
        if not more or len(found) > _LARGEST:
            raise ValueError("no whole line")
        found += more
    return found
