"""Several processes on this machine, as on as many machines of a cluster, to try what will run on a pod:

``python -m braintrace_flax.launch --processes 2 --devices-per-process 4 -- --config configs/smoke.py --mesh data=8``

What follows ``--`` are the arguments of ``braintrace_flax.train``. Each process has so many devices of its own, all of
them made of this machine's processor. Lines are printed with the number of their process.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

__all__ = ["launch"]

_NUMBERS = ("--processes", "--devices-per-process")

# What Gloo says each time that processes have met. Its threads write piece by piece, so lines come mixed.
_GREETING = re.compile(
    r"^(\[Gloo\] |Rank |\d+| is connected to | peer ranks\. |Expected number of connected peer ranks is : |\n)*"
)


def launch(processes: int, devices_per_process: int, arguments: Sequence[str]) -> int:
    """Start them, pass on their output and what signals come, and wait; the first exit code that is not 0."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices_per_process),
        "PYTHONUNBUFFERED": "1",
    }
    address = f"127.0.0.1:{_free_port()}"
    children = []
    for index in range(processes):
        line = [sys.executable, "-m", "braintrace_flax.train", *arguments]
        if processes > 1:
            line += ["--coordinator", address, "--num-processes", str(processes), "--process-id", str(index)]
        children.append(
            subprocess.Popen(
                line,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # signals reach them through us, once
            )
        )

    def pass_on(number: int, frame: Any) -> None:
        del frame
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    former = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        threads = [
            threading.Thread(target=_copy, args=(index, child.stdout, sys.stdout))
            for index, child in enumerate(children)
        ]
        for thread in threads:
            thread.start()
        codes = [child.wait() for child in children]
        for thread in threads:
            thread.join()
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        for child in children:
            child.kill()
            with child:  # closes what it wrote into
                pass
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


def _copy(index: int, lines: Iterable[str], out: TextIO) -> None:
    """Each line with the number of its process, without what Gloo has put before it or in its place."""
    for line in lines:
        own = _GREETING.sub("", line, count=1) if "[Gloo]" in line or "peer ranks" in line else line
        if own:
            out.write(f"[{index}] {own}")
            out.flush()


def _free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return int(any_port.getsockname()[1])


def main(arguments: Sequence[str]) -> int:
    """The command."""
    given = list(arguments)
    if "--help" in given or "-h" in given:
        print(__doc__)
        return 0
    own, rest = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    numbers = {name: 1 for name in _NUMBERS}
    pairs = [word for text in own for word in text.split("=", 1)]
    for name, value in zip(pairs[::2], [*pairs[1::2], ""], strict=False):
        if name not in _NUMBERS or not value.isdecimal() or int(value) < 1:
            print(
                f"error: {name} {value}: write `--processes 2 --devices-per-process 4 -- --config ...`.",
                file=sys.stderr,
            )
            return 2
        numbers[name] = int(value)
    if not rest:
        print(
            "error: What shall they run? Write `-- --config configs/smoke.py --mesh data=8` at the end.",
            file=sys.stderr,
        )
        return 2
    return launch(numbers["--processes"], numbers["--devices-per-process"], rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
