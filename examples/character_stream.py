"""A character model on an endless stream: it never resets, never waits, and its memory never grows.

Sixteen readers go through a text, each from its own place, and predict the next character. The parameters are updated
after every 16 characters, for as long as one likes. The state of the training has the same size after a million
characters as at the start: what lies before a window is in the carry and in the traces.

    python examples/character_stream.py
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace_flax as braintrace
from braintrace_flax.runs import LRU
from braintrace_flax.tasks import Text

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=600, help="pieces of 64 characters for each reader")
parser.add_argument("--units", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--file", help="a text in UTF-8; by default the reference that Python's own help() shows")
args = parser.parse_args()

BATCH, WINDOW = 16, 16
task = Text(length=64, file=args.file)
network = LRU(units=args.units, width=args.units, layers=args.layers)
parts = network.build(task.num_inputs, task.num_outputs, tokens=True)
model = braintrace.compile(parts.step, jnp.zeros(BATCH, jnp.int32), params=parts.init, carry=parts.carry)
tx = optax.chain(braintrace.online_grad(model), optax.clip_by_global_norm(1.0), optax.adam(3e-3))


@braintrace.train_step(model, tx, window=WINDOW)
def step(outputs, targets):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()


def size(state):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 2**20


state = step.init(jax.random.key(0))
lately = []
for i in range(args.steps):
    batch = task.batch(i, BATCH)  # goes on where the last one stopped: there is no `reset`
    state, metrics = step(state, batch.inputs, batch.targets)
    lately = [*lately[-19:], metrics["loss"].mean()]
    if i == 0:
        jax.block_until_ready(state)
        began = time.perf_counter()  # what came before was compilation
    if (i + 1) % max(args.steps // 10, 1) == 0:
        bits, piece = np.mean(lately) / np.log(2), task.steps * BATCH
        read, speed = (i + 1) * piece, i * piece / (time.perf_counter() - began)
        print(
            f"{read:9,} characters   {bits:.2f} bits each   state {size(state):.2f} MiB   {speed:,.0f} a second",
            flush=True,
        )


# The same step as a reader of one text, which then goes on by itself.
@jax.jit
def write(params, tokens, key):
    def read(carry, token):
        return parts.step(params, carry, token)

    def speak(state, key):
        carry, token = state
        carry, out = parts.step(params, carry, token)
        token = jax.random.categorical(key, 2 * out).astype(jnp.int32)  # doubled: bolder
        return (carry, token), token

    carry, _ = jax.lax.scan(read, parts.carry, tokens[:-1])
    return jax.lax.scan(speak, (carry, tokens[-1]), jax.random.split(key, 120))[1]


start = "The "
print(f"it writes: {start + task.decode(write(state.params, task.encode(start), jax.random.key(1)))!r}")
bits, alike = np.mean(lately) / np.log(2), np.log2(task.num_outputs)
print(f"result: {bits:.2f} bits a character; if all came alike, {alike:.2f}")
