"""Delayed match to sample with spiking neurons and pp-prop: was the second stimulus the same as the first?

The network is made of neurons from `braintrace.nn`, as a brainstate module. pp-prop keeps one number for each input and
one for each state of a neuron, instead of one for each weight, so that large spiking networks fit.

    python examples/match_spiking.py
"""

import argparse

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace_flax as braintrace
from braintrace_flax.tasks import DelayedMatch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400, help="batches to train on")
parser.add_argument("--units", type=int, default=64)
args = parser.parse_args()

BATCH, WINDOW = 64, 6
task = DelayedMatch()
for_layer, for_readout = jax.random.split(jax.random.key(0))


class Net(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        # Thresholds that each spike raises remember the sample over the delay.
        neurons = braintrace.nn.ALIF(args.units, tau=10.0, tau_a=100.0, beta=0.1)
        self.layer = braintrace.nn.SpikingLayer(task.num_inputs, neurons, key=for_layer)
        self.readout = braintrace.nn.LeakyRateReadout(args.units, task.num_outputs, tau=5.0, key=for_readout)

    def update(self, x):
        spikes = self.layer(x)
        return self.readout(spikes), spikes


model = braintrace.compile(Net(), jnp.zeros((BATCH, task.num_inputs)))
print(model.report())
tx = optax.chain(braintrace.online_grad(model, rule="pp_prop"), optax.clip_by_global_norm(1.0), optax.adam(5e-3))


@braintrace.train_step(model, tx, window=WINDOW)
def step(outputs, targets):
    answer, spikes = outputs
    right = (answer.argmax(-1) == targets).mean(dtype=jnp.float32)
    value = optax.softmax_cross_entropy_with_integer_labels(answer, targets).mean()
    return value, {"accuracy": right, "rate": spikes.mean()}


@jax.jit
def accuracy(params, batch):
    _, (answers, _) = jax.lax.scan(lambda carry, x: model.apply(params, carry, x), model.initial_carry(), batch.inputs)
    return (answers[-1].argmax(-1) == batch.targets[-1]).mean()


state = step.init(jax.random.key(0))
traces = optax.tree.get(state.opt_state, "OnlineGradState").traces
weights = sum(leaf.size for leaf in jax.tree.leaves(state.params))
kept = sum(trace.size for trace in traces.values()) / BATCH
print(f"{weights:,} weights; {kept:,.0f} numbers in the traces of one example")

for i in range(args.steps):
    batch = task.batch(i, BATCH)
    state, metrics = step(state, batch.inputs, batch.targets, batch.reset, batch.mask)
    if (i + 1) % max(args.steps // 10, 1) == 0:
        # The answer is due in the last window.
        right, rate = metrics["accuracy"][-1], metrics["rate"][-1]
        print(f"step {i + 1:4d}   trials right {right:.1%}   spikes a step {rate:.3f}", flush=True)

found = np.mean([accuracy(state.params, batch) for batch in task.test_batches(BATCH)])
print(f"result: {found:.1%} of the held-out trials are right; a guess is right in 50%")
