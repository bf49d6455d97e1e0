"""Storage: the few things that are asked of Orbax, which no other module imports."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from orbax.checkpoint import v1 as ocp

__all__ = ["UNFINISHED", "as_path", "begin_writing", "read_arrays", "read_record", "remove", "set_aside"]

UNFINISHED = ".orbax-checkpoint-tmp"
"""Part of the name of a folder that is being written; it is renamed when it is complete."""

_ARRAYS = "state"


def as_path(directory: Any) -> Any:
    """A path, of a disk or of a bucket (``gs://...``)."""
    return ocp.path.Path(directory).absolute()


def begin_writing(
    path: Any, content: Callable[[], tuple[dict[str, Any], dict[str, str]]], thread: Executor | None
) -> Callable[[], Any]:
    """Write meanwhile; the function returned waits, and raises what went wrong.

    Args:
      path: of the new folder.
      content: gives arrays by name, and the record to write with them; may wait.
      thread: does all of it: for arrays that nobody else has, in a single process. None, and Orbax copies the arrays to
        the host first.
    """

    def begin() -> Any:
        arrays, record = content()
        return ocp.save_checkpointables_async(path, {_ARRAYS: arrays}, custom_metadata=record)

    if thread is None:
        return begin().result
    return thread.submit(lambda: begin().result()).result


def read_record(path: Any) -> Any:
    """The record that was written with the arrays; read without Orbax, which would open every array too."""
    return json.loads((path / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]


def read_arrays(path: Any, targets: dict[str, Any]) -> dict[str, Any]:
    """Arrays by name.

    Args:
      path: of the folder.
      targets: for each array in it the shape, dtype and sharding that it is to have; None for those to leave out.
    """
    tree = {name: ocp.PLACEHOLDER if target is None else target for name, target in targets.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of files that are not as expected: every bit is checked afterwards
        return ocp.load_checkpointables(path, {_ARRAYS: tree})[_ARRAYS]


def remove(directory: Any, which: Callable[[str], bool]) -> None:
    """Remove the folders with such names; the first process does it for all."""
    if ocp.multihost.is_primary_host(0):
        for path in list(directory.iterdir()):
            if which(path.name):
                path.rmtree()


def set_aside(directory: Any, name: str, new_name: str) -> None:
    """Rename a folder, if it is there; the first process does it for all."""
    if ocp.multihost.is_primary_host(0) and (directory / name).exists():
        (directory / name).rename(directory / new_name)
