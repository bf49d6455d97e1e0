"""Copy a row of symbols after a delay, with a GRU: one task, several rules.

The symbols that are asked for came long before the window in which the answer is due, so truncated back-propagation
alone never sees why it was wrong. With a GRU's recurrent weights the traces are an approximation, which is enough.

    python examples/copy_gru.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import braintrace_flax as braintrace
from braintrace_flax.tasks import Copy

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=500, help="batches to train on, for each rule")
parser.add_argument("--units", type=int, default=64)
parser.add_argument("--rules", nargs="+", default=["d_rtrl", "pp_prop", "tbptt"])
args = parser.parse_args()

BATCH, WINDOW = 32, 4
task = Copy(symbols=4, length=4, delay=8)


class Net(nn.Module):
    @nn.compact
    def __call__(self, carry, x):
        carry, h = nn.GRUCell(args.units)(carry, x)
        return carry, nn.Dense(task.num_outputs)(h)


model = braintrace.compile(Net(), jnp.zeros((BATCH, task.num_inputs)), carry=jnp.zeros(args.units))


def loss(outputs, targets):
    right = (outputs.argmax(-1) == targets).mean(dtype=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean(), {"accuracy": right}


rows = []
for rule in args.rules:
    tx = optax.chain(braintrace.online_grad(model, rule=rule), optax.clip_by_global_norm(1.0), optax.adam(5e-3))
    step = braintrace.train_step(model, tx, window=WINDOW)(loss)
    state = step.init(jax.random.key(0))  # the same parameters for every rule
    traces = optax.tree.get(state.opt_state, "OnlineGradState").traces
    memory = sum(trace.nbytes for trace in traces.values()) / 2**10
    lately = []
    for i in range(args.steps):
        batch = task.batch(i, BATCH)  # new symbols every time: what it gets right, it has not seen before
        state, metrics = step(state, batch.inputs, batch.targets, batch.reset, batch.mask)
        lately = [*lately[-19:], metrics["accuracy"][-1]]  # the answer is due in the last window
        if (i + 1) % max(args.steps // 5, 1) == 0:
            print(f"{rule:<8} step {i + 1:5d}   symbols right {np.mean(lately):.1%}", flush=True)
    rows.append((rule, np.mean(lately), memory))

print(f"\n{'rule':<8} {'symbols right':>14} {'traces, KiB':>12}")
for rule, right, memory in rows:
    print(f"{rule:<8} {right:>14.1%} {memory:>12.1f}")
best = max(rows, key=lambda row: row[1])
print(f"result: {best[0]} copies best, {best[1]:.1%} of the symbols; a guess is right in 25%")
