"""Shardings of a whole train state: parameters by rules; traces like the carry along the batch, else like them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .checks import leaf_paths
from .model import Model
from .online_grad import OnlineGradState, is_online_state
from .state import TrainState
from .trace_sharding import trace_specs, without

__all__ = ["BATCH_AXES", "Gathered", "data_sharding", "gathered", "shardings"]

Rules = Sequence[tuple[str, Any]]

BATCH_AXES = ("data", "fsdp")
"""Mesh axes over which a batch is divided, where the mesh has them."""


def shardings(
    model_or_step: Any, mesh: Mesh | AbstractMesh, rules: Rules = (), batch_axes: Sequence[str] = BATCH_AXES
) -> TrainState:
    """Shardings for a train state, in its structure.

    Main arguments:
      model_or_step: a ``train_step``; for a compiled model only ``params`` and ``carry`` are filled in.
      mesh: the devices, with named axes; abstract, if there are none to be had.
      rules: pairs of a regular expression over paths of parameters (``"cell/hi/kernel"``) and a partition spec; the
        first that is found in a path counts, and what none matches is kept whole on every device. Paths of the carry
        start with ``carry/``.

    Other arguments:
      batch_axes: mesh axes over which the batch is divided.

    Traces follow: along the batch like the carry, along the axes of a weight like the parameter, so that advancing them
    needs no communication. Moments of the optimizer follow their parameter.

    >>> import jax, jax.numpy as jnp
    >>> from flax import linen as nn
    >>> import braintrace_flax as braintrace
    >>> model = braintrace.compile(nn.SimpleCell(8), jnp.zeros((4, 3)))
    >>> mesh = jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])
    >>> found = shardings(model, mesh, rules=[("kernel", (None, "model"))])
    >>> found.params["h"]["kernel"].spec == jax.P(None, "model")
    True
    >>> found.carry.spec == jax.P("data")
    True
    """
    step = None if isinstance(model_or_step, Model) else model_or_step
    model: Model = model_or_step if step is None else step.model
    _check_rules(rules, mesh)
    batch = tuple(axis for axis in batch_axes if axis in mesh.axis_names)
    _check_batch(model, mesh, batch)
    names = leaf_paths(model.params_shape)
    specs = [
        _spec(name, leaf.shape, rules, mesh)
        for name, leaf in zip(names, jax.tree.leaves(model.params_shape), strict=True)
    ]
    params = jax.tree.unflatten(jax.tree.structure(model.params_shape), [NamedSharding(mesh, spec) for spec in specs])
    carry_names = [f"carry/{name}".removesuffix("/.") for name in leaf_paths(model.carry_shape)]
    carry_specs = [
        _carry_spec(name, leaf, model, batch, rules, mesh)
        for name, leaf in zip(carry_names, jax.tree.leaves(model.carry_shape), strict=True)
    ]
    carry = jax.tree.unflatten(
        jax.tree.structure(model.carry_shape), [NamedSharding(mesh, spec) for spec in carry_specs]
    )
    whole = NamedSharding(mesh, PartitionSpec())
    anywhere: Any = whole  # stands where an array does
    if step is None:
        return TrainState(whole, params, carry, None, whole)
    abstract = jax.eval_shape(step.tx.init, model.params_shape)
    moments: Any = None

    def like_params() -> None:  # it makes an optimizer state, whose traces may be larger than this machine
        nonlocal moments
        moments = optax.tree.map_params(
            step.tx,
            lambda leaf, sharding: leaf if isinstance(leaf, optax.MaskedNode) else sharding,
            abstract,
            params,
            transform_non_params=lambda _: whole,
            is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
        )

    jax.eval_shape(like_params)

    def place(shapes: Any, found: Any) -> Any:
        if not isinstance(shapes, OnlineGradState):
            return found
        specs_of = trace_specs(model, shapes.traces, specs, carry_specs, batch)
        traces: Any = {name: NamedSharding(mesh, spec) for name, spec in specs_of.items()}
        return OnlineGradState(traces, anywhere, anywhere, shapes.settings)

    opt_state = jax.tree.map(place, abstract, moments, is_leaf=is_online_state)
    return TrainState(whole, params, carry, opt_state, whole)


class Gathered:
    """How a parameter is gathered for a window; a leaf.

    Attributes:
      sharding: without the axes of the batch.
      dtype: in which the model uses it: a weight that it casts is sent as short as it is used.
    """

    def __init__(self, sharding: NamedSharding, dtype: Any):
        self.sharding, self.dtype = sharding, dtype


def gathered(model: Model, params: Any, batch_axes: Sequence[str] = BATCH_AXES) -> Any:
    """For each parameter's sharding, how it is gathered for a window; None where it need not be."""

    def of(sharding: NamedSharding, dtype: Any) -> Any:
        spec = PartitionSpec(*without(sharding.spec, tuple(batch_axes), len(sharding.spec)))
        if spec == sharding.spec:
            return None
        return Gathered(NamedSharding(sharding.mesh, spec), dtype)

    return jax.tree.map(of, params, jax.tree.unflatten(jax.tree.structure(params), _dtypes_in_use(model)))


def _dtypes_in_use(model: Model) -> list[Any]:
    """The dtype in which each parameter is used: that which all its readers cast it to, if they do, or its own."""
    schedule = model.plan.program.schedule
    parts = (schedule.next_states, schedule.outputs, schedule.local)
    read = {v for part in parts for v in part.reads} | {v for op in schedule.operators for v in op.operands.values()}
    found = []
    for v in model.graph.module_info.weight_invars:
        readers = [eqn for eqn in schedule.parameters.eqns if v in eqn.invars]
        casts = {eqn.outvars[0].aval.dtype for eqn in readers if eqn.primitive.name == "convert_element_type"}
        is_cast = all(eqn.primitive.name == "convert_element_type" for eqn in readers) and v not in read
        found.append(casts.pop() if is_cast and len(casts) == 1 else v.aval.dtype)
    return found


def data_sharding(mesh: Mesh, batch_axes: Sequence[str] = BATCH_AXES) -> NamedSharding:
    """Of inputs and targets, ``(time, batch, ...)``."""
    axes = tuple(axis for axis in batch_axes if axis in mesh.axis_names)
    return NamedSharding(mesh, PartitionSpec(None, axes or None))


def _spec(name: str, shape: tuple[int, ...], rules: Rules, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    for pattern, spec in rules:
        if re.search(pattern, name):
            found = PartitionSpec(*spec) if isinstance(spec, (tuple, list)) else (spec or PartitionSpec())
            _check_divides(name, shape, found, mesh)
            return found
    return PartitionSpec()


def _carry_spec(
    name: str, leaf: Any, model: Model, batch: tuple[str, ...], rules: Rules, mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    given = _spec(name, leaf.shape, [rule for rule in rules if "carry" in rule[0]], mesh)
    if given != PartitionSpec():
        return given
    if not model.has_examples or not batch:
        return PartitionSpec()
    return PartitionSpec(batch if len(batch) > 1 else batch[0])


def _axes(spec: PartitionSpec) -> list[tuple[str, ...]]:
    return [() if axis is None else axis if isinstance(axis, tuple) else (axis,) for axis in spec]


def _check_rules(rules: Rules, mesh: Mesh | AbstractMesh) -> None:
    for rule in rules:
        if not isinstance(rule, (tuple, list)) or len(rule) != 2:
            raise ValueError(f"A sharding rule is a pair (regular expression, spec), got {rule!r}.")
        pattern, spec = rule
        for axis in spec or ():
            for part in axis if isinstance(axis, tuple) else (axis,):
                if part is not None and part not in mesh.axis_names:
                    raise ValueError(
                        f"The sharding rule for {pattern!r} names the axis {part!r}; the mesh has "
                        f"{', '.join(map(repr, mesh.axis_names))}."
                    )


def _check_divides(name: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> None:
    if len(spec) > len(shape):
        raise ValueError(f"The sharding {spec} has more axes than `{name}` of shape {shape}.")
    for size, axes in zip(shape, _axes(spec), strict=False):
        count = 1
        for axis in axes:
            count *= mesh.shape[axis]
        if size % count:
            raise ValueError(
                f"`{name}` of shape {shape} cannot be divided as {spec}: {size} is no multiple of {count}, the size of "
                f"{' x '.join(axes)}. Change the width, the mesh or the rule."
            )


def _check_batch(model: Model, mesh: Mesh | AbstractMesh, batch: tuple[str, ...]) -> None:
    count = 1
    for axis in batch:
        count *= mesh.shape[axis]
    if model.has_examples and model.batch_size is not None and model.batch_size % count:
        raise ValueError(
            f"A batch of {model.batch_size} cannot be divided over {' x '.join(batch)} = {count} devices. Compile for "
            f"a multiple of {count}."
        )
