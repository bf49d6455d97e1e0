"""Digits, pixel by pixel: what are traces worth, and how near do they come to back-propagation?

One network, two layers of linear recurrent units with a short memory at first, is trained with each rule on the same
batches, from the same parameters. The answer is due at the last 8 of 64 pixels, and all but `bptt` update after every 2
pixels: `d_rtrl` knows of the others by its traces, `tbptt` and `immediate` (without traces, each pixel for itself) do
not.

Runs of `configs/digits.py`, which has the same settings, came to a held-out accuracy of 96.7 % with `d_rtrl`, 96.4 %
with `bptt`, 93.5 % with `tbptt`, 90.2 % with `immediate`, each the mean of three seeds; they took four minutes a seed
on 2 cores that did other work too. With a single seed the order of the first two is a matter of chance.

    python examples/digits_lru.py
"""

import argparse
import time

import jax
import optax

from braintrace_flax.runs import LRU, Config, build, evaluate
from braintrace_flax.tasks import Digits

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000, help="batches to train on, for each rule")
parser.add_argument("--units", type=int, default=48)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--rules", nargs="+", default=["d_rtrl", "bptt", "tbptt", "immediate"])
args = parser.parse_args()

BATCH = 32
RATES = {"d_rtrl": 2e-3, "bptt": 8e-3, "tbptt": 4e-3, "immediate": 4e-3}  # those of the table in README
task = Digits(by="pixel")
rows = []
for rule in args.rules:
    config = Config(
        name="digits",
        task=task,
        network=LRU(units=args.units, width=args.units, layers=args.layers, slowest=0.9, fastest=0.3),
        rule=rule,
        credit="step" if rule == "immediate" else "window",
        window=2,  # `bptt` takes the whole image, whatever is said here
        batch_size=BATCH,
        steps=args.steps,
        learning_rate=RATES.get(rule, 4e-3),
        cooldown=1.0,
    )
    run = build(config)
    state = run.step.init(jax.random.key(0))
    traces = optax.tree.get(state.opt_state, "OnlineGradState").traces
    memory = sum(trace.nbytes for trace in traces.values()) / 2**20
    for i in range(args.steps):
        batch = task.batch(i, BATCH)
        state, metrics = run.step(state, batch.inputs, batch.targets, batch.reset, batch.mask)
        if i == 0:
            jax.block_until_ready(state)
            began = time.perf_counter()  # what came before was compilation
        if (i + 1) % max(args.steps // 4, 1) == 0:
            print(f"{rule:<10} step {i + 1:5d}   loss {metrics['loss'][-1]:.3f}", flush=True)
    each = (time.perf_counter() - began) / max(args.steps - 1, 1)
    rows.append((rule, run.step.window, evaluate(run, state.params)["test_accuracy"], memory, 1000 * each))

print(f"\n{'rule':<10} {'window':>6} {'held-out accuracy':>18} {'traces, MiB':>12} {'ms a batch':>11}")
for rule, window, accuracy, memory, each in rows:
    print(f"{rule:<10} {window:>6} {accuracy:>18.1%} {memory:>12.2f} {each:>11.1f}")
best = max(rows, key=lambda row: row[2])
print(f"result: {best[0]} is best, with {best[2]:.1%}")
