"""An operator of one's own, trained online: a matrix product with divisive normalisation.

Each output is divided by what its inputs could have been at most, given its weights. As one function the operator is a
relation with one trace; `register_primitive` needs to be told only which operands train.

    python examples/custom_operator.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace_flax as braintrace
from braintrace_flax.tasks import Digits

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=600, help="batches to train on")
args = parser.parse_args()

BATCH, UNITS = 16, 32
task = Digits(by="row")


def divisive(x, weight, gain):
    return gain * (x @ weight) / (1 + jnp.abs(weight).sum(0))


# It now evaluates, differentiates, batches and lowers like any JAX operation, and the compiler knows it by its name.
divisive_p = braintrace.register_primitive("etp_divisive", divisive, trainable={"weight": 1, "gain": 2})


def init(key):
    into, back, out = jax.random.split(key, 3)
    return {
        "into": jax.random.normal(into, (task.num_inputs, UNITS)),
        "gain": jnp.full(UNITS, 4.0),
        "decay": jnp.linspace(0.0, 3.0, UNITS),
        "mix": jax.random.normal(back, (UNITS, UNITS)) / jnp.sqrt(UNITS),
        "out": jax.random.normal(out, (UNITS, task.num_outputs)) / jnp.sqrt(UNITS),
    }


def net(params, h, row):
    keep = jax.nn.sigmoid(params["decay"])
    h = keep * h + (1 - keep) * divisive_p.bind(row, params["into"], params["gain"])
    return h, jax.nn.gelu(h @ params["mix"]) @ params["out"]


model = braintrace.compile(net, jnp.zeros((BATCH, task.num_inputs)), params=init, carry=jnp.zeros(UNITS))
print(model.report())
tx = optax.chain(braintrace.online_grad(model), optax.adam(5e-3))


@braintrace.train_step(model, tx, window=2)
def step(outputs, targets):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()


state = step.init(jax.random.key(0))

# The recurrence is unit by unit, so the online gradient should be that of back-propagation, for our operator too.
batch = task.batch(0, BATCH)
carry = model.initial_carry()
print(braintrace.check_against_bptt(model, state.params, carry, batch.inputs, batch.targets, loss=step.loss, window=2))


@jax.jit
def correct(params, batch):
    _, outputs = jax.lax.scan(lambda carry, x: model.apply(params, carry, x), model.initial_carry(), batch.inputs)
    return (outputs[-1].argmax(-1) == batch.targets[-1]) * batch.mask[-1]


for i in range(args.steps):
    batch = task.batch(i, BATCH)
    state, metrics = step(state, batch.inputs, batch.targets, batch.reset, batch.mask)
    if (i + 1) % max(args.steps // 6, 1) == 0:
        print(f"step {i + 1:4d}   loss {metrics['loss'][-1]:.3f}", flush=True)

found = [(correct(state.params, batch).sum(), batch.mask[-1].sum()) for batch in task.test_batches(BATCH)]
right, count = np.sum(found, axis=0)
print(f"result: {right / count:.1%} of the held-out digits are right")
