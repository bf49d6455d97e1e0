"""A run from config to result: set up, train, evaluate, checkpoint, and go on where it stopped."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from braintrace_core.rules import BPTT

from ..checkpoint import Checkpoints
from ..model import Model, compile
from ..online_grad import online_grad
from ..state import TrainState
from ..tasks import Batch, Task
from ..train_step import TrainStep, train_step
from .config import Config, ConfigError, parse_rule
from .progress import Reporter
from .records import Records

__all__ = ["Result", "Run", "build", "evaluate", "train"]


class Run(NamedTuple):
    """What a config comes to.

    Attributes:
      config: the config.
      model: the compiled network.
      step: the train step.
      measure: ``measure(params, batch) -> {metric: value}`` of held-out data.
    """

    config: Config
    model: Model
    step: TrainStep
    measure: Callable[[Any, Batch], dict[str, Array]]


class Result(NamedTuple):
    """How a run ended.

    Attributes:
      state: the train state.
      metrics: of the held-out data.
      finished: whether all steps were done.
      seconds: of training.
    """

    state: TrainState
    metrics: dict[str, float]
    finished: bool
    seconds: float


def build(config: Config) -> Run:
    """Compile the network of a config, and its train step."""
    task, rule = config.task, parse_rule(config.rule)
    parts = config.network.build(task.num_inputs, task.num_outputs, task.is_tokens)
    shape = (config.batch_size,) if task.is_tokens else (config.batch_size, task.num_inputs)
    example = jax.ShapeDtypeStruct(shape, jnp.int32 if task.is_tokens else jnp.float32)
    model = compile(parts.step, example, params=parts.init, carry=parts.carry)
    window = config.window or task.steps
    if isinstance(rule, BPTT):
        window = task.steps
    if task.steps % window:
        raise ConfigError(f"`window` of {window} steps does not divide the {task.steps} steps of a batch.")
    rate = config.learning_rate
    schedule = optax.linear_schedule(0.0, rate, config.warmup) if config.warmup else rate
    tx = optax.chain(
        online_grad(model, rule=rule, credit=_credit(config), trace_dtype=config.trace_dtype or None),
        optax.clip_by_global_norm(config.clip) if config.clip else optax.identity(),
        optax.adam(schedule),
    )
    step = train_step(model, tx, window=window)(_loss_of(task))
    return Run(config, model, step, _measure_of(model, task))


def train(run: Run, folder: Path, *, resume: bool = True, quiet: bool = False) -> Result:
    """Train as a config says, in a folder; go on from its newest checkpoint if there is one and ``resume``."""
    config = run.config
    settings = config.as_dict()
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(
        folder / "checkpoints", keep=config.keep, every=config.checkpoint_every or None, config=_compared(settings)
    )
    with contextlib.ExitStack() as exits:
        exits.enter_context(checkpoints)
        state, start = _begin(run, checkpoints, resume)
        (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        records = Records(folder / "metrics.jsonl", start)
        exits.callback(records.close)
        reporter = exits.enter_context(Reporter(config.steps, start, config.log_every, quiet))
        if start:
            reporter.say(f"Going on from step {start}.")
        return _loop(run, state, start, checkpoints, records, reporter)


def _begin(run: Run, checkpoints: Checkpoints, resume: bool) -> tuple[TrainState, int]:
    if resume and checkpoints.latest is not None:
        restored = checkpoints.restore(run.step)
        if restored.config != checkpoints.config:
            changed = [
                f"{name} was {restored.config.get(name)!r} and is {value!r}"
                for name, value in checkpoints.config.items()
                if restored.config.get(name) != value
            ]
            raise ConfigError(
                f"The checkpoint is of another config: {'; '.join(changed)}. Use another folder, or `--fresh`."
            )
        return restored.state, int(restored.data["position"])
    return run.step.init(jax.random.key(run.config.seed)), 0


def _compared(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that a run must share with the checkpoint that it goes on from."""
    free = {"steps", "log_every", "evaluate_every", "checkpoint_every", "keep"}
    return {name: value for name, value in settings.items() if name not in free}


def _loop(
    run: Run, state: TrainState, start: int, checkpoints: Checkpoints, records: Records, reporter: Reporter
) -> Result:
    config, began = run.config, time.perf_counter()
    held_out: dict[str, float] = {}
    waiting: tuple[int, Any, np.ndarray] | None = None
    position, finished = start, True

    def tell(step: int, metrics: Any, weights: np.ndarray) -> None:
        found = jax.device_get(metrics)
        skipped = int(found.pop("skipped").sum())
        values = {name: float(np.average(value, weights=weights)) for name, value in found.items()}
        if skipped:
            reporter.say(f"Step {step}: a window was not finite and left out.")
        records.write(step, "train", {**values, **({"skipped": skipped} if skipped else {})})
        reporter.update(step, {**values, **held_out})

    with ThreadPoolExecutor(1) as ahead:
        coming = _request(ahead, config, position)
        try:
            while position < config.steps:
                batch = coming.result()
                coming = _request(ahead, config, position + 1)
                state, metrics = run.step(state, batch.inputs, batch.targets, batch.reset, batch.mask)
                position += 1
                if waiting is not None:
                    tell(*waiting)  # one step late, so that the device never waits
                waiting = (position, metrics, _weights(batch, run.step.window))
                if config.evaluate_every and position % config.evaluate_every == 0 and position < config.steps:
                    held_out.update(evaluate(run, state.params))
                    records.write(position, "test", held_out)
                checkpoints.save(state, data={"position": position}, force=position == config.steps)
                if checkpoints.reached_preemption():
                    finished = position == config.steps
                    break
        except KeyboardInterrupt:
            finished = False
            checkpoints.save(state, data={"position": position}, force=True)
    if waiting is not None:
        tell(*waiting)
    checkpoints.wait()
    seconds = time.perf_counter() - began
    if not finished:
        reporter.say(f"Stopped after step {position}, saved. Run the same command again to go on.")
        return Result(state, held_out, False, seconds)
    held_out.update(evaluate(run, state.params))
    records.write(position, "test", held_out)
    return Result(state, dict(held_out), True, seconds)


def _weights(batch: Batch, window: int | None) -> np.ndarray:
    """How much each window counts."""
    steps = batch.mask.shape[0]
    return batch.mask.reshape(steps // (window or steps), -1).sum(1) + 1e-12


def _request(pool: ThreadPoolExecutor, config: Config, position: int) -> Future[Batch]:
    return pool.submit(config.task.batch, position, config.batch_size, seed=config.seed)


def evaluate(run: Run, params: Any) -> dict[str, float]:
    """Metrics of the held-out data."""
    totals: dict[str, float] = {}
    weight = 0.0
    for batch in run.config.task.test_batches(run.config.batch_size):
        found = {name: float(value) for name, value in run.measure(params, batch).items()}
        count = found.pop("count")
        weight += count
        for name, value in found.items():
            totals[name] = totals.get(name, 0.0) + value * count
    return {f"test_{name}": value / max(weight, 1.0) for name, value in totals.items()}


def _credit(config: Config) -> Any:
    return config.credit


def _loss_of(task: Task) -> Callable[[Any, Any], Any]:
    if task.kind == "class":

        def loss(outputs: Any, targets: Any) -> Any:
            value = optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()
            return value, {"accuracy": (outputs.argmax(-1) == targets).astype(jnp.float32).mean()}

        return loss
    return lambda outputs, targets: jnp.mean(jnp.square(outputs - targets))


def _measure_of(model: Model, task: Task) -> Callable[[Any, Batch], dict[str, Array]]:
    of_step = _loss_of(task)

    @jax.jit
    def measure(params: Any, inputs: Array, targets: Array, mask: Array) -> dict[str, Array]:
        def at(carry: Any, x: Array) -> tuple[Any, Array]:
            return model.apply(params, carry, x)

        _, outputs = jax.lax.scan(at, model.initial_carry(), inputs)
        alone = jax.vmap(jax.vmap(lambda o, t: of_step(o[None], t[None])))(outputs, targets)
        values = {"loss": alone[0], **alone[1]} if isinstance(alone, tuple) else {"loss": alone}
        count = mask.sum()
        return {
            **{name: (value * mask).sum() / jnp.maximum(count, 1) for name, value in values.items()},
            "count": count,
        }

    return lambda params, batch: measure(params, batch.inputs, batch.targets, batch.mask)
