"""Hidden groups: hidden states that feed one another unit by unit, without an operator in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import brainstate
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._compat import Jaxpr, Var, eval_jaxpr
from ..errors import NotSupportedError
from .analysis import StepAnalysis
from .colouring import plan_diagonals
from .components import Components
from .diagnostics import DiagnosticKind, Path, Recorder, spell
from .diagonals import DiagonalPlan
from .module_info import ModuleInfo
from .patterns import Pattern
from .positions import Positions
from .tracing import extract_module_info

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

    index: int  # type: ignore[assignment]  # a tuple has a method of that name
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
        """The states' values on one last axis: ``(*varshape, num_state)``, of a dtype that holds them all."""
        split = self.components
        parts = [v if s else jnp.expand_dims(v, -1) for v, s in zip(values, split.stacked, strict=True)]
        return jnp.concatenate([part.astype(split.state_dtype) for part in parts], axis=-1)

    def split_hidden(self, value: Any) -> list[Array]:
        """The opposite of :meth:`concat_hidden`."""
        split = self.components
        parts = jnp.split(value, np.cumsum(split.widths)[:-1].tolist(), axis=-1)
        parts = [p if s else jnp.squeeze(p, -1) for p, s in zip(parts, split.stacked, strict=True)]
        return [part.astype(aval.dtype) for part, aval in zip(parts, split.avals, strict=True)]

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
            names = ", ".join(map(spell, group.hidden_paths))
            recorder.info(
                DiagnosticKind.HIDDEN_GROUP_MERGED,
                f"{names} feed one another unit by unit and form group {group.index}.",
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

    order = {p: i for i, p in enumerate(paths)}
    other_couplings: list[tuple[Path, Path]] = []
    for target in paths:
        for source, couplings in _couplings(analysis, target).items():
            if any(_unit_by_unit(analysis, pattern, source, target) for pattern in couplings):
                first, second = sorted((root(source), root(target)), key=order.__getitem__)
                parent[second] = first
            else:
                other_couplings.append((source, target))
    for source, target in other_couplings:
        if root(source) != root(target):
            recorder.warn(
                DiagnosticKind.HIDDEN_COUPLING_DROPPED,
                f"'{spell(target)}' depends on '{spell(source)}' other than unit by unit, so they stay separate groups "
                "and traces do not follow this path; credit does inside the window. Use `rtrl`, or a learnt "
                "operator on the path.",
                hidden_paths=(source, target),
            )
    groups: dict[Path, list[Path]] = {}
    for p in paths:
        groups.setdefault(root(p), []).append(p)
    return list(groups.values())


def _couplings(analysis: StepAnalysis, target: Path) -> dict[Path, list[Pattern]]:
    """For every other state, how the target's new value depends on its old one, and on its new one."""
    found: dict[Path, list[Pattern]] = {}
    for variable, pattern in analysis.patterns.get(analysis.hidden[target][1], {}).items():
        source = analysis.hidden_path_of.get(variable)
        if source is not None and source != target:
            found.setdefault(source, []).append(pattern)
    return found


def _unit_by_unit(analysis: StepAnalysis, pattern: Pattern, source: Path, target: Path) -> bool:
    """Whether some unit of the target depends on the same unit of the source, other than by a sum over units."""
    (source_shape, source_width), (target_shape, target_width) = (_layout(analysis, p) for p in (source, target))
    if source_shape != target_shape:
        return False
    rows, elements, spread = pattern.listed()
    units, sources = rows // target_width, elements // source_width
    same = units == sources
    if (same & ~spread).any():
        return True
    # A source spread over one unit alone (over the states stacked in it) stays at its unit; one over many does not.
    astray = np.isin(sources, sources[~same])
    return not pattern.mixed and bool((same & ~astray).any())


def _layout(analysis: StepAnalysis, path: Path) -> tuple[tuple[int, ...], int]:
    """The shape of a hidden state, a unit for each position, and how many states a unit has there."""
    shape = tuple(analysis.hidden[path][0].aval.shape)
    return (shape[:-1], shape[-1]) if analysis.minfo.is_group_state(path) else (shape, 1)
