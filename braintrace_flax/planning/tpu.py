"""A config compiled for a TPU by the TPU's own compiler, without a TPU."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import time
from dataclasses import dataclass, replace
from typing import Any, cast

import jax

from ..mesh import MeshKind, make_mesh, parse_mesh
from ..runs.config import Config
from ..runs.run import build
from ..sharding import data_sharding
from .chips import PlanError, size_of
from .estimate import data_shapes, state_shapes
from .hlo import Collective, Program

__all__ = ["Compiled", "compile_for", "devices_of", "prepare"]

# The compiler asks for a machine's own TPU and for its metadata server; there is neither.
_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@dataclass(frozen=True)
class Compiled:
    """What the compiler says about one call of a train step, on one chip.

    Attributes:
      arguments, temporaries: bytes of the state and the batch, and of all that comes and goes.
      aliased: bytes of arguments whose memory the results take over.
      needed: bytes in all; where they do not fit, all that is known.
      fits: whether the compiler could place them.
      flops, bytes_accessed: of matrix products, and to and from main memory, in one window.
      collectives: what chips send to one another; ``times`` are for one call.
      windows: in one call.
      seconds: that compiling took.
      text: the program.
    """

    arguments: int
    temporaries: int
    aliased: int
    needed: int
    fits: bool
    flops: float = 0.0
    bytes_accessed: float = 0.0
    collectives: tuple[Collective, ...] = ()
    windows: int = 1
    seconds: float = 0.0
    text: str = ""

    @property
    def sent(self) -> float:
        """Bytes that a chip sends in one window."""
        return sum(c.sent for c in self.collectives) / self.windows


def prepare() -> None:
    """Let this process compile for TPUs and run on CPU; before JAX starts."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)  # some code is written otherwise for one device


def devices_of(topology: str, mesh: str) -> list[Any]:
    """The chips of a topology such as ``v5e:4x4``, to compile for a mesh."""
    size_of(topology)
    if importlib.util.find_spec("libtpu") is None:
        raise PlanError(
            "`--topology` needs libtpu, the TPU's compiler, which is not installed: `pip install "
            "'braintrace-flax[tpu]'`, best in an environment of its own."
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    try:
        devices = list(topologies.get_topology_desc(topology, platform="tpu").devices)
    except Exception as error:
        reason = str(error).splitlines()[0][:200]
        raise PlanError(f"The TPU's compiler knows no topology {topology!r}: {reason}") from error
    taken = math.prod(parse_mesh(mesh).values())
    if taken != len(devices):
        raise PlanError(f"The mesh {mesh!r} takes {taken} devices, and {topology} has {len(devices)}.")
    return devices


def compile_for(config: Config, topology: str) -> Compiled:
    """Compile the train step of a config, over all steps of a batch, for a topology."""
    devices = devices_of(topology, config.mesh)
    mesh = make_mesh(config.mesh or "data=1", cast(MeshKind, config.mesh_kind), devices)
    assert mesh is not None
    run = build(replace(config, mesh=""), mesh)

    def place(leaf: Any, to: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to)

    state = jax.tree.map(place, state_shapes(run), run.step.shardings)
    data = [place(leaf, data_sharding(mesh)) for leaf in data_shapes(run, config.task.steps)]
    began = time.perf_counter()
    with jax.set_mesh(mesh):
        lowered = run.step.lower(state, *data)
        try:
            compiled = lowered.compile()
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return Compiled(0, 0, 0, _wanted(str(error)), False, seconds=time.perf_counter() - began)
    seconds = time.perf_counter() - began
    memory, text = compiled.memory_analysis(), compiled.as_text()
    windows = config.task.steps // (run.step.window or config.task.steps)
    program = Program(text)
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        needed=memory.argument_size_in_bytes + memory.temp_size_in_bytes + new,
        fits=True,
        flops=program.flops() / windows,
        bytes_accessed=program.bytes_accessed() / windows,
        collectives=tuple(program.collectives()),
        windows=windows,
        seconds=seconds,
        text=text,
    )


def _wanted(message: str) -> int:
    """How much the compiler would have needed, by its message: ``Used 20.1G of 15.75G``, or ``(40.98G) exceeds``."""
    found = re.search(r"(?:Used |\()([\d.]+)([KMGT])\)? (?:of|exceeds)", message)
    return int(float(found.group(1)) * 1024 ** (" KMGT".index(found.group(2)))) if found else 0
