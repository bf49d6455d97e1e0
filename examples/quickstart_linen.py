"""Digits, row by row, learnt online by a GRU in Flax Linen.

An image comes as eight rows, one a time step, and the parameters are updated after every two of them. The loss is taken
at the last two rows only: what the first six have to do with it is in the traces.

    python examples/quickstart_linen.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import braintrace_flax as braintrace
from braintrace_flax.tasks import Digits

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000, help="batches to train on")
args = parser.parse_args()

BATCH, UNITS = 32, 64
task = Digits(by="row")


class Net(nn.Module):
    """One time step: an ordinary module, nothing in it knows of traces."""

    @nn.compact
    def __call__(self, carry, x):
        carry, h = nn.GRUCell(UNITS)(carry, x)
        return carry, nn.Dense(task.num_outputs)(h)


model = braintrace.compile(Net(), jnp.zeros((BATCH, task.num_inputs)), carry=jnp.zeros(UNITS))
tx = optax.chain(braintrace.online_grad(model, rule="d_rtrl"), optax.adam(2e-3))


@braintrace.train_step(model, tx, window=2)
def step(outputs, targets):  # the loss of one time step
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()


@jax.jit
def correct(params, batch):
    _, outputs = jax.lax.scan(lambda carry, x: model.apply(params, carry, x), model.initial_carry(), batch.inputs)
    return (outputs[-1].argmax(-1) == batch.targets[-1]) * batch.mask[-1]  # the mask leaves out what fills a batch up


def accuracy(params):
    found = [(correct(params, batch).sum(), batch.mask[-1].sum()) for batch in task.test_batches(BATCH)]
    right, count = np.sum(found, axis=0)
    return right / count


state = step.init(jax.random.key(0))
for i in range(args.steps):
    batch = task.batch(i, BATCH)
    # `reset` is true at the first row of each image, and clears carry and traces there.
    state, metrics = step(state, batch.inputs, batch.targets, batch.reset, batch.mask)
    if (i + 1) % max(args.steps // 10, 1) == 0:
        # One loss for each of the four windows; only the last has an answer in it.
        print(f"step {i + 1:5d}   loss {metrics['loss'][-1]:.3f}   held-out accuracy {accuracy(state.params):.1%}")

print(f"result: {accuracy(state.params):.1%} of the held-out digits are right")
