"""A training loop of one's own, twice: with Optax alone, and with `nnx.Optimizer`.

`value_and_grad` gives the ordinary gradients of a window and the window itself; `online_grad`, in the optimizer, adds
what lies before the window. The rest of the loop is what it always was. Both loops here come to the same parameters.

    python examples/own_loop.py
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import braintrace_flax as braintrace
from braintrace_flax.tasks import Adding

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400, help="batches to train on")
args = parser.parse_args()

BATCH, UNITS, WINDOW = 32, 32, 5
task = Adding(length=20)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.cell = nnx.GRUCell(task.num_inputs, UNITS, rngs=rngs)
        self.out = nnx.Linear(UNITS, task.num_outputs, rngs=rngs)

    def __call__(self, carry, x):
        carry, h = self.cell(carry, x)
        return carry, self.out(h)


def loss(outputs, targets):
    return jnp.mean((outputs - targets) ** 2)


net = Net(nnx.Rngs(0))
model = braintrace.compile(net, jnp.zeros((BATCH, task.num_inputs)), carry=jnp.zeros(UNITS))
tx = optax.chain(braintrace.online_grad(model), optax.clip_by_global_norm(1.0), optax.adam(3e-3))
grad_of_window = braintrace.value_and_grad(model, loss, reduction="mean")


def windows(batch):
    """A batch in pieces of WINDOW steps."""
    for first in range(0, task.steps, WINDOW):
        yield jax.tree.map(lambda leaf, first=first: leaf[first : first + WINDOW], batch)


def progress(i, value):
    if (i + 1) % max(args.steps // 8, 1) == 0:
        print(f"step {i + 1:4d}   squared error {value:.4f}", flush=True)


# With Optax alone: parameters, carry and optimizer state go round.
@jax.jit
def update(params, carry, opt_state, window):
    inputs, targets, mask, reset = window
    (value, carry), grads, seen = grad_of_window(params, carry, inputs, targets, reset, mask)
    updates, opt_state = tx.update(grads, opt_state, params, online=seen)
    return optax.apply_updates(params, updates), carry, opt_state, value


params, carry = model.init(jax.random.key(0)), model.initial_carry()
opt_state = tx.init(params)
print("Optax")
for i in range(args.steps):
    batch = task.batch(i, BATCH)
    for window in windows((batch.inputs, batch.targets, batch.mask, batch.reset)):
        params, carry, opt_state, value = update(params, carry, opt_state, window)
    progress(i, value)  # of the last window: the sum is asked for at the last step


# With NNX: the module holds the parameters, the optimizer its state; only the carry is passed.
@nnx.jit
def update_module(net, optimizer, carry, window):
    inputs, targets, mask, reset = window
    (value, carry), grads, seen = grad_of_window(nnx.state(net, nnx.Param), carry, inputs, targets, reset, mask)
    optimizer.update(net, grads, online=seen)
    return carry, value


optimizer, carry = nnx.Optimizer(net, tx, wrt=nnx.Param), model.initial_carry()
print("nnx.Optimizer")
for i in range(args.steps):
    batch = task.batch(i, BATCH)
    for window in windows((batch.inputs, batch.targets, batch.mask, batch.reset)):
        carry, value_of_module = update_module(net, optimizer, carry, window)
    progress(i, value_of_module)

apart = max(jnp.abs(a - b).max() for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(nnx.state(net)), strict=True))
print(f"largest difference between the two: {apart:.1e}")
print(f"result: a squared error of {value:.4f}; who always answers 1 has {1 / 6:.4f}")
