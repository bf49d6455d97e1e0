"""Hidden groups: hidden states that feed one another unit by unit, without an operator in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._compat import Jaxpr, Var, eval_jaxpr
from ..errors import NotSupportedError
from .analysis import StepAnalysis
from .components import Components
from .diagnostics import DiagnosticKind, Path, Recorder, spell
from .diagonals import DiagonalPlan, plan_diagonals
from .module_info import ModuleInfo, extract_module_info
from .patterns import Pattern
from .positions import Positions

__all__ = ["HiddenGroup", "find_hidden_groups_from_minfo", "find_hidden_groups_from_module"]


class HiddenGroup(NamedTuple):
    """States bound together by the recurrence, stacked on a last axis of size ``num_state``.

    Attributes:
      index: the group's place among the groups of its graph.
      hidden_paths, hidden_states: the states, in the order of the jaxpr.
      hidden_invars, hidden_outvars: their variables before and after the step.
      transition_jaxpr: ``hidden_invars -> hidden_outvars``, cut at every operator.
      transition_jaxpr_constvars: what the transition needs besides, as variables of the step's jaxpr.
    """

    index: int
    hidden_paths: list[Path]
    hidden_states: list[brainstate.State]
    hidden_invars: list[Var]
    hidden_outvars: list[Var]
    transition_jaxpr: Jaxpr
    transition_jaxpr_constvars: list[Var]

    @property
    def varshape(self) -> tuple[int, ...]:
        """The shape of one state: a unit for each position."""
        return self.components.varshape

    @property
    def num_state(self) -> int:
        """How many states a unit has."""
        return sum(self.components.widths)

    @property
    def components(self) -> Components:
        """How the states' arrays are made of real numbers, a fixed number for each unit."""
        stacked = [isinstance(s, (brainstate.HiddenGroupState, brainstate.HiddenTreeState)) for s in self.hidden_states]
        return Components(tuple(v.aval for v in self.hidden_invars), tuple(stacked))

    def check_consistent_varshape(self) -> None:
        """Raise :class:`NotSupportedError` unless all states of the group have one shape."""
        shapes = {spell(p): shape for p, shape in zip(self.hidden_paths, self.components.varshapes, strict=True)}
        if len(set(shapes.values())) > 1:
            raise NotSupportedError(
                f"The states of a hidden group must have one shape, found {shapes}. Give states that feed one another "
                "unit by unit the same shape."
            )

    def transition(self, hidden_vals: Sequence[Any], input_vals: Sequence[Any]) -> list[Array]:
        """New hidden values from old ones, given values for ``transition_jaxpr_constvars``."""
        return eval_jaxpr(self.transition_jaxpr, list(input_vals), *hidden_vals)

    def diagonal_jacobian(self, hidden_vals: Sequence[Any], input_vals: Sequence[Any]) -> Array:
        """``d transition / d hidden``, unit by unit: ``(*varshape, num_state, num_state)``.

        The true diagonal of the Jacobian, whatever couples the units. Complex states count as one each if the
        transition is holomorphic (``D`` is then complex); otherwise use the graph's factors, which are real.
        """
        plan = self._plan()
        entries = plan.evaluate(lambda hidden, _: self.transition(hidden, input_vals), list(hidden_vals), [])[0]
        return self.components.dense_jacobian(entries)

    def concat_hidden(self, values: Sequence[Any]) -> Array:
        """The states' values on one last axis: ``(*varshape, num_state)``."""
        stacked = self.components.stacked
        parts = [v if s else jnp.expand_dims(v, -1) for v, s in zip(values, stacked, strict=True)]
        return jnp.concatenate(parts, axis=-1)

    def split_hidden(self, value: Any) -> list[Array]:
        """The opposite of :meth:`concat_hidden`."""
        widths = self.components.widths
        parts = jnp.split(value, np.cumsum(widths)[:-1].tolist(), axis=-1)
        return [p if s else jnp.squeeze(p, -1) for p, s in zip(parts, self.components.stacked, strict=True)]

    def dict(self) -> dict[str, Any]:
        """All fields by name."""
        return self._asdict()

    def _plan(self) -> DiagonalPlan:
        patterns = {v: {v: Pattern.identity(v.aval.shape)} for v in self.hidden_invars}
        Positions({}).propagate(self.transition_jaxpr.eqns, patterns)
        return plan_diagonals(self.components, self.hidden_invars, self.hidden_outvars, [], patterns)

    def __repr__(self) -> str:
        states = ", ".join(map(spell, self.hidden_paths))
        return f"HiddenGroup({self.index}: {states}; shape {self.varshape}, {self.num_state} state(s) a unit)"


def find_hidden_groups_from_minfo(
    minfo: ModuleInfo, *, analysis: StepAnalysis | None = None, recorder: Recorder | None = None
) -> tuple[list[HiddenGroup], dict[Path, HiddenGroup]]:
    """The hidden groups of a traced step, and the group of each hidden path."""
    analysis, recorder = analysis or StepAnalysis(minfo), recorder or Recorder()
    members = _connected(analysis, recorder)
    groups = [_make_group(i, paths, analysis) for i, paths in enumerate(members)]
    for group in groups:
        group.check_consistent_varshape()
        if len(group.hidden_paths) > 1:
            recorder.info(
                DiagnosticKind.HIDDEN_GROUP_MERGED,
                f"{', '.join(map(spell, group.hidden_paths))} feed one another unit by unit and form group {group.index}.",
                hidden_paths=group.hidden_paths,
            )
    return groups, {path: group for group in groups for path in group.hidden_paths}


def find_hidden_groups_from_module(
    model: brainstate.nn.Module, *args: Any, **kwargs: Any
) -> tuple[list[HiddenGroup], dict[Path, HiddenGroup]]:
    """The hidden groups of a brainstate module; see :func:`find_hidden_groups_from_minfo`."""
    return find_hidden_groups_from_minfo(extract_module_info(model, *args, **kwargs))


def _make_group(index: int, paths: list[Path], analysis: StepAnalysis) -> HiddenGroup:
    minfo = analysis.minfo
    before = [analysis.hidden[p][0] for p in paths]
    after = [analysis.hidden[p][1] for p in paths]
    transition = analysis.part_from(before, after)
    states = [minfo.retrieved_model_states[p] for p in paths]
    return HiddenGroup(index, paths, states, before, after, transition, list(transition.constvars))


def _connected(analysis: StepAnalysis, recorder: Recorder) -> list[list[Path]]:
    """Hidden paths in groups: connected where one state feeds another at the same unit."""
    paths = list(analysis.hidden)
    parent = {p: p for p in paths}

    def root(p: Path) -> Path:
        while parent[p] != p:
            parent[p] = parent[parent[p]]
            p = parent[p]
        return p

    owner = {analysis.hidden[p][0]: p for p in paths}
    shape = {p: _unit_shape(analysis, p) for p in paths}
    for target in paths:
        after = analysis.hidden[target][1]
        for source, pattern in analysis.patterns.get(after, {}).items():
            other = owner.get(source)
            if other is None or other == target:
                continue
            if shape[other] == shape[target] and _meets_itself(analysis, pattern, other, target):
                parent[max(root(other), root(target), key=paths.index)] = min(
                    root(other), root(target), key=paths.index
                )
            else:
                recorder.warn(
                    DiagnosticKind.HIDDEN_COUPLING_DROPPED,
                    f"'{spell(target)}' depends on '{spell(other)}' other than unit by unit, so they stay separate groups "
                    "and traces do not follow this path; credit does inside the window. Use `rtrl`, or a learnt "
                    "operator on the path.",
                    hidden_paths=(other, target),
                )
    groups: dict[Path, list[Path]] = {}
    for p in paths:
        groups.setdefault(root(p), []).append(p)
    return list(groups.values())


def _unit_shape(analysis: StepAnalysis, path: Path) -> tuple[int, ...]:
    shape = tuple(analysis.hidden[path][0].aval.shape)
    return shape[:-1] if analysis.minfo.is_group_state(path) else shape


def _meets_itself(analysis: StepAnalysis, pattern: Pattern, source: Path, target: Path) -> bool:
    """Whether some unit of the target depends on the same unit of the source."""
    source_width = analysis.minfo.num_states_of(source) if analysis.minfo.is_group_state(source) else 1
    target_width = analysis.minfo.num_states_of(target) if analysis.minfo.is_group_state(target) else 1
    index = pattern.flat()
    units = np.arange(len(index)) // target_width
    return bool(((index >= 0) & (index // source_width == units[:, None])).any())
