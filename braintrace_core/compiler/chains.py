"""Processing chains: what stands between parameters and the operand of an operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from .._compat import Jaxpr, Primitive, Var, eval_jaxpr
from .analysis import StepAnalysis
from .diagnostics import Path

__all__ = ["ProcessingChain", "find_chain"]


class ProcessingChain(tuple[Primitive, ...]):
    """The primitives between parameters and an operand, in order and without repetition, and the way to run them.

    A tuple of primitives, empty where a parameter is used as it is.

    Attributes:
      jaxpr: ``parameter leaves -> (operand,)``.
      consts: values of its constants.
      variables: the leaves' variables in the step's jaxpr.
      paths: the path of the parameter that each leaf belongs to.
      leaf_indices: which leaf of that parameter it is.
    """

    jaxpr: Jaxpr
    consts: list[Any]
    variables: tuple[Var, ...]
    paths: tuple[Path, ...]
    leaf_indices: tuple[int, ...]

    def __new__(cls, jaxpr: Jaxpr, consts: list[Any], paths: Sequence[Path], leaf_indices: Sequence[int]) -> Any:
        """Collect the primitives of ``jaxpr``."""
        self = super().__new__(cls, dict.fromkeys(eqn.primitive for eqn in jaxpr.eqns))
        self.jaxpr, self.consts = jaxpr, consts
        self.variables = tuple(jaxpr.invars)
        self.paths, self.leaf_indices = tuple(paths), tuple(leaf_indices)
        return self

    def evaluate(self, *leaves: Any) -> Any:
        """The operand that these parameter leaves give."""
        (operand,) = eval_jaxpr(self.jaxpr, self.consts, *leaves)
        return operand

    def pull_back(self, leaves: Sequence[Any], gradient: Any) -> list[Any]:
        """The gradient with respect to each leaf from the gradient with respect to the operand."""
        if not self.jaxpr.eqns:
            return [gradient]
        _, vjp = jax.vjp(self.evaluate, *leaves)
        return list(vjp(gradient))


def find_chain(analysis: StepAnalysis, operand: Any) -> ProcessingChain | None:
    """The chain behind ``operand``; None if it is not made of parameters alone."""
    if not analysis.depends.is_parameter(operand):
        return None
    minfo = analysis.minfo
    leaves = analysis.indexed.in_order(analysis.depends.parameters(operand))
    part = analysis.indexed.part(leaves, [operand])
    values = dict(zip(minfo.jaxpr.constvars, minfo.consts, strict=True))
    paths = [minfo.invar_to_weight_path[v] for v in leaves]
    indices = [minfo.weight_path_to_invars[p].index(v) for p, v in zip(paths, leaves, strict=True)]
    return ProcessingChain(part, [values[v] for v in part.constvars], paths, indices)
