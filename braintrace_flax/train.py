"""Train a config: ``python -m braintrace_flax.train --config configs/digits.py --steps 2000 --rule pp_prop``.

Any setting of the config can be given as ``--name value`` (``--network.units 128`` for a part's own). ``--folder`` says
where the run is kept, ``--fresh`` starts anew where there are checkpoints, ``--quiet`` shows no progress,
``--tensorboard`` writes the metrics for TensorBoard too.
A run goes on from its newest checkpoint.

On several machines the same command is given on each, with ``--coordinator HOST:PORT`` (the address of the first),
``--num-processes N`` and ``--process-id I``; ``--coordinator auto`` asks the cluster. ``--peer-timeout`` is how many
seconds a process may be missing. ``python -m braintrace_flax.launch`` starts several on this machine.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from jax.experimental import multihost_utils

from .runs.command import Command, main
from .runs.html import write_report
from .runs.picture import draw_curves
from .runs.processes import is_first
from .runs.run import build, train
from .runs.watch import AGAIN

__all__: list[str] = []


def _train(command: Command) -> int:
    config, folder = command.config, command.folder
    if is_first():
        on = f" on {config.mesh}" if config.mesh else ""
        print(f"{config.name}: {config.rule}, window {config.window or config.task.steps}{on}, in {folder}", flush=True)
    run = build(config)
    if "fresh" in command.switches:
        if is_first():
            _remove(folder)
        multihost_utils.sync_global_devices("removed")
    result = train(run, folder, quiet="quiet" in command.switches, tensorboard="tensorboard" in command.switches)
    if not result.finished:
        return AGAIN
    if not is_first():
        return 0
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
    for name in ("checkpoints", "tensorboard"):
        if (folder / name).exists():
            shutil.rmtree(folder / name)
    for name in ("config.json", "curves.png", "metrics.jsonl", "report.html"):
        (folder / name).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(_train, ("fresh", "quiet", "resume", "tensorboard"), __doc__ or ""))
