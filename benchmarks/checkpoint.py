"""What saving costs: the time that one `save` blocks, and how much longer a whole run takes with saves.

    python benchmarks/checkpoint.py

The network and the batch are those of examples/digits.py; a call of the train step is one epoch's worth of images.
The second number is the larger one: files are written by the cores that train, and a save waits for the one before it.
"""

import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import optax

import braintrace_flax as braintrace
from braintrace_flax.checkpoint import Checkpoints

ROWS, COLUMNS, CLASSES, UNITS, BATCH, IMAGES = 8, 8, 10, 64, 32, 1438
REPEATS = 10
EPOCHS, EVERY, ROUNDS = 20, (1, 5, 10), 5
TARGET = 0.05


def cell(params, carry, row):
    states, signal = [], row
    for layer, h in zip(params["layers"], carry, strict=True):
        h = jnp.exp(-jnp.exp(layer["decay"])) * h + signal @ layer["into"]
        signal = jax.nn.gelu(h @ layer["mix"] + layer["bias"])
        states.append(h)
    return tuple(states), signal @ params["out"]


def initial(key):
    keys = jax.random.split(key, 5)

    def matrix(i, rows, columns):
        return jax.random.normal(keys[i], (rows, columns)) / jnp.sqrt(rows)

    layers = [
        {
            "decay": jnp.linspace(-3.0, 0.5, UNITS),
            "into": matrix(2 * i, UNITS if i else COLUMNS, UNITS),
            "mix": matrix(2 * i + 1, UNITS, UNITS),
            "bias": jnp.zeros(UNITS),
        }
        for i in range(2)
    ]
    return {"layers": layers, "out": matrix(4, UNITS, CLASSES)}


def main() -> None:
    model = braintrace.compile(cell, jnp.zeros((BATCH, COLUMNS)), params=initial, carry=(jnp.zeros(UNITS),) * 2)
    tx = optax.chain(braintrace.online_grad(model), optax.adam(2e-3))

    @braintrace.train_step(model, tx, window=2)
    def step(outputs, targets):
        return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()

    steps = IMAGES // BATCH * ROWS
    inputs, targets = jax.random.normal(jax.random.key(1), (steps, BATCH, COLUMNS)), jnp.zeros((steps, BATCH), int)
    state = step.init(jax.random.key(0))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    training, blocking, writing = [], [], []
    with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
        for _ in range(REPEATS + 1):
            start = time.perf_counter()
            state, _ = jax.block_until_ready(step(state, inputs, targets))
            trained = time.perf_counter()
            checkpoints.save(state)
            saved = time.perf_counter()
            checkpoints.wait()
            training.append(trained - start)
            blocking.append(saved - trained)
            writing.append(time.perf_counter() - saved)
    one, block, write = (statistics.median(times[1:]) for times in (training, blocking, writing))  # the first compiles
    print(f"state {size / 2**20:.1f} MiB; one epoch ({steps // 2} windows) {1e3 * one:.0f} ms")
    print(f"one save blocks {1e3 * block:.1f} ms, {block / one:.1%} of an epoch; its files take {1e3 * write:.0f} ms")

    def run(every):
        nonlocal state
        with tempfile.TemporaryDirectory() as folder, Checkpoints(folder, every=every) as checkpoints:
            start = time.perf_counter()
            for _ in range(EPOCHS):
                state, _ = step(state, inputs, targets)
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
        print(f"{EPOCHS} epochs, saved every {every}, to the last file: {longer:+.1%} ({verdict} {TARGET:.0%})")


if __name__ == "__main__":
    main()
