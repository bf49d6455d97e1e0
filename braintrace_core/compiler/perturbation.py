"""Perturbation: the step with a term added to every hidden state, so that a gradient with respect to it is ``dL/dh``.

The terms of one group do not act on the group's other states inside the same step (an LSTM's ``c`` on its ``h``): the
trace of each state already holds that path, and counting it in the signal too would count it twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
from jax import Array

from .._compat import ClosedJaxpr, JaxprEqn, Literal, Var, bind_equation, eval_jaxpr, open_jaxpr
from .analysis import StepAnalysis
from .diagnostics import Path
from .hidden_group import HiddenGroup, find_hidden_groups_from_minfo
from .module_info import ModuleInfo, extract_module_info

__all__ = ["HiddenPerturbation", "add_hidden_perturbation_from_minfo", "add_hidden_perturbation_in_module"]


class HiddenPerturbation(NamedTuple):
    """The perturbed step.

    Attributes:
      perturb_jaxpr: the step's jaxpr with one more input for each hidden state, after its own.
      perturb_hidden_paths, perturb_hidden_states: the states, in the order of these inputs.
    """

    perturb_jaxpr: ClosedJaxpr
    perturb_hidden_paths: list[Path]
    perturb_hidden_states: list[brainstate.State]

    def init_perturb_data(self) -> list[Array]:
        """Terms of zero, one for each hidden state."""
        avals = open_jaxpr(self.perturb_jaxpr)[0].invars[-len(self.perturb_hidden_paths) :]
        return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in avals]

    def eval_jaxpr(self, inputs: Sequence[Any], perturb_data: Sequence[Any]) -> list[Any]:
        """Run the perturbed step on the flat inputs of the step and one term for each hidden state."""
        jaxpr, consts = open_jaxpr(self.perturb_jaxpr)
        return eval_jaxpr(jaxpr, consts, *inputs, *perturb_data)

    def dict(self) -> dict[str, Any]:
        """All fields by name."""
        return self._asdict()


def add_hidden_perturbation_from_minfo(
    minfo: ModuleInfo,
    *,
    groups: Sequence[HiddenGroup] | None = None,
    analysis: StepAnalysis | None = None,
) -> HiddenPerturbation:
    """The perturbed version of a traced step."""
    analysis = analysis or StepAnalysis(minfo)
    groups = find_hidden_groups_from_minfo(minfo, analysis=analysis)[0] if groups is None else groups
    paths = list(analysis.hidden)
    jaxpr = minfo.jaxpr
    perturber = _Perturber(analysis, groups, paths)
    avals = [v.aval for v in jaxpr.invars] + [analysis.hidden[p][0].aval for p in paths]
    closed = jax.make_jaxpr(perturber.run)(*avals)
    return HiddenPerturbation(closed, paths, [minfo.retrieved_model_states[p] for p in paths])


def add_hidden_perturbation_in_module(model: brainstate.nn.Module, *args: Any, **kwargs: Any) -> HiddenPerturbation:
    """The perturbed version of a brainstate module's step."""
    return add_hidden_perturbation_from_minfo(extract_module_info(model, *args, **kwargs))


class _Perturber:
    """Runs the step keeping, between the states of a group, the values that their mates see: those without terms."""

    def __init__(self, analysis: StepAnalysis, groups: Sequence[HiddenGroup], paths: Sequence[Path]):
        self.minfo = analysis.minfo
        self.paths = paths
        self.group_of = {v: g.index for g in groups for v in g.hidden_outvars}
        # The equations between the states of each group: those that need the values without terms.
        cut = analysis.boundary_results.__contains__
        self.inside: dict[int, set[int]] = {}
        for group in groups:
            if len(group.hidden_outvars) > 1:
                for i in analysis.indexed.ancestors(group.hidden_outvars, cut):
                    self.inside.setdefault(i, set()).add(group.index)

    def run(self, *args: Any) -> list[Any]:
        jaxpr = self.minfo.jaxpr
        flat, terms = args[: len(jaxpr.invars)], args[len(jaxpr.invars) :]
        term_of = {self.minfo.hidden_path_to_outvar[p]: t for p, t in zip(self.paths, terms, strict=True)}
        env: dict[Var, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*self.minfo.consts, *flat), strict=True))
        within: dict[tuple[Var, int], Any] = {}

        def read(atom: Any, group: int | None = None) -> Any:
            if isinstance(atom, Literal):
                return atom.val
            return within.get((atom, group), env[atom]) if group is not None else env[atom]

        def run_equation(eqn: JaxprEqn, group: int | None) -> list[Any]:
            return bind_equation(eqn, [read(v, group) for v in eqn.invars])

        for i, eqn in enumerate(jaxpr.eqns):
            results = run_equation(eqn, None)
            for group in sorted(self.inside.get(i, ())):
                if any(isinstance(v, Var) and (v, group) in within for v in eqn.invars):
                    within.update(
                        ((v, group), value) for v, value in zip(eqn.outvars, run_equation(eqn, group), strict=True)
                    )
            for v, value in zip(eqn.outvars, results, strict=True):
                if v in term_of:
                    raw = within.setdefault((v, self.group_of[v]), value)
                    value = raw + term_of[v]
                env[v] = value
        return [read(v) for v in jaxpr.outvars]
