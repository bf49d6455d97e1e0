"""Bytes on one device, from abstract shapes alone: nothing is allocated, compiled or run."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from ..mesh import parse_mesh
from ..online_grad import is_online_state
from ..runs.config import Config, ConfigError
from ..runs.run import Run, build
from ..sharding import BATCH_AXES, gathered, shardings
from ..state import TrainState
from ..trace_sharding import without
from .liveness import Divided, peak_bytes

__all__ = ["Need", "abstract_mesh", "batch_shards", "data_shapes", "estimate", "largest_batch", "state_shapes"]


@dataclass(frozen=True)
class Need:
    """Bytes on one device.

    Attributes:
      parameters, optimizer, traces: of the train state, divided as its shardings say.
      carry, data: the states of the network, and one batch.
      activations: all that comes and goes within a window: recorded values, factors, gradients, gathered weights.
    """

    parameters: int
    optimizer: int
    traces: int
    carry: int
    data: int
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.optimizer + self.traces + self.carry + self.data + self.activations


def estimate(config: Config) -> Need:
    """What a config needs on each device of its mesh.

    State is exact: shapes, shardings, and the padding of a TPU's tiles. Activations are those of a window on one
    device's share of the batch, as far as a jaxpr tells which arrays are alive at the same time.
    """
    return _measure(config)[0]


def largest_batch(config: Config, memory: int) -> int:
    """The largest batch that fits into so many bytes a device, for the whole mesh; 0 if none does.

    Found from a few estimates, each time as if what a batch needs grew in proportion to it.
    """
    need, placed = _measure(config)
    shards = batch_shards(config)
    own = config.batch_size // shards
    fixed, grows = need.parameters + need.optimizer, (need.traces + need.carry + need.data) / own

    def total(share: int) -> float:
        return fixed + share * grows + _activations(_share(config, share), placed)

    low, found, high = own, float(need.total), 2 * own
    for _ in range(3):
        more = total(high)
        slope = max((more - found) / (high - low), 1.0)
        low, found = high, more
        high = min(max(int(low + (memory - found) / slope), 0), 64 * low)
        if not high or high == low or abs(memory - found) < 0.02 * memory:
            break
    return high * shards


@lru_cache(maxsize=2)
def _measure(config: Config) -> tuple[Need, TrainState]:
    mesh, shards = abstract_mesh(config), batch_shards(config)
    if config.batch_size % shards:
        raise ConfigError(f"A batch of {config.batch_size} cannot be divided over {shards} devices.")
    run = build(replace(config, mesh=""))
    state = state_shapes(run)
    placed = shardings(run.step, mesh, config.sharding)
    sizes = jax.tree.map(lambda leaf, sharding: _bytes(sharding.shard_shape(leaf.shape), leaf.dtype), state, placed)
    online = [node for node in jax.tree.leaves(sizes.opt_state, is_leaf=is_online_state) if is_online_state(node)]
    traces = sum(jax.tree.leaves(online))
    share = run if shards == 1 else _share(config, config.batch_size // shards)
    need = Need(
        parameters=sum(jax.tree.leaves(sizes.params)),
        optimizer=sum(jax.tree.leaves(sizes.opt_state)) - traces,
        traces=traces,
        carry=sum(jax.tree.leaves(sizes.carry)),
        data=sum(_bytes(leaf.shape, leaf.dtype) for leaf in data_shapes(share, config.task.steps)),
        activations=_activations(share, placed),
    )
    return need, placed


def _share(config: Config, examples: int) -> Run:
    """The run of one device, with so many examples."""
    return build(replace(config, mesh="", batch_size=examples))


def abstract_mesh(config: Config) -> AbstractMesh:
    """The mesh of a config, without devices."""
    sizes = parse_mesh(config.mesh) or {"data": 1}
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def batch_shards(config: Config) -> int:
    """Over how many devices the batch of a config is divided."""
    return math.prod(size for axis, size in parse_mesh(config.mesh).items() if axis in BATCH_AXES)


def data_shapes(run: Run, steps: int) -> tuple[Any, ...]:
    """Shapes of what a call of the train step takes beside the state."""
    task, size = run.config.task, run.config.batch_size
    lead = (steps, size)
    dtype = jnp.int32 if task.is_tokens else jnp.float32
    inputs = jax.ShapeDtypeStruct(lead if task.is_tokens else (*lead, task.num_inputs), dtype)
    is_class = task.kind == "class"
    targets = jax.ShapeDtypeStruct(
        lead if is_class else (*lead, task.num_outputs), jnp.int32 if is_class else jnp.float32
    )
    return inputs, targets, jax.ShapeDtypeStruct(lead, jnp.bool_), jax.ShapeDtypeStruct(lead, jnp.float32)


def state_shapes(run: Run) -> TrainState:
    """Shapes of the train state."""
    return jax.eval_shape(run.step.init, jax.eval_shape(lambda: jax.random.key(0)))


def _activations(run: Run, placed: TrainState) -> int:
    """Of one window, on one device's share of the batch; ``placed`` are the shardings on the whole mesh."""
    step = copy.copy(run.step)
    step.shardings, step._gathered = placed, gathered(run.model, placed.params)
    state, window = state_shapes(run), step.window or run.config.task.steps
    mesh = jax.tree.leaves(placed.params)[0].mesh
    with jax.sharding.use_abstract_mesh(mesh):  # the program of many devices, not that of this machine
        jaxpr = jax.make_jaxpr(step.run)(state, *data_shapes(run, window))
    shapes = [leaf.shape for leaf in jax.tree.leaves(state.params)]
    return peak_bytes(jaxpr, _divisions(shapes, jax.tree.leaves(placed.params)))


def _divisions(shapes: Sequence[tuple[int, ...]], placed: Sequence[NamedSharding]) -> Divided:
    """What is divided beside the batch: gradients like their parameters, and all else along the model's axes."""
    gradients, sizes = {}, {}
    for shape, sharding in zip(shapes, placed, strict=True):
        axes = without(sharding.spec, BATCH_AXES, len(shape))
        for size, axis in zip(shape, axes, strict=True):
            if axis is not None:
                parts = axis if isinstance(axis, tuple) else (axis,)
                sizes[size] = math.prod(sharding.mesh.shape[part] for part in parts)
        gradients[tuple(sorted(shape))] = math.prod(shape) // math.prod(sharding.shard_shape(shape))
    return Divided(gradients, sizes)


def _bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Of an array in a TPU's memory: rows are padded to 128 numbers, and full columns of them to 32 bytes a number."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return 8
    size = jnp.dtype(dtype).itemsize
    if not shape:
        return size
    tile = 32 // min(size, 4)
    rows = shape[-2] if len(shape) > 1 else 1
    rows = -(-rows // tile) * tile if rows > tile // 2 else rows
    return math.prod(shape[:-2]) * rows * (-(-shape[-1] // 128) * 128) * size
