"""What `train_step` costs beyond the network itself.

    python benchmarks/train_step.py

Prints, each as a ratio measured in one run, contenders taking turns: time of a call against a hand-written jitted,
donated step of the same network (window 1, batch 1; to stay within 1.2x), once of the network alone and once with the
traces, so that what the traces cost and what the call costs are told apart; how often 1,000 calls compiled (once), and
the time of a time step against back-propagation through the whole sequence and against the peer, end to end with the
same optimizer.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import braintrace_flax as braintrace

FEATURES, OUTPUTS = 32, 10


class Net(nn.Module):
    """A GRU with a linear readout."""

    units: int

    @nn.compact
    def __call__(self, carry: Any, x: Any) -> Any:
        carry, y = nn.GRUCell(self.units)(carry, x)
        return carry, nn.Dense(OUTPUTS)(y)

    def initialize_carry(self, key: Any, shape: Any) -> Any:
        del key
        return jnp.zeros((*shape[:-1], self.units))


def loss(outputs: Any, targets: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()


def data(steps: int, batch: int) -> tuple[Any, Any]:
    draws = np.random.default_rng(0)
    inputs = draws.normal(size=(steps, batch, FEATURES)).astype(np.float32)
    return jnp.asarray(inputs), jnp.asarray(draws.integers(OUTPUTS, size=(steps, batch)))


def ours(units: int, batch: int, window: int | None, rule: str = "d_rtrl") -> Any:
    model = braintrace.compile(Net(units), jnp.zeros((batch, FEATURES)))
    tx = optax.chain(braintrace.online_grad(model, rule=rule), optax.adam(1e-3))
    return braintrace.train_step(model, tx, window=window)(loss)


def by_hand(units: int, batch: int) -> tuple[Callable[..., Any], Any]:
    """The same network and optimizer, one step at a time, without anything carried from the past."""
    net, tx = Net(units), optax.adam(1e-3)
    carry = jnp.zeros((batch, units))
    params = net.init(jax.random.key(0), carry, jnp.zeros((batch, FEATURES)))["params"]

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, inputs: Any, targets: Any) -> Any:
        params, carry, opt_state = state

        def value(params: Any) -> Any:
            new, out = net.apply({"params": params}, carry, inputs[0])
            return loss(out, targets[0]), new

        (value_, carry), grads = jax.value_and_grad(value, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), carry, opt_state), value_

    return step, (params, carry, tx.init(params))


def by_hand_online(units: int, batch: int) -> tuple[Callable[..., Any], Any]:
    """A loop of one's own with traces, as the README has it."""
    model = braintrace.compile(Net(units), jnp.zeros((batch, FEATURES)))
    tx = optax.chain(braintrace.online_grad(model), optax.adam(1e-3))

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, inputs: Any, targets: Any) -> Any:
        params, carry, opt_state = state
        (value, carry), grads, window = braintrace.value_and_grad(model, loss)(params, carry, inputs, targets)
        updates, opt_state = tx.update(grads, opt_state, params, online=window)
        return (optax.apply_updates(params, updates), carry, opt_state), value

    params = model.init(jax.random.key(0))
    return step, (params, model.initial_carry(), tx.init(params))


def bptt(units: int, batch: int) -> tuple[Callable[..., Any], Any]:
    """The same through the whole sequence."""
    net, tx = Net(units), optax.adam(1e-3)
    carry = jnp.zeros((batch, units))
    params = net.init(jax.random.key(0), carry, jnp.zeros((batch, FEATURES)))["params"]

    @jax.jit
    def step(state: Any, inputs: Any, targets: Any) -> Any:
        params, carry, opt_state = state

        def value(params: Any) -> Any:
            def at(carry: Any, now: Any) -> Any:
                carry, out = net.apply({"params": params}, carry, now[0])
                return carry, loss(out, now[1])

            new, losses = jax.lax.scan(at, carry, (inputs, targets))
            return losses.mean(), new

        (value_, carry), grads = jax.value_and_grad(value, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), carry, opt_state), value_

    return step, (params, carry, tx.init(params))


def peer(units: int, batch: int) -> Callable[[Any, Any], Any] | None:
    """The peer library end to end, step by step as its documentation shows; None if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import brainstate
            import braintools
            import braintrace as theirs
        except ImportError:
            return None

        class PeerNet(brainstate.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.cell = theirs.nn.GRUCell(FEATURES, units)
                self.out = theirs.nn.Linear(units, OUTPUTS)

            def update(self, x: Any) -> Any:
                return self.out(self.cell(x))

        net = PeerNet()
        learner = theirs.compile(net, "D_RTRL", jnp.zeros((batch, FEATURES)), batch_size=batch)
        optimizer = braintools.optim.Adam(1e-3)
        weights = net.states(brainstate.ParamState)
        optimizer.register_trainable_weights(weights)

        def of_step(x: Any, y: Any) -> Any:
            return loss(learner(x), y)

        @brainstate.transform.jit
        def train(inputs: Any, targets: Any) -> Any:
            grads, values = learner.etrace_grad(inputs, targets, step_fn=of_step, reduction="mean", return_value=True)
            optimizer.step(grads)
            return values

        return train


def least(run: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def in_turns(contenders: dict[str, Callable[[], Any]], rounds: int, repeats: int = 1) -> dict[str, float]:
    """Seconds of each, the median over rounds of the least of some repeats."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    for _ in range(rounds):
        for name, run in contenders.items():
            found[name].append(least(run, repeats))
    return {name: statistics.median(times) for name, times in found.items()}


def looping(step: Callable[..., Any], state: Any, *args: Any) -> Callable[[], Any]:
    """A call that goes on from where the last one ended."""
    kept = [state]

    def run() -> None:
        kept[0], out = step(kept[0], *args)
        jax.block_until_ready((kept[0], out))

    return run


def overhead(units: int, rounds: int) -> None:
    inputs, targets = data(1, 1)
    step = ours(units, 1, 1)
    tbptt = ours(units, 1, 1, rule="tbptt")
    runs = {
        "network by hand": by_hand(units, 1),
        "train_step, tbptt": (tbptt, tbptt.init(jax.random.key(0))),
        "d_rtrl by hand": by_hand_online(units, 1),
        "train_step, d_rtrl": (step, step.init(jax.random.key(0))),
    }
    contenders = {name: looping(run, state, inputs, targets) for name, (run, state) in runs.items()}
    found = in_turns(contenders, rounds, repeats=200)
    print(f"A call, GRU {units}, batch 1, window 1 (train_step to stay within 1.2x of its own by hand):")
    print(f"  {'':24} {'':11}   to network   to d_rtrl by hand")
    for name, seconds in found.items():
        ratios = [seconds / found[other] for other in ("network by hand", "d_rtrl by hand")]
        print(f"  {name:24} {seconds * 1e6:8.1f} us   {ratios[0]:9.2f}x   {ratios[1]:16.2f}x")


def recompilations(units: int) -> None:
    inputs, targets = data(4, 2)
    step = ours(units, 2, 2)
    state = step.init(jax.random.key(0))
    for _ in range(1000):
        state, _ = step(state, inputs, targets)
    print(f"Compilations over 1,000 calls: {step.jitted._cache_size()}")


def end_to_end(units: int, batch: int, steps: int, window: int, rounds: int) -> None:
    inputs, targets = data(steps, batch)
    contenders: dict[str, Callable[[], Any]] = {}
    plain, state = bptt(units, batch)
    contenders["bptt"] = looping(plain, state, inputs, targets)
    for rule in ("d_rtrl", "pp_prop", "tbptt"):
        step = ours(units, batch, window, rule)
        contenders[f"train_step, {rule}"] = looping(step, step.init(jax.random.key(0)), inputs, targets)
    if (train := peer(units, batch)) is not None:
        contenders["peer, D_RTRL"] = lambda: jax.block_until_ready(train(inputs, targets))
    found = in_turns(contenders, rounds)
    print(f"A time step, GRU {units}, batch {batch}, {steps} steps, window {window}, with Adam:")
    for name, seconds in found.items():
        print(f"  {name:24} {seconds / steps * 1e6:8.1f} us   {seconds / found['bptt']:6.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    for units in (8, arguments.units):
        overhead(units, arguments.rounds)
    recompilations(8)
    end_to_end(arguments.units, arguments.batch, arguments.steps, arguments.window, arguments.rounds)


if __name__ == "__main__":
    main()
