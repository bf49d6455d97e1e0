"""One small training, to be done on any mesh in any number of processes: its result is always the same.

As a program it is one of two processes with four devices each: ``python -m tests.flax.meshes PORT INDEX FILE
[all]``.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import braintrace_flax as braintrace
from braintrace_flax.mesh import make_mesh
from braintrace_flax.runs.meeting import MeetingFailed
from braintrace_flax.runs.placing import read
from braintrace_flax.runs.processes import Processes, agree, together
from braintrace_flax.tasks import Copy

BATCH, UNITS, WINDOW, BATCHES = 8, 8, 2, 13
TASK = Copy(symbols=3, length=2, delay=4)  # 8 steps a batch: 52 windows in all
RULES = ("d_rtrl", "pp_prop")
SHAPES = ("data=8", "fsdp=8", "model=8", "data=4,model=2", "fsdp=4,model=2", "data=2,fsdp=4", "data=2,fsdp=2,model=2")
KINDS = {"data=2,fsdp=2,model=2": ("auto", "explicit"), "data=4,model=2": ("auto", "explicit")}
CASES = [(shape, rule, kind) for shape in SHAPES for rule in RULES for kind in KINDS.get(shape, ("auto",))]
FEW = [("fsdp=8", "pp_prop", "auto"), ("data=2,fsdp=2,model=2", "d_rtrl", "explicit")]


def step_of(params, h, x):
    """A gated recurrence and a readout, of one example."""
    drive = x @ params["in"]["kernel"] + h @ params["back"]["kernel"] + params["in"]["bias"]
    keep, new = jnp.split(drive, 2)
    keep = jax.nn.sigmoid(keep)
    h = keep * h + (1 - keep) * jnp.tanh(new)
    return h, h @ params["out"]["kernel"]


def weights(key):
    draw = iter(jax.random.split(key, 3))
    kernel = lambda *shape: 0.5 * jax.random.normal(next(draw), shape, jnp.float64)  # noqa: E731
    return {
        "in": {"kernel": kernel(TASK.num_inputs, 2 * UNITS), "bias": jnp.zeros(2 * UNITS)},
        "back": {"kernel": kernel(UNITS, 2 * UNITS)},
        "out": {"kernel": kernel(UNITS, TASK.num_outputs)},
    }


def make(rule):
    example = jnp.zeros((BATCH, TASK.num_inputs))
    model = braintrace.compile(step_of, example, params=weights, carry=jnp.zeros(UNITS))
    tx = optax.chain(braintrace.online_grad(model, rule=rule), optax.sgd(0.2, momentum=0.9))

    @braintrace.train_step(model, tx, window=WINDOW)
    def step(outputs, targets):
        return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()

    return step


def rules_for(mesh):
    rows = "fsdp" if "fsdp" in mesh.axis_names else None
    columns = "model" if "model" in mesh.axis_names else None
    return [("back/kernel", (rows, columns)), ("in/kernel", (None, columns or rows)), ("in/bias", (columns,))]


def trained(shape, rule, kind="auto"):
    """All parameters, traces and losses after 52 windows on a mesh; on one device if there is none."""
    mesh, step = make_mesh(shape, kind), make(rule)
    if mesh is None:
        return _numbers(step, None)
    with jax.set_mesh(mesh):
        return _numbers(step.sharded(mesh, rules_for(mesh)), mesh)


def _numbers(step, mesh):
    state, losses = step.init(jax.random.key(0)), []
    for position in range(BATCHES):
        batch, _ = read(TASK, position, BATCH, 0, mesh)
        inputs = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), batch.inputs)
        state, metrics = step(state, inputs, batch.targets, batch.reset)
        losses.append(metrics["loss"])
    found = {"params": state.params, "traces": optax.tree.get(state.opt_state, "traces"), "losses": losses}
    if mesh is not None:
        whole = NamedSharding(mesh, PartitionSpec())
        found = jax.jit(lambda tree: tree, out_shardings=whole)(found)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


def main(port, index, path, all_of_them):
    """Train on all meshes, and see whether processes that differ are told so."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_enable_x64", True)
    with together(Processes(f"127.0.0.1:{port}", 2, index, peer_timeout=60), {"what": "meshes"}):
        assert (jax.process_count(), jax.device_count()) == (2, 8)
        try:
            agree("compiled graph", {"units": 4 + index})
            raise AssertionError("processes that differ were not told so")
        except MeetingFailed as error:
            told = str(error)
        found = {"/".join(case): trained(*case) for case in (CASES if all_of_them else FEW)}
        multihost_utils.sync_global_devices("trained")
        if index == 0:
            flat = {f"{name}:{i}": leaf for name, leaves in found.items() for i, leaf in enumerate(leaves)}
            np.savez(path, told=told, **flat)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:] == ["all"])
