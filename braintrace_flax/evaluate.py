"""Evaluate the newest checkpoint of a run: ``python -m braintrace_flax.evaluate --config configs/digits.py``."""

from __future__ import annotations

import sys

from .runs.command import Command, main
from .runs.config import ConfigError
from .runs.run import build, evaluate, open_checkpoints, restore

__all__: list[str] = []


def _evaluate(command: Command) -> int:
    with open_checkpoints(command.config, command.folder) as checkpoints:
        if checkpoints.latest is None:
            raise ConfigError(f"There is no checkpoint in {command.folder}: train first.")
        run = build(command.config)
        restored = restore(run, checkpoints)
    found = evaluate(run, restored.state.params)
    print(f"step {restored.data['position']}  " + "  ".join(f"{name} {value:.4f}" for name, value in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(_evaluate, (), __doc__ or ""))
