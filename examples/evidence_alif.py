"""Evidence accumulation with spiking neurons and e-prop: no back-propagation through time at all.

Cues come on the left and on the right, and after a delay the network has to say which side had more. Half of the
neurons have thresholds that adapt: each spike raises them for hundreds of steps, and that is the network's memory.
Errors reach the neurons through the readout's own weights (symmetric), or through random weights that never change and
know nothing of the readout, as they might in a brain.

    python examples/evidence_alif.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace_flax as braintrace
from braintrace_flax.runs.networks import spike
from braintrace_flax.tasks import EvidenceAccumulation

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=150, help="batches to train on, for each kind of feedback")
parser.add_argument("--units", type=int, default=60)
parser.add_argument("--cues", type=int, default=5, help="how many there are to count, an odd number")
args = parser.parse_args()

BATCH = 64
task = EvidenceAccumulation(cues=args.cues)
raised = jnp.where(
    jnp.arange(args.units) % 2 == 0, 0.01, 0.0
)  # of the threshold, by a spike: every other neuron adapts


def init(key):
    def matrix(key, rows, columns):
        return jax.random.normal(key, (rows, columns)) / jnp.sqrt(rows)

    first, second, third = jax.random.split(key, 3)
    return {
        "in": matrix(first, task.num_inputs, args.units),
        "back": matrix(second, args.units, args.units),
        "out": matrix(third, args.units, task.num_outputs),
    }


def neurons(params, carry, x):
    """One step of one example: membranes, raised thresholds, and spikes as the readout sees them."""
    v, a, trail = carry
    z = spike(v - 1 - a)
    v = 0.9 * v + x @ params["in"] + z @ params["back"] - jax.lax.stop_gradient(z)
    a = 0.995 * a + raised * z
    # A readout that leaks is a readout of spikes that leak. This way the leak has a trace of its own in every neuron,
    # and the readout is a plain product, whose way back can be replaced by a random one.
    trail = 0.9 * trail + spike(v - 1 - a)
    return (v, a, trail), trail @ params["out"]


silent = jnp.zeros(args.units)
model = braintrace.compile(neurons, jnp.zeros((BATCH, task.num_inputs)), params=init, carry=(silent, silent, silent))


def loss(outputs, targets):
    right = (outputs.argmax(-1) == targets).mean(dtype=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean(), {"accuracy": right}


@jax.jit
def measure(params, batch):
    """How many of the answers are right, and how often a neuron spikes."""

    def at(carry, x):
        carry, out = model.apply(params, carry, x)
        v, a, _ = carry
        return carry, (out, (v > 1 + a).mean())

    _, (outputs, rate) = jax.lax.scan(at, model.initial_carry(), batch.inputs)
    return (outputs[-1].argmax(-1) == batch.targets[-1]).mean(), rate.mean()


rows = []
for feedback in ("symmetric", "random"):
    rule = braintrace.rules.EProp(feedback=feedback)
    tx = optax.chain(
        braintrace.online_grad(model, rule=rule, credit="step"), optax.clip_by_global_norm(1.0), optax.adam(5e-3)
    )
    step = braintrace.train_step(model, tx)(loss)  # one update a trial, at its end
    state = step.init(jax.random.key(0))
    lately = []
    for i in range(args.steps):
        batch = task.batch(i, BATCH)
        state, metrics = step(state, batch.inputs, batch.targets, batch.reset, batch.mask)
        lately = [*lately[-19:], metrics["accuracy"][0]]
        if (i + 1) % max(args.steps // 6, 1) == 0:
            print(f"{feedback:<9} step {i + 1:4d}   trials right {np.mean(lately):.1%}", flush=True)
    found = np.mean([measure(state.params, batch) for batch in task.test_batches(BATCH)], axis=0)
    rows.append((feedback, *found))

print(f"\n{'feedback':<9} {'held-out trials right':>22} {'spikes a step':>14}")
for feedback, accuracy, rate in rows:
    print(f"{feedback:<9} {accuracy:>22.1%} {rate:>14.3f}")
print(f"result: {rows[0][1]:.1%} with symmetric feedback, {rows[1][1]:.1%} with random; a guess is right in 50%")
