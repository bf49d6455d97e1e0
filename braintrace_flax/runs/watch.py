"""While a run of several processes goes on: when one is gone, the others end, and say so.

Every process keeps a connection to the first and sends a sign of life through it. A process that dies closes its
connection; one whose machine dies falls silent. JAX's runtime would notice too, and end the process with pages of C++.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["AGAIN", "Watch"]

AGAIN = 75  # the exit code of what may go well when it is run again


class Watch:
    """Keeps an eye on the other processes of a run.

    Args:
      timeout: seconds of silence after which a process counts as lost.
      lost: called, in a thread, with what happened; by default it writes that and ends this process.
    """

    def __init__(self, timeout: float, lost: Callable[[str], Any] | None = None):
        self.timeout, self._lost = timeout, lost or _end
        self._connections: dict[int, socket.socket] = {}
        self._server: socket.socket | None = None
        self._done, self._told = threading.Event(), threading.Lock()

    def listen(self, count: int) -> int:
        """In the first process: the port at which the others are awaited."""
        self._server = server = socket.create_server(("", 0), backlog=max(count, 16))
        server.settimeout(self.timeout)
        self._start(self._accept, count)
        return int(server.getsockname()[1])

    def connect(self, address: tuple[str, int], index: int) -> None:
        """In the other processes."""
        connection = socket.create_connection(address, timeout=self.timeout)
        connection.sendall(json.dumps(index).encode() + b"\n")
        self._keep(0, connection)

    def close(self, failure: str = "") -> None:
        """Leave; the others go on, unless it is because of a failure."""
        self._done.set()
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps({"left": failure}).encode() + b"\n")
                connection.shutdown(socket.SHUT_RDWR)  # which wakes who hears
            connection.close()
        if self._server is not None:
            self._server.close()

    def _accept(self, count: int) -> None:
        assert self._server is not None
        while len(self._connections) < count - 1 and not self._done.is_set():
            try:
                connection = self._server.accept()[0]
                connection.settimeout(self.timeout)
                self._keep(int(_line(connection)), connection)
            except TimeoutError:
                missing = [str(i) for i in range(1, count) if i not in self._connections]
                return self._tell(f"Process {', '.join(missing)} of {count} did not call within {self.timeout:g} s.")
            except (OSError, ValueError):
                continue

    def _keep(self, index: int, connection: socket.socket) -> None:
        connection.settimeout(self.timeout)
        self._connections[index] = connection
        self._start(self._hear, index, connection)
        self._start(self._speak, connection)

    def _start(self, what: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=what, args=args, daemon=True).start()

    def _speak(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not self._done.wait(self.timeout / 4):
                connection.sendall(b"\n")

    def _hear(self, index: int, connection: socket.socket) -> None:
        try:
            while line := _line(connection):
                if line.strip():
                    said = json.loads(line)
                    if "lost" in said:
                        return self._tell(said["lost"])
                    if said["left"]:
                        return self._tell(f"Process {index} ended: {said['left']}")
                    return None
            self._tell(f"Process {index} is gone.")
        except TimeoutError:
            self._tell(f"Process {index} has not been heard of for {self.timeout:g} s.")
        except (OSError, ValueError):
            self._tell(f"Process {index} is gone.")

    def _tell(self, text: str) -> None:
        """Say it once, to all."""
        if self._done.is_set() or not self._told.acquire(blocking=False):
            return
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps({"lost": text}).encode() + b"\n")
        self._lost(text)


def _line(connection: socket.socket) -> bytes:
    """The next line, which is short; empty at the end."""
    found = b""
    while not found.endswith(b"\n"):
        more = connection.recv(1)
        if not more:
            return b""
        found += more
    return found


def _end(text: str) -> None:
    """Nothing else can end a process whose main thread waits for one that is gone."""
    print(
        f"error: {text} This process ends too. Start the run again, with as many processes as there are: it goes on "
        "from the newest checkpoint.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(AGAIN)
