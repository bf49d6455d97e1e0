"""Where traces lie on a mesh: like the carry along the batch, like their operator's parameters along all other axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from braintrace_core.ops.trace_rules import EinsumTrace
from braintrace_core.rules import RulePlan
from braintrace_core.rules.plan import Link

from .model import Model

__all__ = ["trace_specs", "without"]

Axes = tuple[Any, ...]


def trace_specs(
    model: Model,
    traces: Mapping[str, Any],
    params: Sequence[PartitionSpec],
    carry: Sequence[PartitionSpec],
    batch: tuple[str, ...],
) -> dict[str, PartitionSpec]:
    """The partition spec of each trace.

    Args:
      model: the compiled model.
      traces: by name; arrays or shapes.
      params, carry: specs of their leaves.
      batch: mesh axes that divide the batch; they cannot divide a weight's trace too.

    The trace of a weight is divided as the weight is. What a rule keeps of an operator's input or result is divided
    along the axes that it shares with the weight; what it keeps of a group, as the states are. A group whose states are
    whole is divided as what feeds it, and results, and biases that are whole, as the group that they feed.
    """
    first = None if not batch or not model.has_examples else batch if len(batch) > 1 else batch[0]
    plan = model.plan
    links = sorted(plan.links, key=lambda link: -len(link.name))
    operands = _operand_axes(plan, params, batch)
    states = _state_axes(plan, carry, batch)
    groups = [_of_group(plan, g, operands, states) for g in range(len(plan.groups))]
    found = {}
    for name, trace in traces.items():
        own: Axes = ()
        link = next((link for link in links if name.startswith(f"{link.name}.")), None)
        if link is not None:
            kind = name.removeprefix(f"{link.name}.").split(".")[0]
            own = _of_link(plan, link, kind, operands)
            like_result = kind != "x" and trace.shape[1:] == link.operator.y.aval.shape
            if not any(own) and like_result and link.axes_before_units is not None:
                own = (*[None] * link.axes_before_units, *groups[link.group])
        elif name.startswith("group"):
            own = groups[int(name.removeprefix("group").split(".")[0])]
        if name.startswith("synthesiser."):
            found[name] = PartitionSpec()
        elif any(own) and len(own) == len(trace.shape) - 1:
            found[name] = PartitionSpec(first, *own)
        else:
            found[name] = PartitionSpec(first)
    return found


def without(spec: PartitionSpec | Axes, used: tuple[str, ...], ndim: int) -> Axes:
    """The axes of a spec, one for each of ``ndim``, less those that are used already."""
    axes = []
    for axis in spec:
        parts = tuple(a for a in (axis if isinstance(axis, tuple) else (axis,)) if a is not None and a not in used)
        axes.append(None if not parts else parts[0] if len(parts) == 1 else parts)
    return (*axes, *[None] * (ndim - len(axes)))


def _operand_axes(plan: RulePlan, params: Sequence[PartitionSpec], batch: tuple[str, ...]) -> dict[Any, Axes]:
    """For each variable made of parameters alone, the mesh axes of a parameter of its shape behind it."""
    weights = plan.graph.module_info.weight_invars
    found = {v: without(spec, batch, len(v.aval.shape)) for v, spec in zip(weights, params, strict=True)}
    shapes = {v: v.aval.shape for v in weights}
    for eqn in plan.program.schedule.parameters.eqns:
        for made in eqn.outvars:
            for v in eqn.invars:
                if not hasattr(v, "val") and shapes.get(v) == made.aval.shape and made not in found:
                    found[made], shapes[made] = found[v], made.aval.shape
    return found


def _of_link(plan: RulePlan, link: Link, kind: str, operands: Mapping[Any, Axes]) -> Axes:
    rules = link.traces(plan.abstract_operands()[plan.links.index(link)]).rules
    key = kind if kind in rules else "weight"
    rule, own = rules.get(key), operands.get(link.operator.operands.get(key))
    if rule is None or own is None:
        return ()
    if not isinstance(rule, EinsumTrace):
        return own if kind in rules and len(rule.shape) == len(own) else ()
    if len(own) != len(rule.theta):
        return ()
    axes = dict(zip(rule.theta, own, strict=True))
    if kind in rules:
        return tuple(map(axes.get, rule.letters))
    if kind in ("f", "df"):
        return tuple(map(axes.get, rule.y))
    return tuple(map(axes.get, rule.x)) if kind == "x" and rule.prepare is None else ()


def _of_group(plan: RulePlan, index: int, operands: Mapping[Any, Axes], states: Mapping[Any, Axes]) -> Axes:
    group = plan.graph.hidden_groups[index]
    if group.hidden_invars[0].aval.shape != group.varshape:
        return ()
    feeding = (
        _of_link(plan, link, "df", operands)[link.axes_before_units :]
        for link in plan.links
        if link.group == index and link.axes_before_units is not None
    )
    return next(filter(any, (states[group.hidden_invars[0]], *feeding)), ())


def _state_axes(plan: RulePlan, carry: Sequence[PartitionSpec], batch: tuple[str, ...]) -> dict[Any, Axes]:
    """For each state's variable, before a step and after it, the mesh axes that divide it beside the batch."""
    before, after = plan.program.state_invars, plan.program.state_outvars
    axes = [without(spec, batch, len(v.aval.shape) + 1)[1:] for v, spec in zip(before, carry, strict=True)]
    return {**dict(zip(after, axes, strict=True)), **dict(zip(before, axes, strict=True))}
