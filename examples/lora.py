"""Fine-tuning with LoRA, online: the base network is frozen, two thin matrices beside it learn.

A network is trained on digits, then the left half of each image is inverted: dark on white. Instead of all weights only
a product of rank 4 is trained beside the input weights. Frozen weights have no traces and stay as they are, to the bit.

    python examples/lora.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace_flax as braintrace
from braintrace_flax.tasks import Digits

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000, help="batches to train on, before and after")
args = parser.parse_args()

BATCH, UNITS, RANK = 16, 64, 4
task = Digits(by="row")


def init(key):
    def matrix(key, rows, columns):
        return jax.random.normal(key, (rows, columns)) / jnp.sqrt(rows)

    into, mix, out, low = jax.random.split(key, 4)
    return {
        "base": {
            "into": matrix(into, task.num_inputs, UNITS),
            "decay": jnp.linspace(0.0, 3.0, UNITS),
            "mix": matrix(mix, UNITS, UNITS),
            "out": matrix(out, UNITS, task.num_outputs),
        },
        # One factor is zero, so that at first nothing changes.
        "lora": {
            "B": matrix(low, task.num_inputs, RANK),
            "A": jnp.zeros((RANK, UNITS)),
            "bias": jnp.zeros(UNITS),
        },
    }


def net(params, h, row):
    base, lora = params["base"], params["lora"]
    beside = braintrace.lora_matmul(row, lora["B"], lora["A"], lora["bias"])
    keep = jax.nn.sigmoid(base["decay"])
    h = keep * h + 3 * (1 - keep) * (row @ base["into"] + beside)
    return h, jax.nn.gelu(h @ base["mix"]) @ base["out"]


def loss(outputs, targets):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()


def compiled(frozen):
    return braintrace.compile(
        net, jnp.zeros((BATCH, task.num_inputs)), params=init, carry=jnp.zeros(UNITS), frozen=frozen
    )


def train(name, model, params, of_pixels):
    tx = optax.chain(braintrace.online_grad(model), optax.adam(5e-3))
    step = braintrace.train_step(model, tx, window=2)(loss)
    state = step.init(jax.random.key(1), params=params)
    traces = optax.tree.get(state.opt_state, "OnlineGradState").traces
    print(f"{name}: {sum(trace.nbytes for trace in traces.values()) / 2**10:.0f} KiB of traces")
    for i in range(args.steps):
        batch = task.batch(i, BATCH)
        state, metrics = step(state, of_pixels(batch.inputs), batch.targets, batch.reset, batch.mask)
        if (i + 1) % max(args.steps // 4, 1) == 0:
            print(f"{name}: step {i + 1:4d}   loss {metrics['loss'][-1]:.3f}", flush=True)
    return state.params


def accuracy(model, params, of_pixels):
    @jax.jit
    def correct(inputs, targets, mask):
        _, outputs = jax.lax.scan(lambda carry, x: model.apply(params, carry, x), model.initial_carry(), inputs)
        return jnp.stack([((outputs[-1].argmax(-1) == targets[-1]) * mask[-1]).sum(), mask[-1].sum()])

    batches = task.test_batches(BATCH)
    right, count = sum(np.asarray(correct(of_pixels(b.inputs), b.targets, b.mask)) for b in batches)
    return right / count


def plain(pixels):
    return pixels


def inverted(pixels):
    return np.concatenate([1 - pixels[..., :4], pixels[..., 4:]], axis=-1)


whole = compiled(frozen=["lora"])
base = train("base", whole, init(jax.random.key(0)), plain)
before, broken = accuracy(whole, base, plain), accuracy(whole, base, inverted)

thin = compiled(frozen=["base"])
tuned = train("lora", thin, base, inverted)
assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), base["base"], tuned["base"]))

print(f"base: {before:.1%} of the held-out digits, {broken:.1%} once they are inverted")
print(f"result: {accuracy(thin, tuned, inverted):.1%} of the inverted ones after fine-tuning; the base did not change")
