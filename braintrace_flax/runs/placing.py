"""Batches on a mesh: each process reads the rows that its own devices hold, and no others."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..sharding import data_sharding
from ..tasks import Batch, Task

__all__ = ["placed", "read"]


def read(task: Task, position: int, batch_size: int, seed: int, mesh: Mesh | None) -> tuple[Batch, Batch]:
    """The batch at a position, as the train step takes it, and the rows of it that are on this machine."""
    if mesh is None:
        batch = task.batch(position, batch_size, seed=seed)
        return batch, batch
    parts, count = _parts(mesh, batch_size)
    found = [task.batch(position, batch_size, seed=seed, part=(part, count)) for part in parts]
    batch = Batch(*(np.concatenate(leaves, axis=1) for leaves in zip(*found, strict=True)))
    size = batch_size // count
    rows = {part * size + i: n * size + i for n, part in enumerate(parts) for i in range(size)}
    return _assembled(batch, batch_size, rows, mesh), batch


def placed(batch: Batch, mesh: Mesh | None) -> Batch:
    """A batch that every process has whole, on the mesh."""
    if mesh is None:
        return batch
    size = batch.mask.shape[1]
    return _assembled(batch, size, {row: row for row in range(size)}, mesh)


def _parts(mesh: Mesh, batch_size: int) -> tuple[list[int], int]:
    """Which of how many equal parts of the rows the devices of this process hold; one part if they are neighbours."""
    indices: Any = data_sharding(mesh).addressable_devices_indices_map((1, batch_size)).values()
    held = {index[1].indices(batch_size)[:2] for index in indices}
    starts = sorted(start for start, _ in held)
    size = max(stop - start for start, stop in held)
    whole = size * len(starts)
    if starts[-1] + size - starts[0] == whole and starts[0] % whole == 0 and batch_size % whole == 0:
        return [starts[0] // whole], batch_size // whole
    return [start // size for start in starts], batch_size // size


def _assembled(batch: Batch, batch_size: int, rows: dict[int, int], mesh: Mesh) -> Batch:
    sharding = data_sharding(mesh)

    def whole(leaf: np.ndarray) -> Any:
        def at(index: Any) -> np.ndarray:
            first, last, _ = index[1].indices(batch_size)
            return leaf[:, rows[first] : rows[first] + last - first]

        return jax.make_array_from_callback((leaf.shape[0], batch_size, *leaf.shape[2:]), sharding, at)

    return Batch(*map(whole, batch))
