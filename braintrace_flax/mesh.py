"""Meshes by text: ``data=4,model=2`` are eight devices, over which batches and weights are divided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

__all__ = ["AXES", "MeshKind", "make_mesh", "parse_mesh"]

AXES = ("data", "fsdp", "model")
"""What a mesh can be divided into: batches; batches and weights; weights. From the slowest links to the fastest."""

MeshKind = Literal["auto", "explicit"]


def parse_mesh(text: str) -> dict[str, int]:
    """The size of each axis; nothing for one device.

    >>> parse_mesh("model=2,data=4")
    {'data': 4, 'model': 2}
    >>> parse_mesh("data=4,rows=2")
    Traceback (most recent call last):
        ...
    ValueError: The mesh 'data=4,rows=2' has an axis 'rows'; axes are data, fsdp, model, as in "data=4,model=2".
    """
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in AXES:
            raise ValueError(
                f'The mesh {text!r} has an axis {name!r}; axes are {", ".join(AXES)}, as in "data=4,model=2".'
            )
        if name in found:
            raise ValueError(f"The mesh {text!r} names the axis {name!r} twice.")
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(f"The mesh {text!r} needs a whole number of at least 1 for {name!r}, got {size!r}.")
        found[name] = int(size)
    return {name: found[name] for name in AXES if name in found}


def make_mesh(text: str, kind: MeshKind = "auto", devices: Sequence[Any] | None = None) -> Mesh | None:
    """A mesh over devices, all of this run unless given; None where the text is empty.

    >>> make_mesh("data=1,model=1", devices=jax.devices()[:1]).axis_names
    ('data', 'model')
    """
    sizes = parse_mesh(text)
    if kind not in get_args(MeshKind):
        raise ValueError(f'The kind of a mesh is "auto" or "explicit", got {kind!r}.')
    if not sizes:
        return None
    devices = jax.devices() if devices is None else list(devices)
    wanted = math.prod(sizes.values())
    if wanted != len(devices):
        raise ValueError(
            f"The mesh {text!r} takes {wanted} devices, and there are {len(devices)} ({devices[0].device_kind}). "
            f"{_remedy(devices, wanted)}"
        )
    types = (AxisType.Auto if kind == "auto" else AxisType.Explicit,) * len(sizes)
    if devices[0].platform == "cpu":  # in the order of processes, so that each holds rows that follow one another
        return Mesh(np.asarray(devices).reshape(tuple(sizes.values())), tuple(sizes), axis_types=types)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)


def _remedy(devices: Sequence[Any], wanted: int) -> str:
    if devices[0].platform == "cpu" and jax.process_count() == 1:
        return f"Set JAX_NUM_CPU_DEVICES={wanted} to try it on this machine, or change the mesh."
    return "Change the mesh, or the number of processes."
