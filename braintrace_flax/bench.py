"""How fast a config trains, by rule: ``python -m braintrace_flax.bench --config configs/digits.py``."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import jax

from .runs.command import Command, main
from .runs.run import build

__all__: list[str] = []

RULES = ("d_rtrl", "pp_prop", "tbptt", "bptt")


def _bench(command: Command) -> int:
    """Time of a batch and memory of a step, for the config's own rule and some others, taking turns."""
    config = command.config
    runs = {rule: build(replace(config, rule=rule)) for rule in dict.fromkeys((config.rule, *RULES))}
    batch = config.task.batch(0, config.batch_size, seed=config.seed)
    given = (batch.inputs, batch.targets, batch.reset, batch.mask)
    states, least, memory = {}, dict.fromkeys(runs, float("inf")), {}
    for rule, run in runs.items():
        states[rule] = run.step.init(jax.random.key(0))
        memory[rule] = run.step.lower(states[rule], *given).compile().memory_analysis().temp_size_in_bytes
        states[rule], _ = run.step(states[rule], *given)
    for _ in range(5):
        for rule, run in runs.items():
            start = time.perf_counter()
            states[rule], metrics = run.step(states[rule], *given)
            jax.block_until_ready((states[rule], metrics))
            least[rule] = min(least[rule], time.perf_counter() - start)
    print(f"{'rule':24} {'ms a batch':>10} {'to bptt':>8} {'temporary MiB':>14} {'traces MiB':>11}")
    for rule, run in runs.items():
        traces = run.step.settings.rule.bytes(run.model.plan, run.model.examples) / 2**20
        ratio = least[rule] / least["bptt"]
        print(f"{rule:24} {least[rule] * 1e3:10.2f} {ratio:7.2f}x {memory[rule] / 2**20:14.2f} {traces:11.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(_bench, (), __doc__ or ""))
