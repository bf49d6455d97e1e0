"""Kill a run at random moments and go on, again and again: the result is that of a run left in peace, to the bit.

python benchmarks/kill_and_resume.py --kills 50
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from braintrace_flax.runs.config import load_config
from braintrace_flax.runs.run import build, open_checkpoints, restore
from braintrace_flax.storage import UNFINISHED

ROOT = Path(__file__).parent.parent
CONFIG = """
from braintrace_flax.runs import LRU, Config
from braintrace_flax.tasks import Copy

config = Config(
    name="killed", task=Copy(symbols=2, length=1, delay=2), network=LRU(units=2, width=2, layers=1), window=2,
    batch_size=2, steps={steps}, evaluate_every=5, checkpoint_every=2,
)
"""


def start(config: Path, folder: Path) -> subprocess.Popen:
    """The run in a process of its own; what one has compiled the next need not."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(config.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, "-m", "braintrace_flax.train", "--config", str(config), "--folder", str(folder)]
    return subprocess.Popen([*command, "--quiet"], env=environment, stdout=subprocess.DEVNULL)


def names(folder: Path) -> set[str]:
    """What is among the checkpoints, whole or not."""
    return {path.name for path in folder.glob("checkpoints/*")}


def kill(process: subprocess.Popen, folder: Path, rng: random.Random) -> bool:
    """Kill the process, mostly while it trains; whether it was still there."""
    before = names(folder)
    if rng.random() < 0.8:  # else at any moment, while it starts too
        while process.poll() is None and names(folder) <= before:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.5))
    else:
        time.sleep(rng.uniform(0, 5))
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def outcome(config: Path, folder: Path) -> tuple[list[bytes], bytes]:
    """The bits of the parameters, optimizer, traces and carry, and the file of metrics."""
    found = load_config(config)
    with open_checkpoints(found, folder) as checkpoints:
        state = restore(build(found), checkpoints).state
    plain = state._replace(key=jax.random.key_data(state.key))
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(plain)]
    return leaves, (folder / "metrics.jsonl").read_bytes()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    given = parser.parse_args()
    rng, began = random.Random(given.seed), time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        config = Path(place) / "killed.py"
        config.write_text(CONFIG.format(steps=given.steps))
        if start(config, Path(place) / "peace").wait():
            raise SystemExit("The run that was left in peace failed.")
        expected = outcome(config, Path(place) / "peace")
        kills, saving, same, chains = 0, 0, 0, 0
        while kills < given.kills:
            folder, chains = Path(place) / str(chains), chains + 1
            while kills < given.kills and kill(start(config, folder), folder, rng):
                kills += 1
                saving += any(UNFINISHED in name for name in names(folder))
            if start(config, folder).wait():
                print("A run that went on failed.")
                continue
            found = outcome(config, folder)
            parts = [name for name, a, b in zip(("state", "metrics"), found, expected, strict=True) if a != b]
            same += not parts
            if parts:
                print(f"Another {' and '.join(parts)} than in peace.")
    print(f"{kills} kills, {saving} of them during a save, of {chains} runs in {time.perf_counter() - began:.0f} s")
    print(f"{same} of {chains} runs ended with the same bits as the run that was left in peace")
    return int(same != chains)


if __name__ == "__main__":
    sys.exit(main())
