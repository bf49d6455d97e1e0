"""SnAp: RTRL's influence, kept only where a parameter acts within n steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._compat import Var
from ..compiler.graph import ETraceGraph
from ..ops.dtypes import accumulation_dtype, storage_dtype
from .factors import Signal, WindowFactors
from .influence import HiddenVector, parameter_variables, step_map
from .plan import RulePlan
from .rule import OperandGradients, Rule, Traces, as_plan
from .sparsity import StepStructure, colour_rows

__all__ = ["SnAp"]


@dataclass(frozen=True)
class SnAp(Rule):
    """Sparse n-step approximation (Menick et al., 2021): the influence on hidden values reached within ``n`` steps.

    With ``n`` large enough it is RTRL, and exact. The structure is that of one example's step: sparse weights and
    masks make neighbourhoods small, and the passes of differentiation few; with dense recurrent weights ``n = 2``
    reaches everything, and ``n = 1`` takes as many passes a step as there are hidden values.

    Attributes:
      n: how many steps a parameter's reach is followed.
    """

    n: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise ValueError(f"SnAp needs a whole number n >= 1, got {self.n!r}.")

    @property
    def follows_parameters(self) -> bool:
        return True

    def init(self, graph: ETraceGraph | RulePlan, batch_size: int, dtype: Any = None) -> Traces:
        return {
            kept.name: jnp.zeros((batch_size, *v.aval.shape, kept.rows.shape[-1]), storage_dtype(dtype, v.aval.dtype))
            for v, kept in self._layout(as_plan(graph)).kept.items()
        }

    def advance(self, traces: Traces, factors: WindowFactors) -> Traces:
        plan = factors.plan
        layout = self._layout(plan)
        vector = layout.vector
        run, now = step_map(vector, factors)
        frontier = factors.frontier_values()
        theta = [frontier[v] for v in layout.kept]
        colour, count = layout.colours
        colours_kept = [
            np.where(kept.direct, np.append(colour, np.int32(-1))[kept.rows], np.int32(-1))
            for kept in layout.kept.values()
        ]

        def example(old: list[Array], at: Any) -> list[Array]:
            _, states, reset = at
            z = vector.of_states(dict(zip(plan.program.state_invars, states, strict=True)), after=False)
            _, pull_back = jax.vjp(lambda z, theta: run(z, theta, at), z, theta)

            def one_colour(direct: list[Array], c: Array) -> tuple[list[Array], Array]:
                through, of_theta = pull_back((jnp.asarray(colour) == c).astype(z.dtype))
                added = [
                    jnp.where(jnp.asarray(mine) == c, g[..., None], d)
                    for d, mine, g in zip(direct, colours_kept, of_theta, strict=True)
                ]
                return added, through

            zeros = [
                jnp.zeros((*t.shape, kept.rows.shape[-1]), t.dtype)
                for t, kept in zip(theta, layout.kept.values(), strict=True)
            ]
            direct, through = lax.scan(one_colour, zeros, jnp.arange(count, dtype=jnp.int32))
            between = jnp.where(jnp.asarray(layout.structure.hidden), through[colour], 0)
            if reset is not None:
                between = jnp.where(reset, jnp.zeros_like(between), between)
            between = jnp.pad(between, ((0, 1), (0, 1)))
            return [
                _carry(kept.rows, between.astype(e.dtype), e) + d.astype(e.dtype)
                for kept, e, d in zip(layout.kept.values(), old, direct, strict=True)
            ]

        def step(old: list[Array], at: Any) -> tuple[list[Array], None]:
            return jax.vmap(example)(old, at), None

        wide = [
            traces[kept.name].astype(accumulation_dtype(traces[kept.name].dtype, v.aval.dtype))
            for v, kept in layout.kept.items()
        ]
        new, _ = lax.scan(step, wide, now)
        return {
            kept.name: value.astype(traces[kept.name].dtype)
            for kept, value in zip(layout.kept.values(), new, strict=True)
        }

    def gradient(self, traces: Traces, signal: Signal) -> OperandGradients:
        layout = self._layout(signal.plan)
        weights = jnp.pad(layout.vector.of_signal(signal), ((0, 0), (0, 1)))
        found = {}
        for v, kept in layout.kept.items():
            trace = traces[kept.name].astype(v.aval.dtype)
            found[kept.name] = (weights[:, kept.rows].astype(v.aval.dtype) * trace).sum((0, -1))
        return found

    def _layout(self, plan: RulePlan) -> _Layout:
        return plan.once(("snap", self.n), lambda: _Layout(plan, self.n))


class _Kept(NamedTuple):
    """What is kept of one variable's influence.

    Attributes:
      name: of its trace.
      rows: the hidden values kept for each element, ``(*shape, K)``; axes along which they do not change have size
        one, and the number of hidden values stands where there are fewer than ``K``.
      direct: whether the element acts on them within one step.
    """

    name: str
    rows: np.ndarray
    direct: np.ndarray


class _Layout:
    """Which influences are kept, and how they are read."""

    def __init__(self, plan: RulePlan, n: int):
        self.plan, self.n = plan, n
        self.vector = HiddenVector(plan)
        self.structure = StepStructure(plan)

    @cached_property
    def _sets(self) -> dict[Var, tuple[np.ndarray, np.ndarray]]:
        return self.structure.parameter_rows()

    @cached_property
    def kept(self) -> dict[Var, _Kept]:
        """For each variable, its name and the hidden values that its elements reach."""
        frontier, step = self.plan.program.schedule.frontier, self.structure.hidden.astype(np.float32)
        found = {}
        for v in parameter_variables(self.plan):
            direct, index = self._sets[v]
            reached = direct
            for _ in range(self.n - 1):
                reached = reached | (reached.astype(np.float32) @ step.T > 0)
            most = max(int(reached.sum(1).max(initial=0)), 1)
            table = np.full((len(reached), most), self.vector.size, np.int32)
            for i, row in enumerate(reached):
                members = np.nonzero(row)[0]
                table[i, : members.size] = members
            at_once = np.take_along_axis(np.pad(direct, ((0, 0), (0, 1))), table, axis=1)
            index = _without_repetition(index)
            found[v] = _Kept(f"parameter{frontier.index(v)}", table[index], at_once[index])
        return found

    @cached_property
    def colours(self) -> tuple[np.ndarray, int]:
        """Hidden values that share a pass: no column and no parameter depends on two of one colour."""
        hidden = self.structure.hidden.astype(np.float32)
        conflicts = hidden @ hidden.T > 0
        for sets, _ in self._sets.values():
            conflicts |= sets.T.astype(np.float32) @ sets.astype(np.float32) > 0
        np.fill_diagonal(conflicts, False)
        return colour_rows(conflicts)


def _carry(rows: np.ndarray, between: Array, trace: Array) -> Array:
    """``sum_l between[rows_k, rows_l] trace_l`` for each element."""
    count = rows.shape[-1]
    if all(size == 1 for size in rows.shape[:-1]):
        small = between[rows.reshape(count)[:, None], rows.reshape(count)[None]]
        return trace @ small.T
    small = between[rows[..., :, None], rows[..., None, :]]
    if count == 1:
        return small[..., 0] * trace
    return jnp.einsum("...kl,...l->...k", jnp.broadcast_to(small, (*trace.shape[:-1], count, count)), trace)


def _without_repetition(index: np.ndarray) -> np.ndarray:
    """The same with axes along which it does not change cut to size one."""
    for axis in range(index.ndim):
        first = index.take([0], axis=axis)
        if (index == first).all():
            index = first
    return index
