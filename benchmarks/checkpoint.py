"""How long a save holds up training: the time that `save` blocks, against the training between two saves.

    python benchmarks/checkpoint.py

The network and the batch are those of examples/digits.py; a call of the train step is one epoch's worth of images.
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
    print(f"a save blocks {1e3 * block:.1f} ms and writes for {1e3 * write:.0f} ms beside the training")
    epochs = block / TARGET / one
    print(
        f"blocked: {block / one:.1%} when saving every epoch; below {TARGET:.0%} when every {epochs:.1f} epochs or more"
    )


if __name__ == "__main__":
    main()
