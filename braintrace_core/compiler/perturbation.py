"""Perturbation: the step with a term added to every hidden state, so that a gradient with respect to it is ``dL/dh``.

The terms of one group do not act on the group's other states inside the same step (an LSTM's ``c`` on its ``h``): the
trace of each state already holds that path, and counting it in the signal too would count it twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import brainstate
import jax.numpy as jnp
from jax import Array

from .._compat import ClosedJaxpr, JaxprEqn, Var, add_equation, close_jaxpr, eval_jaxpr, new_jaxpr, open_jaxpr
from .analysis import StepAnalysis
from .checks import check_leaf
from .diagnostics import Path, spell
from .hidden_group import HiddenGroup, find_hidden_groups_from_minfo
from .module_info import ModuleInfo
from .tracing import extract_module_info

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
        names = list(map(spell, self.perturb_hidden_paths))
        if len(perturb_data) != len(names):
            raise ValueError(
                f"The step takes a term for each of {len(names)} hidden state(s) ({', '.join(names)}) and was given "
                f"{len(perturb_data)}."
            )
        for name, term, var in zip(names, perturb_data, jaxpr.invars[-len(names) :], strict=True):
            check_leaf(f"term of '{name}'", term, var.aval)
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
    terms = [Var(analysis.hidden[p][0].aval) for p in paths]
    closed = _Perturber(analysis, groups).run(dict(zip((analysis.hidden[p][1] for p in paths), terms, strict=True)))
    return HiddenPerturbation(closed, paths, [minfo.retrieved_model_states[p] for p in paths])


def add_hidden_perturbation_in_module(model: brainstate.nn.Module, *args: Any, **kwargs: Any) -> HiddenPerturbation:
    """The perturbed version of a brainstate module's step."""
    return add_hidden_perturbation_from_minfo(extract_module_info(model, *args, **kwargs))


class _Perturber:
    """Writes the step anew, keeping for the states of a group what they see of one another: values without terms."""

    def __init__(self, analysis: StepAnalysis, groups: Sequence[HiddenGroup]) -> None:
        self.minfo = analysis.minfo
        self.group_of = {v: g.index for g in groups for v in g.hidden_outvars}
        # The equations between the states of each group: those that need the values without terms.
        cut = analysis.boundary_results.__contains__
        self.inside: dict[int, set[int]] = {}
        for group in groups:
            if len(group.hidden_outvars) > 1:
                for i in analysis.indexed.ancestors(group.hidden_outvars, cut):
                    self.inside.setdefault(i, set()).add(group.index)

    def run(self, terms: dict[Var, Var]) -> ClosedJaxpr:
        """The step with a term added to each hidden state, as further inputs (hidden variable -> term)."""
        jaxpr = self.minfo.jaxpr
        moved: dict[Var, Var] = {}  # hidden state -> the same with its term
        within: dict[tuple[Var, int], Var] = {}  # (variable, group) -> what the group's own states see of it
        eqns: list[JaxprEqn] = []
        for i, eqn in enumerate(jaxpr.eqns):
            eqns.append(eqn.replace(invars=[moved.get(v, v) if isinstance(v, Var) else v for v in eqn.invars]))
            for group in sorted(self.inside.get(i, ())):
                if any(isinstance(v, Var) and (v, group) in within for v in eqn.invars):
                    seen = [within.get((v, group), moved.get(v, v)) if isinstance(v, Var) else v for v in eqn.invars]
                    outvars = [Var(v.aval) for v in eqn.outvars]
                    eqns.append(eqn.replace(invars=seen, outvars=outvars))
                    within.update(((v, group), new) for v, new in zip(eqn.outvars, outvars, strict=True))
            for v in eqn.outvars:
                if v in terms:
                    raw = within.setdefault((v, self.group_of[v]), v)
                    moved[v] = Var(v.aval)
                    eqns.append(add_equation(raw, terms[v], moved[v]))
        outvars = [moved.get(v, v) if isinstance(v, Var) else v for v in jaxpr.outvars]
        wider = new_jaxpr(jaxpr.constvars, [*jaxpr.invars, *terms.values()], outvars, eqns)
        return close_jaxpr(wider, self.minfo.consts)
