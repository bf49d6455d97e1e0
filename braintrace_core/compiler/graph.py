"""Graph: the compiled step, everything that the passes found, and the pure functions that run it."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import brainstate

from .._compat import Var
from ..errors import CompilationError
from .analysis import StepAnalysis
from .control_flow import ControlFlowPolicy
from .diagnostics import CompilationRecord, DiagnosticKind, DiagnosticLevel, Path, Recorder, spell
from .draw import render_svg
from .factors import FactorPlan, Factors, plan_factors
from .hidden_group import HiddenGroup, find_hidden_groups_from_minfo
from .module_info import ModuleInfo
from .perturbation import HiddenPerturbation, add_hidden_perturbation_from_minfo
from .relations import HiddenParamOpRelation, find_hidden_param_op_relations_from_minfo
from .report import render_report
from .tracing import extract_module_info, extract_step_info

__all__ = ["ETraceGraph", "compile_etrace_graph", "compile_step_graph"]


class _GraphFields(NamedTuple):
    module_info: ModuleInfo
    hidden_groups: list[HiddenGroup]
    hid_path_to_group: dict[Path, HiddenGroup]
    hidden_param_op_relations: list[HiddenParamOpRelation]
    hidden_perturb: HiddenPerturbation | None
    diagnostics: tuple[CompilationRecord, ...] = ()


class ETraceGraph(_GraphFields):
    """Which parameter acts on which hidden state of a step, through what, and why not where not.

    Attributes:
      module_info: the traced step.
      hidden_groups, hid_path_to_group: its hidden groups, and the group of each hidden state.
      hidden_param_op_relations: its relations, in the order of the equations.
      hidden_perturb: the perturbed step; None if it was not asked for.
      diagnostics: the compiler's records, in the order in which they were made.
    """

    @cached_property
    def factor_plan(self) -> FactorPlan:
        """How the factors of a step are computed."""
        return plan_factors(StepAnalysis(self.module_info), self.hidden_groups, self.hidden_param_op_relations)

    def step_with_factors(
        self, *args: Any, old_state_vals: Sequence[Any] | None = None, **kwargs: Any
    ) -> tuple[Any, list[Any], Factors]:
        """One step: ``(outputs, new state values, factors)``, a pure function of its arguments.

        Args:
          *args, **kwargs: the step's arguments, as when it was compiled.
          old_state_vals: a value for each of ``module_info.compiled_model_states``; their own if not given.
        """
        plan = self.factor_plan
        wider = self.module_info.add_jaxpr_outs(plan.variables)
        outputs, states, extra = wider.jaxpr_call(*args, old_state_vals=old_state_vals, **kwargs)
        values = dict(zip(plan.variables, extra, strict=True))
        return outputs, states, plan.evaluate(values.__getitem__)

    def call_hidden_perturb(
        self,
        args: Sequence[Any],
        perturb_data: Sequence[Any],
        old_state_vals: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, list[Any]]:
        """Run the perturbed step: ``(outputs, new state values)``.

        Args:
          args: the step's positional arguments.
          perturb_data: a term for each hidden state, in the order of ``hidden_perturb.perturb_hidden_paths``.
          old_state_vals: a value for each of ``module_info.compiled_model_states``; their own if not given.
          **kwargs: the step's keyword arguments.
        """
        if self.hidden_perturb is None:
            raise ValueError("The graph was compiled without its perturbed step: pass `include_hidden_perturb=True`.")
        minfo = self.module_info
        if old_state_vals is None:
            old_state_vals = [state.value for state in minfo.compiled_model_states]
        inputs = minfo.flatten_inputs(args, kwargs, old_state_vals)
        return minfo.unflatten_outputs(self.hidden_perturb.eval_jaxpr(inputs, perturb_data))

    def explain(
        self,
        *,
        weight_path: Path | None = None,
        hidden_path: Path | None = None,
        kind: DiagnosticKind | None = None,
    ) -> list[CompilationRecord]:
        """The records about a parameter, a hidden state or a kind (all that are given), in order."""
        return [
            record
            for record in self.diagnostics
            if (weight_path is None or record.concerns(weight_path))
            and (hidden_path is None or hidden_path in record.hidden_paths)
            and (kind is None or record.kind is kind)
        ]

    def report(self) -> str:
        """A table for people: hidden groups, relations, and how each parameter of the model learns.

        >>> import jax.numpy as jnp
        >>> def step(params, h, x):
        ...     return jnp.tanh(x @ params + 0.9 * h), h
        >>> graph = compile_step_graph(step, jnp.ones((3, 4)), jnp.zeros(4), jnp.zeros(3))
        >>> print(graph.report())  # doctest: +ELLIPSIS
        Hidden groups (1) ---...
          group  states  shape  states per unit  passes  traces
          0      carry   (4,)   1                1       exact
        ...
        """
        return render_report(self)

    def draw(self, path: str | os.PathLike[str] | None = None) -> str:
        """The same as a picture: SVG text, also written to ``path`` if it is given.

        Boxes are inputs, parameters with their operators, hidden groups and outputs; edges are green where credit is
        carried through time, dashed amber where it ends with the window, grey where only the present output is
        concerned. Hover over a box or an edge for the compiler's reason.
        """
        picture = render_svg(self)
        if path is not None:
            pathlib.Path(path).write_text(picture, encoding="utf-8")
        return picture

    def dict(self) -> dict[str, Any]:
        """All fields by name."""
        return self._asdict()

    def __repr__(self) -> str:
        groups = "; ".join(f"{g.index}: {', '.join(map(spell, g.hidden_paths))}" for g in self.hidden_groups)
        relations = "\n  ".join(map(repr, self.hidden_param_op_relations))
        return f"ETraceGraph(groups {groups}\n  {relations})"


def compile_etrace_graph(
    model: brainstate.nn.Module,
    *args: Any,
    include_hidden_perturb: bool = True,
    control_flow: ControlFlowPolicy | None = None,
    lift: bool = True,
    **kwargs: Any,
) -> ETraceGraph:
    """Compile one step of a brainstate module.

    Main arguments:
      model: the module, its states initialised; ``model(*args, **kwargs)`` is one step.
      *args, **kwargs: example inputs of one step.

    Other arguments:
      include_hidden_perturb: whether to build the perturbed step.
      control_flow: what to do with control flow around trainable operations.
      lift: whether ordinary operations on parameters become operators.

    >>> import brainstate, jax.numpy as jnp
    >>> cell = brainstate.nn.GRUCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(cell)
    >>> compile_etrace_graph(cell, jnp.zeros(3)).hidden_groups
    [HiddenGroup(0: h; shape (4,), 1 state(s) a unit)]
    """
    recorder = Recorder()
    minfo = extract_module_info(model, *args, control_flow=control_flow, lift=lift, recorder=recorder, **kwargs)
    return _compile(minfo, include_hidden_perturb, recorder)


def compile_step_graph(
    step: Callable[..., tuple[Any, Any]],
    params: Any,
    carry: Any,
    *args: Any,
    hidden: Any = None,
    include_hidden_perturb: bool = True,
    control_flow: ControlFlowPolicy | None = None,
    lift: bool = True,
    **kwargs: Any,
) -> ETraceGraph:
    """Compile a plain function ``step(params, carry, *args, **kwargs) -> (carry, out)``.

    Only shapes and dtypes of the arguments are read. ``hidden``, bools in the carry's structure, says which leaves of
    the carry are hidden states; others (running statistics) are carried along. None stands for all that are floating.
    See :func:`compile_etrace_graph` for the other arguments.

    >>> import jax, jax.numpy as jnp
    >>> def step(params, h, x):
    ...     h = jnp.tanh(x @ params["w"] + params["decay"] * h)
    ...     return h, h
    >>> params = {"w": jnp.ones((3, 4)), "decay": jnp.ones(4)}
    >>> graph = compile_step_graph(step, params, jnp.zeros(4), jnp.zeros(3))
    >>> [relation.path for relation in graph.hidden_param_op_relations]
    [('params', 'w'), ('params', 'decay')]
    """
    recorder = Recorder()
    minfo = extract_step_info(
        step, params, carry, *args, hidden=hidden, control_flow=control_flow, lift=lift, recorder=recorder, **kwargs
    )
    return _compile(minfo, include_hidden_perturb, recorder)


def _compile(minfo: ModuleInfo, include_hidden_perturb: bool, recorder: Recorder) -> ETraceGraph:
    analysis = StepAnalysis(minfo)
    groups, path_to_group = find_hidden_groups_from_minfo(minfo, analysis=analysis, recorder=recorder)
    relations = find_hidden_param_op_relations_from_minfo(minfo, path_to_group, analysis=analysis, recorder=recorder)
    if not relations:
        raise CompilationError(_nothing_learns(recorder))
    plan = plan_factors(analysis, groups, relations, recorder)
    perturbed = None
    if include_hidden_perturb:
        perturbed = add_hidden_perturbation_from_minfo(minfo, groups=groups, analysis=analysis)
    _record_unseen(minfo, recorder)
    graph = ETraceGraph(minfo, groups, path_to_group, relations, perturbed, recorder.records)
    graph.__dict__["factor_plan"] = plan  # already made: spares the cached property the work
    return graph


def _record_unseen(minfo: ModuleInfo, recorder: Recorder) -> None:
    """Leave a record of every parameter that no pass had a word about."""
    used = {v for eqn in minfo.jaxpr.eqns for v in eqn.invars if isinstance(v, Var)}
    used.update(v for v in minfo.jaxpr.outvars[: minfo.num_var_out] if isinstance(v, Var))
    concerned = {path for record in recorder.records for path in record.weight_paths}
    for path, state in minfo.retrieved_model_states.items():
        if not isinstance(state, brainstate.ParamState) or path in concerned:
            continue
        if used.isdisjoint(minfo.weight_path_to_invars.get(path, ())):
            recorder.warn(
                DiagnosticKind.PARAMETER_UNUSED,
                f"The step does not use '{spell(path)}', so it gets no gradient.",
                weight_path=path,
            )
        else:
            recorder.warn(
                DiagnosticKind.PARAMETER_WITHOUT_OPERATOR,
                f"'{spell(path)}' meets no input or state in an operator, so no trace is kept for it and it learns "
                "within the window. Use an operator of `braintrace_core`, or compile with `lift=True`.",
                weight_path=path,
            )


def _nothing_learns(recorder: Recorder) -> str:
    records = [r for r in recorder.records if r.level is not DiagnosticLevel.INFO or r.kind in _REASONS]
    return "\n".join(
        [
            "No parameter of the model acts on a hidden state in a way that a trace can follow, so nothing can be "
            "learnt online. Feed a hidden state from a parameter (`x @ w`, `decay * h`, ...) inside the step.",
            *(f"  - {record.message}" for record in records),
        ]
    )


_REASONS = frozenset({DiagnosticKind.RELATION_EXCLUDED_NON_TEMPORAL})
