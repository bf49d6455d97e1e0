"""Handwritten digits, row by row, learnt online by a two-layer diagonal recurrent network.

Each image is a sequence of eight rows. The parameters are updated after every two rows, in the middle of the image, and
memory does not grow with the sequence: what lies before a window is in the traces. Prints progress, then writes the
learning curve and a checkpoint to `runs/digits`; a second run goes on from the checkpoint.

    python examples/digits.py --epochs 30
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import braintrace_core as braintrace
from braintrace_core.rules import RulePlan, get_rule, online_gradient

ROWS, COLUMNS, CLASSES, UNITS, BATCH = 8, 8, 10, 64, 32

# The command line.
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--rule", default="d_rtrl", help="d_rtrl, pp_prop, tbptt, ...")
parser.add_argument("--window", type=int, default=2, choices=[1, 2, 4, 8], help="rows between two updates")
parser.add_argument("--folder", type=Path, default=Path("runs/digits"))
args = parser.parse_args()

# Data: 1,797 real images that come with scikit-learn; a fifth is held out.
images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))
images = (images[order] / 16.0).reshape(-1, ROWS, COLUMNS).astype(np.float32)
labels = labels[order].astype(np.int32)
held_out = len(images) // 5
test_images, test_labels = images[:held_out], labels[:held_out]
images, labels = images[held_out:], labels[held_out:]


# The model: one step, for one example.
def step(params, carry, row):
    states, signal = [], row
    for layer, h in zip(params["layers"], carry, strict=True):
        h = jnp.exp(-jnp.exp(layer["decay"])) * h + signal @ layer["into"]
        signal = jax.nn.gelu(h @ layer["mix"] + layer["bias"])
        states.append(h)
    return tuple(states), signal @ params["out"]


def matrix(key, rows, columns):
    return jax.random.normal(key, (rows, columns)) / jnp.sqrt(rows)


keys = jax.random.split(jax.random.key(0), 5)
params = {
    "layers": [
        {
            "decay": jnp.linspace(-3.0, 0.5, UNITS),
            "into": matrix(keys[2 * i], COLUMNS if i == 0 else UNITS, UNITS),
            "mix": matrix(keys[2 * i + 1], UNITS, UNITS),
            "bias": jnp.zeros(UNITS),
        }
        for i in range(2)
    ],
    "out": matrix(keys[4], UNITS, CLASSES),
}
carry = (jnp.zeros(UNITS), jnp.zeros(UNITS))

# Compile once: which parameters act on which states.
graph = braintrace.compile_step_graph(step, params, carry, jnp.zeros(COLUMNS))
plan, rule, optimizer = RulePlan.of(graph), get_rule(args.rule), optax.adam(2e-3)
tree = jax.tree.structure(params)


# One batch of images: an update after every window.
@jax.jit
def train(params, opt_state, rows, targets):
    windows = rows.reshape(ROWS // args.window, args.window, *rows.shape[1:])

    def one(state, window):
        params, opt_state, carry, traces = state

        def loss(result):
            each = optax.softmax_cross_entropy_with_integer_labels(
                result.outputs[0], targets[None].repeat(args.window, 0)
            )
            return each.mean(), None

        found = online_gradient(plan, rule, loss, jax.tree.leaves(params), carry, traces, [window])
        updates, opt_state = optimizer.update(jax.tree.unflatten(tree, found.gradients), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, found.states, found.traces), found.value

    start = [jnp.zeros((rows.shape[1], UNITS))] * 2, rule.init(plan, rows.shape[1])
    (params, opt_state, *_), losses = jax.lax.scan(one, (params, opt_state, *start), windows)
    return params, opt_state, losses.mean()


@jax.jit
def accuracy(params, images, labels):
    def one(image):
        return jax.lax.scan(lambda carry, row: step(params, carry, row), carry, image)[1][-1]

    return jnp.mean(jnp.argmax(jax.vmap(one)(images), -1) == labels)


# Start, or go on from the checkpoint.
args.folder.mkdir(parents=True, exist_ok=True)
checkpoint = args.folder / f"{args.rule}-{args.window}.npz"
opt_state, curve = optimizer.init(params), []
if checkpoint.exists():
    saved = np.load(checkpoint)
    leaves, structure = jax.tree.flatten((params, opt_state))
    params, opt_state = jax.tree.unflatten(structure, [jnp.asarray(saved[f"leaf{i}"]) for i in range(len(leaves))])
    curve = saved["curve"].tolist()
    print(f"going on from {checkpoint}, after {len(curve)} epochs")

began = time.perf_counter()
for epoch in range(len(curve), args.epochs):
    shuffled, losses = np.random.default_rng(epoch).permutation(len(images)), []
    for at in range(0, len(images) - BATCH + 1, BATCH):
        chosen = shuffled[at : at + BATCH]
        params, opt_state, value = train(params, opt_state, images[chosen].swapaxes(0, 1), labels[chosen])
        losses.append(value)
    curve.append([float(np.mean(losses)), float(accuracy(params, test_images, test_labels))])
    print(
        f"epoch {epoch + 1:3d}/{args.epochs}   loss {curve[-1][0]:.3f}   held-out accuracy {curve[-1][1]:.1%}",
        flush=True,
    )
print(f"{time.perf_counter() - began:.0f} s")

# Keep what was learnt.
saved = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves((params, opt_state)))}
np.savez(checkpoint, curve=np.asarray(curve), **saved)
figure, axis = plt.subplots(figsize=(6, 4))
axis.plot(range(1, len(curve) + 1), [accuracy for _, accuracy in curve], color="#0969da")
axis.set(xlabel="epoch", ylabel="held-out accuracy", title=f"digits, row by row: {args.rule}, window {args.window}")
axis.grid(alpha=0.3)
figure.savefig(args.folder / "curve.png", dpi=120, bbox_inches="tight")
print(f"curve {args.folder / 'curve.png'}   checkpoint {checkpoint}")
print("again with --epochs 60 goes on; --rule tbptt shows what the traces are worth")
