"""Relations: which parameter acts through which operator on which hidden group, and why not where it does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import brainstate
from jax import Array

from .._compat import Jaxpr, JaxprEqn, Literal, Primitive, Var, eval_jaxpr
from ..errors import CompilationError
from .analysis import StepAnalysis, operator_result
from .chains import ProcessingChain, find_chain
from .colouring import locate_operator
from .diagnostics import DiagnosticKind, Path, Recorder, spell
from .hidden_group import HiddenGroup, find_hidden_groups_from_minfo
from .module_info import ModuleInfo, is_differentiable
from .paths import PathClassification, Reach, blocking_operators
from .tracing import extract_module_info

__all__ = [
    "HiddenParamOpRelation",
    "find_hidden_param_op_relations_from_jaxpr",
    "find_hidden_param_op_relations_from_minfo",
    "find_hidden_param_op_relations_from_module",
]


class HiddenParamOpRelation(NamedTuple):
    """One operator's equation, its parameters, and the hidden groups that it feeds: ``h = f(y), y = op(x, theta)``.

    Attributes:
      primitive: the ETP primitive.
      x_var: the input's variable; None for an element-wise operator or a literal.
      y_var: the result's variable.
      hidden_groups: the groups that ``y`` feeds.
      y_to_hidden_group_jaxprs: for each of them, ``y -> new states``, all other values constants.
      connected_hidden_paths: the hidden states that ``y`` feeds.
      eqn_params: the equation's static parameters.
      path_classification: hidden path -> class of the paths to it.
      trainable_vars, trainable_paths, trainable_leaf_indices, trainable_param_states, trainable_processing_chains: by
        the primitive's key names, the operand's variable and the first parameter behind it; the chain knows them all.
    """

    primitive: Primitive
    x_var: Var | None
    y_var: Var
    hidden_groups: list[HiddenGroup]
    y_to_hidden_group_jaxprs: list[Jaxpr]
    connected_hidden_paths: list[Path]
    eqn_params: dict[str, Any]
    path_classification: dict[Path, PathClassification] = {}  # noqa: RUF012
    trainable_vars: dict[str, Var] = {}  # noqa: RUF012
    trainable_paths: dict[str, Path] = {}  # noqa: RUF012
    trainable_leaf_indices: dict[str, int] = {}  # noqa: RUF012
    trainable_param_states: dict[str, brainstate.State] = {}  # noqa: RUF012
    trainable_processing_chains: dict[str, ProcessingChain] = {}  # noqa: RUF012

    @property
    def x(self) -> Var | None:
        """The input's variable."""
        return self.x_var

    @property
    def y(self) -> Var:
        """The result's variable."""
        return self.y_var

    @property
    def path(self) -> Path | None:
        """The path of the first trainable operand's parameter."""
        return next(iter(self.trainable_paths.values()), None)

    def y_to_hidden_groups(
        self, y_val: Any, const_vals: Sequence[Sequence[Any]], concat_hidden_vals: bool = True
    ) -> list[Any]:
        """For each group, its new states as a function of ``y``.

        Args:
          y_val: the operator's result.
          const_vals: for each group, values for the constvars of its jaxpr.
          concat_hidden_vals: stack the states of a group on a last axis, rather than give a list.
        """
        results: list[list[Array] | Array] = []
        for group, jaxpr, consts in zip(self.hidden_groups, self.y_to_hidden_group_jaxprs, const_vals, strict=True):
            values = eval_jaxpr(jaxpr, list(consts), y_val)
            results.append(group.concat_hidden(values) if concat_hidden_vals else values)
        return results

    def dict(self) -> dict[str, Any]:
        """All fields by name."""
        return self._asdict()

    def __repr__(self) -> str:
        trains = ", ".join(f"{key}={spell(path)}" for key, path in self.trainable_paths.items())
        states = ", ".join(map(spell, self.connected_hidden_paths))
        return f"HiddenParamOpRelation({self.primitive.name}({trains}) -> {states})"


def find_hidden_param_op_relations_from_minfo(
    minfo: ModuleInfo,
    hid_path_to_group: dict[Path, HiddenGroup],
    *,
    analysis: StepAnalysis | None = None,
    recorder: Recorder | None = None,
) -> list[HiddenParamOpRelation]:
    """The relations of a traced step, in the order of its equations."""
    analysis, recorder = analysis or StepAnalysis(minfo), recorder or Recorder()
    groups = sorted({g.index: g for g in hid_path_to_group.values()}.values(), key=lambda g: g.index)
    finder = _Finder(analysis, groups, hid_path_to_group, recorder)
    return [relation for eqn in analysis.operators if (relation := finder.relation(eqn)) is not None]


def find_hidden_param_op_relations_from_module(
    model: brainstate.nn.Module, *args: Any, **kwargs: Any
) -> list[HiddenParamOpRelation]:
    """The relations of a brainstate module; see :func:`find_hidden_param_op_relations_from_minfo`."""
    minfo = extract_module_info(model, *args, **kwargs)
    _, path_to_group = find_hidden_groups_from_minfo(minfo)
    return find_hidden_param_op_relations_from_minfo(minfo, path_to_group)


def find_hidden_param_op_relations_from_jaxpr(
    minfo: ModuleInfo, jaxpr: Jaxpr, hid_path_to_group: dict[Path, HiddenGroup]
) -> list[HiddenParamOpRelation]:
    """The relations of the operators that ``jaxpr``, a part of the step's own, contains."""
    results = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    relations = find_hidden_param_op_relations_from_minfo(minfo, hid_path_to_group)
    return [relation for relation in relations if relation.y_var in results]


class _Finder:
    def __init__(
        self,
        analysis: StepAnalysis,
        groups: list[HiddenGroup],
        group_of: dict[Path, HiddenGroup],
        recorder: Recorder,
    ):
        self.analysis = analysis
        self.group_of = group_of
        self.recorder = recorder
        self.reach = Reach(analysis, groups)

    def relation(self, eqn: JaxprEqn) -> HiddenParamOpRelation | None:
        """The relation of one operator, or None with a record of the reason."""
        primitive, y = eqn.primitive, operator_result(eqn)
        if primitive.multiple_results:
            self.recorder.info(
                DiagnosticKind.MULTI_OUTPUT_PRIMITIVE_DETECTED,
                f"`{primitive.name}` has {len(eqn.outvars)} results; number {primitive.y_index} is its y.",
                primitive=primitive,
            )
        chains = self.chains(eqn)
        if chains is None:
            return None
        paths = tuple(dict.fromkeys(path for chain in chains.values() for path in chain.paths))
        about = {"primitive": primitive, "weight_path": paths[0], "weight_paths": paths, "y_var": y}
        connected = self.connected(y, about)
        if not connected:
            return None
        classes = {p: self.reach.classify(y, p) for p in connected}
        groups = list({g.index: g for g in map(self.group_of.__getitem__, connected)}.values())
        self.record_included(about, classes, groups)
        operands = primitive.trainable_operands(eqn.params)
        states = self.analysis.minfo.retrieved_model_states
        x = None if primitive.x_index is None else eqn.invars[primitive.x_index]
        return HiddenParamOpRelation(
            primitive=primitive,
            x_var=None if isinstance(x, Literal) else x,
            y_var=y,
            hidden_groups=groups,
            y_to_hidden_group_jaxprs=[self.analysis.part_from([y], g.hidden_outvars) for g in groups],
            connected_hidden_paths=connected,
            eqn_params=dict(eqn.params),
            path_classification=classes,
            trainable_vars={key: eqn.invars[operands[key]] for key in chains},
            trainable_paths={key: chain.paths[0] for key, chain in chains.items()},
            trainable_leaf_indices={key: chain.leaf_indices[0] for key, chain in chains.items()},
            trainable_param_states={key: states[chain.paths[0]] for key, chain in chains.items()},
            trainable_processing_chains=chains,
        )

    def chains(self, eqn: JaxprEqn) -> dict[str, ProcessingChain] | None:
        """The chain behind each trainable operand; None (and a record) if there is none behind the first."""
        chains: dict[str, ProcessingChain] = {}
        for i, (key, index) in enumerate(eqn.primitive.trainable_operands(eqn.params).items()):
            chain = find_chain(self.analysis, eqn.invars[index])
            if chain is None:
                excluded = (
                    DiagnosticKind.RELATION_EXCLUDED_NO_PARAMSTATE
                    if i == 0
                    else DiagnosticKind.TRAINABLE_INVAR_NOT_PARAMSTATE
                )
                self.recorder.warn(
                    excluded,
                    f"The {key} of `{eqn.primitive.name}` is not made of parameters alone, so no trace is kept for it. "
                    "If it should learn online, compute it from parameters (and constants) only.",
                    primitive=eqn.primitive,
                    key=key,
                    y_var=operator_result(eqn),
                )
                if i == 0:
                    return None
                continue
            chains[key] = chain
            if len(set(chain.paths)) < len(chain.paths):
                self.recorder.info(
                    DiagnosticKind.PYTREE_WEIGHT_LEAF_AMBIGUOUS,
                    f"The {key} of `{eqn.primitive.name}` is made of several leaves of '{spell(chain.paths[0])}'; "
                    "`trainable_leaf_indices` names the first, gradients reach all.",
                    primitive=eqn.primitive,
                    weight_path=chain.paths[0],
                    leaf_indices=chain.leaf_indices,
                )
        return chains

    def connected(self, y: Var, about: dict[str, Any]) -> list[Path]:
        """The hidden states that ``y`` feeds directly and whose units it fits; a record says why if there are none."""
        name, direct = spell(about["weight_path"]), self.reach.directly(y)
        self.check_dtypes(direct, about)
        if not direct:
            self.record_unconnected(y, about)
            return []
        fed = [p for p in direct if self.feeds(y, p)]
        if not fed:
            self.recorder.info(
                DiagnosticKind.RELATION_EXCLUDED_NON_TEMPORAL,
                f"'{name}' acts on {', '.join(map(spell, direct))} only through operations without a derivative "
                "(comparisons, rounding, stop_gradient): it has no gradient there. Use a surrogate gradient if it "
                "should learn from them.",
                hidden_paths=direct,
                **about,
            )
        fitting = [p for p in fed if self.fits(y, p)]
        misfits = [p for p in fed if p not in fitting]
        if misfits:
            shapes = {spell(p): tuple(self.analysis.hidden[p][1].aval.shape) for p in misfits}
            self.recorder.warn(
                DiagnosticKind.RELATION_EXCLUDED_SHAPE_MISMATCH,
                f"'{name}' acts on {shapes} through a result of shape {tuple(y.aval.shape)} whose elements do not "
                "belong to single units there, so no trace is kept for this path; it learns within the window. Let "
                "each element of the result feed one unit, or use `rtrl`.",
                hidden_paths=misfits,
                **about,
            )
        return fitting

    def check_dtypes(self, paths: list[Path], about: dict[str, Any]) -> None:
        """Raise if a state that an operator acts on has no derivative."""
        for p in paths:
            aval = self.analysis.minfo.hidden_path_to_invar[p].aval
            if not is_differentiable(aval):
                raise CompilationError(
                    f"Parameter '{spell(about['weight_path'])}' acts on hidden state '{spell(p)}', whose dtype "
                    f"{aval.dtype} has no derivative. Keep it in a `brainstate.ShortTermState` if it needs no credit, "
                    "or give it a floating dtype."
                )

    def feeds(self, y: Var, path: Path) -> bool:
        """Whether a small change of ``y`` changes the hidden state directly."""
        return self.analysis.pattern(self.analysis.hidden[path][1], y) is not None

    def fits(self, y: Var, path: Path) -> bool:
        """Whether the elements of ``y`` belong to units of the hidden state."""
        group = self.group_of[path]
        out = self.analysis.hidden[path][1]
        located = locate_operator(group.components, group.hidden_outvars, y, {out: self.analysis.patterns[out]})
        return located is not None

    def record_unconnected(self, y: Var, about: dict[str, Any]) -> None:
        """Say why ``y`` reaches no hidden state directly."""
        name, ahead = spell(about["weight_path"]), self.reach.anyhow(y)
        if not ahead:
            self.recorder.info(
                DiagnosticKind.RELATION_EXCLUDED_NON_TEMPORAL,
                f"'{name}' reaches no hidden state: it acts on the present output only, and the gradient within "
                "the window is its whole gradient.",
                **about,
            )
            return
        blocking = blocking_operators(self.analysis, y)
        operands = [e.invars[i] for e in blocking for i in e.primitive.trainable_operands(e.params).values()]
        chains = [find_chain(self.analysis, operand) for operand in operands]
        weights = tuple(dict.fromkeys(p for chain in chains if chain is not None for p in chain.paths))
        names = ", ".join(f"'{spell(p)}'" for p in weights)
        self.recorder.warn(
            DiagnosticKind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT,
            f"'{name}' reaches {', '.join(map(spell, ahead))} only through the operators of {names}, which mix the "
            "units: no trace is kept and it learns within the window. Use a longer window, or `rtrl`.",
            hidden_paths=ahead,
            blocking_primitives=tuple(e.primitive.name for e in blocking),
            blocking_weight_paths=weights,
            path_classification={p: PathClassification.ALL_THROUGH_OTHER_ETP for p in ahead},
            **about,
        )

    def record_included(
        self, about: dict[str, Any], classes: dict[Path, PathClassification], groups: list[HiddenGroup]
    ) -> None:
        """Record a relation, and which of its paths the trace does not hold."""
        name = spell(about["weight_path"])
        about = {
            **about,
            "hidden_paths": list(classes),
            "hidden_group_indices": tuple(g.index for g in groups),
            "path_classification": dict(classes),
        }
        self.recorder.info(
            DiagnosticKind.RELATION_INCLUDED,
            f"'{name}' acts on {', '.join(map(spell, classes))} through `{about['primitive'].name}`.",
            **about,
        )
        partial = [p for p, c in classes.items() if c is PathClassification.MIXED]
        if partial:
            self.recorder.warn(
                DiagnosticKind.RELATION_PARTIAL_PATH,
                f"'{name}' also reaches {', '.join(map(spell, partial))} through other operators; the trace holds "
                "the direct path, the window the others.",
                **about,
            )
