"""Train a config: ``python -m braintrace_flax.train --config configs/digits.py --steps 2000 --rule pp_prop``.

Any setting of the config can be given as ``--name value`` (``--network.units 128`` for a part's own). ``--folder`` says
where the run is kept, ``--fresh`` starts anew where there are checkpoints, ``--quiet`` shows no progress.
A run goes on from its newest checkpoint.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from .runs.command import Command, main
from .runs.html import write_report
from .runs.picture import draw_curves
from .runs.run import build, train

__all__: list[str] = []

STOPPED = 75  # the code of a failure that may pass: run again


def _train(command: Command) -> int:
    config, folder = command.config, command.folder
    print(f"{config.name}: {config.rule}, window {config.window or config.task.steps}, in {folder}", flush=True)
    run = build(config)
    if "fresh" in command.switches:
        _remove(folder)
    result = train(run, folder, quiet="quiet" in command.switches)
    if not result.finished:
        return STOPPED
    picture = folder / "curves.png"
    drawn = draw_curves(folder / "metrics.jsonl", picture, f"{config.name} ({config.rule})")
    line = f"python -m braintrace_flax.train {command.text}"
    report = write_report(run, result, folder, line, picture if drawn else None)
    print("  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items()))
    if drawn:
        print(f"learning curve  {picture}")
    print(f"report          {report}")
    print(f"checkpoints     {folder / 'checkpoints'}")
    print("Try next: --rule pp_prop, --rule tbptt (no traces), --window 1; --fresh to start anew.")
    return 0


def _remove(folder: Path) -> None:
    """Remove a run, and nothing else that lies there."""
    if (folder / "checkpoints").exists():
        shutil.rmtree(folder / "checkpoints")
    for name in ("config.json", "curves.png", "metrics.jsonl", "report.html"):
        (folder / name).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(_train, ("fresh", "quiet", "resume"), __doc__ or ""))
