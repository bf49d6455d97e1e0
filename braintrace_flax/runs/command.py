"""The command line of the runner: a config, its overrides, and some switches."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..checkpoint import CheckpointError
from .config import Config, ConfigError, from_texts, load_config, with_overrides
from .processes import Processes, together

__all__ = ["Command", "main", "parse"]

_PROCESSES = tuple(f.name.replace("_", "-") for f in fields(Processes))


@dataclass(frozen=True)
class Command:
    """A parsed command line.

    Attributes:
      config: with its overrides.
      folder: of the run.
      switches: names without values that were given.
      text: the arguments as they were given.
      processes: which of several processes this is.
    """

    config: Config
    folder: Path
    switches: frozenset[str] = frozenset()
    text: str = field(default="")
    processes: Processes = field(default=Processes())


def parse(arguments: Sequence[str], switches: Sequence[str] = ()) -> Command:
    """A command line ``--config FILE [--folder FOLDER] [--SWITCH ...] [--SETTING VALUE ...]``.

    ``--coordinator``, ``--num-processes``, ``--process-id`` and ``--peer-timeout`` make it one of several processes.

    Raises:
      ConfigError: with one line that says what is wrong.
    """
    given, pairs, rest = set(), [], list(arguments)
    while rest:
        name = rest.pop(0)
        if not name.startswith("--"):
            raise ConfigError(f"What is {name!r}? Settings are written `--name value`.")
        name, is_given, value = name.removeprefix("--").partition("=")
        if name in switches:
            if is_given:
                raise ConfigError(f"`--{name}` takes no value.")
            given.add(name)
            continue
        if not is_given:
            if not rest:
                raise ConfigError(f"`--{name}` needs a value.")
            value = rest.pop(0)
        pairs.append((name, value))
    special = {name: value for name, value in pairs if name in ("config", "folder", *_PROCESSES)}
    if "config" not in special:
        raise ConfigError("Which config? Write `--config configs/digits.py`.")
    config = load_config(special["config"])
    config = with_overrides(config, [(name, value) for name, value in pairs if name not in special])
    folder = Path(special.get("folder", Path("runs") / config.name))
    processes = from_texts(Processes, {name: value for name, value in special.items() if name in _PROCESSES})
    return Command(config, folder, frozenset(given), shlex.join(arguments), processes)


def main(run: Callable[[Command], int], switches: Sequence[str], usage: str, arguments: Any = None) -> int:
    """Parse and run; what a user can get wrong is one line and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--help" in arguments or "-h" in arguments:
        print(usage)
        return 0
    try:
        command = parse(arguments, switches)
        with together(command.processes, {**command.config.as_dict(), "folder": str(command.folder)}):
            return run(command)
    except (CheckpointError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130  # as shells have it
