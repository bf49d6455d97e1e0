"""Explicit meshes: inside, JAX divides the work as on an Auto mesh; outside, every array keeps the sharding it had."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

__all__ = ["is_explicit", "mesh_of", "on_any_mesh", "sharding_of"]


def is_explicit() -> bool:
    """Whether the mesh in use, if any, has Explicit axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and AxisType.Explicit in mesh.axis_types


def on_any_mesh(function: Callable[..., Any], *args: Any, results: Callable[[], Any]) -> Any:
    """``function(*args)``, on an Explicit mesh with its axes left to the compiler.

    Args:
      function: of arrays.
      *args: its arguments.
      results: gives the shardings of its results, in their structure or a prefix of it; asked on an Explicit mesh only.
    """
    with mesh_of(args):
        if not is_explicit():
            return function(*args)
        return jax.sharding.auto_axes(function, out_sharding=results())(*args)


def mesh_of(tree: Any) -> AbstractContextManager[Any]:
    """The Explicit mesh that arrays lie on in use, where none is: a user need not say again what each array says."""
    if jax.sharding.get_abstract_mesh().empty:
        for leaf in jax.tree.leaves(tree):
            sharding = getattr(jax.typeof(leaf), "sharding", None)
            if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
                return jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh)
    return nullcontext()


def sharding_of(tree: Any) -> Any:
    """The sharding of each array, as its type says; whole on every device for what has none."""
    mesh = jax.sharding.get_abstract_mesh()

    def of(leaf: Any) -> NamedSharding:
        found = getattr(jax.typeof(leaf), "sharding", None)
        spec = found.spec if isinstance(found, NamedSharding) else PartitionSpec()
        return NamedSharding(mesh, spec)

    return jax.tree.map(of, tree)
