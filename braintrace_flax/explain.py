"""What the compiler found in a config's network: ``python -m braintrace_flax.explain --config configs/digits.py``."""

from __future__ import annotations

import sys

from .runs.command import Command, main
from .runs.run import build

__all__: list[str] = []


def _explain(command: Command) -> int:
    run = build(command.config)
    print(run.model)
    print(run.model.report())
    command.folder.mkdir(parents=True, exist_ok=True)
    run.model.draw(command.folder / "graph.svg")
    print(f"picture: {command.folder / 'graph.svg'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(_explain, (), __doc__ or ""))
