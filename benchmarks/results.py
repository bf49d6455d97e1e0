"""What the configs come to: rules against each other on the same task, over seeds.

    python benchmarks/results.py
    python benchmarks/results.py --only digits --seeds 0

Each run is `python -m braintrace_flax.train --config configs/NAME.py` with the settings of its row and `--seed`, in a
folder of its own that is removed. The table has the mean over seeds, the least and the most, of what counts in that
task, and the seconds of a run with compiling and evaluation. Learning rates are each rule's own: see the configs.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from braintrace_flax.runs.records import read_records

ROOT = Path(__file__).parent.parent
LAST = 50  # batches that a training metric is taken over

# What counts, and the settings of each row.
TASKS = {
    "digits": (
        "test accuracy",
        [
            "",
            "--rule bptt --learning_rate 8e-3",
            "--rule tbptt --learning_rate 4e-3",
            "--rule immediate --credit step --learning_rate 4e-3",
        ],
    ),
    "evidence": ("train error", ["", "--rule tbptt --credit window"]),
    "copy": (
        "test accuracy",
        ["", *(f"--rule {rule} --learning_rate 1e-2" for rule in ("pp_prop", "tbptt"))],
    ),
    "match": ("test accuracy", ["", "--rule d_rtrl", "--rule tbptt"]),
    "text": ("test loss", ["", "--rule tbptt", "--rule immediate --credit step"]),
}


def measure(name, settings, seed):
    """The metrics of one run, and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "braintrace_flax.train", "--config", f"configs/{name}.py"]
        command += [*settings.split(), "--seed", str(seed), "--folder", folder, "--quiet"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        began = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - began
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
        records = read_records(Path(folder) / "metrics.jsonl")
    test = [record for record in records if record["kind"] == "test"][-1]
    found = {key.replace("_", " "): value for key, value in test.items() if key.startswith("test")}
    lately = [record for record in records if record["kind"] == "train"][-LAST:]
    if "accuracy" in lately[0]:
        found["train error"] = 1 - float(np.mean([record["accuracy"] for record in lately]))
    return found, seconds


def row(name, settings, metric, runs):
    """A line of the table, of the metrics and seconds of some runs."""
    values = [found[metric] for found, _ in runs]
    spelt = "{:.3f}".format if metric.endswith("loss") else "{:.1%}".format
    seconds = np.mean([seconds for _, seconds in runs])
    command = f"--config configs/{name}.py {settings}".strip()
    return (
        f"| `{command}` | {metric} | {spelt(np.mean(values))} | {spelt(min(values))} .. {spelt(max(values))} "
        f"| {seconds:.0f} |"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS), help="tasks to run")
    parser.add_argument("--rows", default="", help="a regular expression: rows to run, by their settings")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--more", default="", help="settings for all rows: `--more='--steps 3'`")
    args = parser.parse_args()
    print("| python -m braintrace_flax.train | measured | mean | least .. most | seconds |\n|---|---|---|---|---|")
    for name in args.only:
        metric, rows = TASKS[name]
        for settings in rows:
            if re.search(args.rows, settings):
                runs = [measure(name, f"{settings} {args.more}", seed) for seed in args.seeds]
                print(row(name, settings, metric, runs), flush=True)
