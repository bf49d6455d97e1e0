"""What saving costs: the time that one `save` blocks, and how much longer a whole run takes with saves.

    python benchmarks/checkpoint.py

The network and the batches are those of configs/digits.py. Blocking is told as a part of one batch (four windows) and
of the 250 batches between two saves of that config; it is to stay below 5 %. How much longer a run takes is the larger
number, since the files are written by the cores that train.
"""

import statistics
import tempfile
import time
from pathlib import Path

import jax

from braintrace_flax.checkpoint import Checkpoints
from braintrace_flax.runs import build, load_config

CONFIG = Path(__file__).parents[1] / "configs" / "digits.py"
REPEATS, BATCHES, EVERY, ROUNDS = 30, 100, (10, 50, 100), 3
TARGET = 0.05


def main() -> None:
    found = build(load_config(CONFIG))
    config, step = found.config, found.step
    batch = config.task.batch(0, config.batch_size)
    given = (batch.inputs, batch.targets, batch.reset, batch.mask)
    state = step.init(jax.random.key(0))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state._replace(key=None)))
    training, blocking, writing = [], [], []
    with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
        for _ in range(REPEATS + 2):
            start = time.perf_counter()
            state, _ = jax.block_until_ready(step(state, *given))
            trained = time.perf_counter()
            checkpoints.save(state)
            saved = time.perf_counter()
            checkpoints.wait()
            training.append(trained - start)
            blocking.append(saved - trained)
            writing.append(time.perf_counter() - saved)
    one, block, write = (statistics.median(times[2:]) for times in (training, blocking, writing))  # the first compile
    between = config.checkpoint_every * one
    print(f"state {size / 2**20:.1f} MiB; one batch ({config.task.steps // config.window} windows) {1e3 * one:.0f} ms")
    print(
        f"one save blocks {1e3 * block:.1f} ms: {block / one:.1%} of a batch, {block / between:.3%} of the "
        f"{config.checkpoint_every} batches between two saves; its files take {1e3 * write:.0f} ms"
    )

    def run(every):
        nonlocal state
        with tempfile.TemporaryDirectory() as folder, Checkpoints(folder, every=every) as checkpoints:
            start = time.perf_counter()
            for _ in range(BATCHES):
                state, _ = step(state, *given)
                if every is not None:
                    checkpoints.save(state)
            checkpoints.wait()
            jax.block_until_ready(state)
            return time.perf_counter() - start

    cases = (None, *EVERY)
    times = {every: [] for every in cases}
    for _ in range(ROUNDS):  # in turn, so that a busy machine slows all of them
        for every in cases:
            times[every].append(run(every))
    plain = statistics.median(times[None])
    for every in EVERY:
        longer = statistics.median(times[every]) / plain - 1
        verdict = "within" if longer < TARGET else "above"
        print(f"{BATCHES} batches, saved every {every}, to the last file: {longer:+.1%} ({verdict} {TARGET:.0%})")


if __name__ == "__main__":
    main()
