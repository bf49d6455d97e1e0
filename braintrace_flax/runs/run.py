"""A run from config to result: set up, train, evaluate, checkpoint, and go on where it stopped."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from braintrace_core.rules import BPTT

from ..checkpoint import CheckpointDamaged, Checkpoints, Restored
from ..explicit import on_any_mesh, sharding_of
from ..fingerprint import describe
from ..mesh import MeshKind, make_mesh
from ..model import Model, compile
from ..online_grad import online_grad
from ..preemption import Preemption
from ..restoring import read_manifest
from ..state import TrainState
from ..tasks import Batch, Task
from ..train_step import TrainStep, train_step
from .board import Board
from .config import Config, ConfigError, parse_rule
from .interrupt import interrupt
from .placing import placed, read
from .processes import agree, is_first
from .progress import Reporter
from .records import Records

__all__ = ["Result", "Run", "build", "evaluate", "open_checkpoints", "restore", "train"]


class Run(NamedTuple):
    """What a config comes to.

    Attributes:
      config: the config.
      model: the compiled network.
      step: the train step.
      measure: ``measure(params, carry, batch) -> (carry, {metric: value})`` of held-out data.
      mesh: the devices; None for one.
    """

    config: Config
    model: Model
    step: TrainStep
    measure: Callable[[Any, Any, Batch], tuple[Any, dict[str, Array]]]
    mesh: Mesh | None = None


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


def build(config: Config, mesh: Mesh | None = None) -> Run:
    """Compile the network of a config, and its train step, for its own mesh or the one given."""
    mesh = mesh or make_mesh(config.mesh, cast(MeshKind, config.mesh_kind))
    if mesh is None and jax.process_count() > 1:
        raise ConfigError(f"Several processes need a mesh: `--mesh data={jax.device_count()}` divides the batch.")
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
    tx = optax.chain(
        online_grad(model, rule=rule, credit=_credit(config), trace_dtype=config.trace_dtype or None),
        optax.clip_by_global_norm(config.clip) if config.clip else optax.identity(),
        optax.adam(_rate(config, task.steps // window)),
    )
    step = train_step(model, tx, window=window)(_loss_of(task))
    if mesh is not None:
        step = step.sharded(mesh, config.sharding)
    agree("compiled graph", describe(jax.eval_shape(step.tx.init, model.params_shape)))
    return Run(config, model, step, _measure_of(step, task), mesh)


def train(run: Run, folder: Path, *, resume: bool = True, quiet: bool = False, tensorboard: bool = False) -> Result:
    """Train as a config says, in a folder; go on from its newest checkpoint if there is one and ``resume``.

    With ``tensorboard`` the metrics are written into ``<folder>/tensorboard`` too.
    """
    config = run.config
    with contextlib.ExitStack() as exits:
        if run.mesh is not None:
            exits.enter_context(jax.set_mesh(run.mesh))
        checkpoints = exits.enter_context(open_checkpoints(config, folder))
        state, start = run.step.init(jax.random.key(config.seed)), 0
        if resume and checkpoints.latest is not None:
            restored = restore(run, checkpoints)
            state, start = restored.state, int(restored.data["position"])
        if is_first():
            (folder / "config.json").write_text(json.dumps(config.as_dict(), indent=2) + "\n", encoding="utf-8")
        board = Board(folder / "tensorboard", start) if tensorboard and is_first() else None
        records = Records(folder / "metrics.jsonl" if is_first() else None, start, board)
        exits.callback(records.close)
        stream = None if is_first() else exits.enter_context(Path(os.devnull).open("w"))
        reporter = exits.enter_context(Reporter(config.steps, start, config.log_every, quiet, stream))
        if start:
            reporter.say(f"Going on from step {start}.")
        interrupted = exits.enter_context(interrupt())
        return _loop(run, state, start, checkpoints, records, reporter, interrupted)


def open_checkpoints(config: Config, folder: Path) -> Checkpoints:
    """The checkpoints of a run."""
    never = sys.maxsize  # the last step is saved whatever this says
    return Checkpoints(
        folder / "checkpoints",
        keep=config.keep,
        every=config.checkpoint_every or never,
        config=_compared(config.as_dict()),
    )


def restore(run: Run, checkpoints: Checkpoints) -> Restored:
    """The newest checkpoint of a run, which must be of the same config."""
    saved, wanted = checkpoints.config, checkpoints.config
    with contextlib.suppress(CheckpointDamaged):  # of which `restore` has more to say
        saved = read_manifest(checkpoints.directory / str(checkpoints.latest)).config
    if saved != wanted:
        changed = [
            f"{name} was {saved.get(name)!r} and is {wanted.get(name)!r}"
            for name in {**saved, **wanted}
            if saved.get(name) != wanted.get(name)
        ]
        raise ConfigError(
            f"The checkpoint is of another config: {'; '.join(changed)}. Use another folder, or `--fresh`."
        )
    return checkpoints.restore(run.step)


def _compared(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that a run must share with the checkpoint that it goes on from, as JSON brings them back."""
    free = {"log_every", "evaluate_every", "checkpoint_every", "keep", "mesh", "mesh_kind", "sharding"}
    if not settings["cooldown"]:  # which ends at the last
        free.add("steps")
    return json.loads(json.dumps({name: value for name, value in settings.items() if name not in free}))


def _loop(
    run: Run,
    state: TrainState,
    start: int,
    checkpoints: Checkpoints,
    records: Records,
    reporter: Reporter,
    interrupted: Preemption,
) -> Result:
    config, began = run.config, time.perf_counter()
    held_out: dict[str, float] = {}
    waiting: tuple[int, Any, np.ndarray] | None = None
    position, stopped = start, False

    def tell() -> None:
        nonlocal waiting
        if waiting is None:
            return
        (step, metrics, weights), waiting = waiting, None
        found = jax.device_get(metrics)
        skipped = int(found.pop("skipped").sum())
        values = {name: float(np.average(value, weights=weights)) for name, value in found.items()}
        if skipped:
            reporter.say(f"Step {step}: a window was not finite and left out.")
        records.write(step, "train", {**values, **({"skipped": skipped} if skipped else {})})
        reporter.update(step, {**values, **held_out})

    with ThreadPoolExecutor(1) as ahead:
        coming = _request(ahead, run, position)
        while True:
            if position >= config.steps or (position and _is_due(position, config.evaluate_every)):
                tell()
                held_out = evaluate(run, state.params)
                records.write(position, "test", held_out)
            if position >= config.steps:
                break
            batch, weights = coming.result()
            coming = _request(ahead, run, position + 1)
            state, metrics = run.step(state, batch.inputs, batch.targets, batch.reset, batch.mask)
            position += 1
            tell()  # one step late, so that the device never waits
            waiting = (position, metrics, weights)
            stop = bool(interrupted) or checkpoints.reached_preemption() or position == config.steps
            if stop or _is_due(position, config.checkpoint_every):
                tell()  # before the checkpoint is there: a run that goes on from it writes later lines only
            saved = checkpoints.save(state, data={"position": position}, force=stop)
            if saved and (interrupted or checkpoints.reached_preemption()):
                stopped = position < config.steps
                if stopped:
                    break
    tell()
    checkpoints.wait()
    seconds = time.perf_counter() - began
    if stopped:
        reporter.say(f"Stopped after step {position}, saved. Run the same command again to go on.")
    return Result(state, held_out, not stopped, seconds)


def _is_due(position: int, every: int) -> bool:
    return bool(every) and position % every == 0


def _weights(batch: Batch, window: int | None) -> np.ndarray:
    """How much each window counts."""
    steps = batch.mask.shape[0]
    return batch.mask.reshape(steps // (window or steps), -1).sum(1) + 1e-12


def _request(pool: ThreadPoolExecutor, run: Run, position: int) -> Future[tuple[Batch, np.ndarray]]:
    config = run.config

    def get() -> tuple[Batch, np.ndarray]:
        batch, here = read(config.task, position, config.batch_size, config.seed, run.mesh)
        return batch, _weights(here, run.step.window)

    return pool.submit(get)


def evaluate(run: Run, params: Any) -> dict[str, float]:
    """Metrics of the held-out data."""
    totals: dict[str, float] = {}
    weight, carry = 0.0, run.model.initial_carry()  # streams go on from batch to batch
    if run.step.shardings is not None:
        carry = jax.jit(run.model.initial_carry, out_shardings=run.step.shardings.carry)()
    for batch in run.config.task.test_batches(run.config.batch_size):
        carry, values = run.measure(params, carry, placed(batch, run.mesh))
        found = {name: float(value) for name, value in values.items()}
        count = found.pop("count")
        weight += count
        for name, value in found.items():
            totals[name] = totals.get(name, 0.0) + value * count
    return {f"test_{name}": value / max(weight, 1.0) for name, value in totals.items()}


def _rate(config: Config, updates: int) -> Any:
    """The learning rate by the count of updates, of which there are so many a batch."""
    first, all_of = config.warmup * updates, config.steps * updates
    last = round(config.cooldown * all_of)
    if not first and not last:
        return config.learning_rate
    rise = optax.linear_schedule(0.0, 1.0, first) if first else optax.constant_schedule(1.0)
    fall = optax.linear_schedule(1.0, 0.0, last, all_of - last) if last else optax.constant_schedule(1.0)
    return lambda count: config.learning_rate * rise(count) * fall(count)


def _credit(config: Config) -> Any:
    return config.credit


def _loss_of(task: Task) -> Callable[[Any, Any], Any]:
    if task.kind == "class":

        def loss(outputs: Any, targets: Any) -> Any:
            value = optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()
            return value, {"accuracy": (outputs.argmax(-1) == targets).astype(jnp.float32).mean()}

        return loss
    return lambda outputs, targets: jnp.mean(jnp.square(outputs - targets))


def _measure_of(step: TrainStep, task: Task) -> Callable[[Any, Any, Batch], tuple[Any, dict[str, Array]]]:
    model, of_step = step.model, _loss_of(task)

    def measure(params: Any, carry: Any, given: Batch) -> tuple[Any, dict[str, Array]]:
        inputs, targets, mask, reset = given

        def at(carry: Any, now: Any) -> tuple[Any, Array]:
            x, is_new = now
            carry = jax.tree.map(lambda new, old: _where(is_new, new, old), model.initial_carry(), carry)
            return model.apply(params, carry, x)

        carry, outputs = jax.lax.scan(at, carry, (inputs, reset))
        alone = jax.vmap(jax.vmap(lambda o, t: of_step(o[None], t[None])))(outputs, targets)
        values = {"loss": alone[0], **alone[1]} if isinstance(alone, tuple) else {"loss": alone}
        count = mask.sum()
        means = {name: (value * mask).sum() / jnp.maximum(count, 1) for name, value in values.items()}
        return carry, {**means, "count": count}

    def anywhere(params: Any, carry: Any, given: Batch) -> tuple[Any, dict[str, Array]]:
        results = lambda: (sharding_of(carry), PartitionSpec())  # noqa: E731
        return on_any_mesh(measure, params, carry, given, results=results)

    if step.shardings is None:
        return jax.jit(measure)
    return jax.jit(anywhere, out_shardings=(step.shardings.carry, step.shardings.step))


def _where(rows: Array, new: Array, old: Array) -> Array:
    """One array in some rows, the other elsewhere."""
    return jnp.where(rows.reshape(rows.shape + (1,) * (old.ndim - 1)), new, old)
