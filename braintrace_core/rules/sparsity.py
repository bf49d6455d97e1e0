"""Structure of one step: which hidden values act on which, and which elements of parameters act on which hidden values.

Read off the index patterns between operators and the zeros of the operators themselves (sparse structures, masks in a
processing chain). One example at a time: the batch never couples. With the structure known, few passes of reverse
differentiation read the whole Jacobian: hidden values whose rows cannot be confused share a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compat import Var
from ..compiler.analysis import StepAnalysis
from ..compiler.module_info import is_differentiable
from ..compiler.schedule import Operator
from ..ops import is_boundary
from .influence import HiddenVector, parameter_variables
from .plan import RulePlan

__all__ = ["StepStructure", "colour_rows"]

# Zeros that are there for every value of the parameters are found by looking at a few random ones.
_DRAWS = 3
_ROWS = 64  # rows of an operator's Jacobian that are looked at together


class StepStructure:
    """Where the Jacobian of one step can be non-zero.

    Rows and columns are the numbers of :class:`HiddenVector`.
    """

    def __init__(self, plan: RulePlan):
        self.plan = plan
        self.vector = HiddenVector(plan)

    @cached_property
    def hidden(self) -> np.ndarray:
        """``(size, size)``: whether a hidden value after the step depends on one before it."""
        found = np.zeros((self.vector.size, self.vector.size), bool)
        for v, rows in self._rows(after=True):
            found |= _lift(rows, self._from_hidden(v), self.vector.size)
        return found

    def parameter_rows(self) -> dict[Var, tuple[np.ndarray, np.ndarray]]:
        """For each variable made of parameters: sets of hidden values, and which set each element acts on in a step.

        The sets are ``(sets, size)`` of bools, the elements' sets are indices of the variable's shape.
        """
        direct = set(self.plan.program.schedule.direct)
        found: dict[Var, tuple[np.ndarray, np.ndarray]] = {}
        for v in parameter_variables(self.plan):
            parts = [
                (self._support(operator, key), self._to_hidden[operator.y])
                for operator in self.plan.program.schedule.operators
                for key, operand in operator.operands.items()
                if operand is v and operator.y in self._to_hidden
            ]
            if v in direct or not parts:
                found[v] = np.ones((1, self.vector.size), bool), np.zeros(v.aval.shape, np.int64)
            else:
                found[v] = _sets_of(parts, v.aval.shape)
        return found

    @cached_property
    def _analysis(self) -> StepAnalysis:
        return StepAnalysis(self.plan.graph.module_info)

    @cached_property
    def _boundaries(self) -> list[Operator]:
        needed = self._analysis.patterns
        operators = self.plan.program.schedule.operators
        return [op for op in operators if is_boundary(op.eqn.primitive) and op.x is not None and op.x in needed]

    def _rows(self, *, after: bool) -> list[tuple[Var, np.ndarray]]:
        """For each hidden state's variable, pairs of one of its elements and its row, ``(pairs, 2)``."""
        found, start = [], 0
        for group in self.vector.groups:
            variables = group.hidden_outvars if after else group.hidden_invars
            components = group.components
            pairs: dict[int, list[np.ndarray]] = {}
            units = np.arange(int(np.prod(components.varshape, dtype=np.int64)))
            for state, slot, _ in components.items:
                elements = units * components.widths[state] + (slot or 0)
                pairs.setdefault(state, []).append(np.stack([elements, start + units], axis=1))
                start += units.size
            found += [(variables[state], np.concatenate(parts)) for state, parts in pairs.items()]
        return found

    def _pattern(self, value: Var, source: Var) -> np.ndarray | None:
        """``(size of value, size of source)``: dependence without crossing an operator."""
        pattern = self._analysis.pattern(value, source)
        if pattern is None or pattern.is_empty:
            return None
        found = np.full((_size(value), _size(source)), pattern.mixed)
        rows, columns, _ = pattern.listed()
        found[rows, columns] = True
        return found

    def _from_hidden(self, value: Var) -> np.ndarray:
        """``(size of value, hidden values)``: dependence on the states before the step."""
        found = np.zeros((_size(value), self.vector.size), bool)
        for v, pairs in self._rows(after=False):
            if (pattern := self._pattern(value, v)) is not None:
                found[:, pairs[:, 1]] |= pattern[:, pairs[:, 0]]
        for operator in self._boundaries:
            if (pattern := self._pattern(value, operator.y)) is not None:
                found |= _product(pattern, self._result_from_hidden(operator))
        return found

    def _result_from_hidden(self, operator: Operator) -> np.ndarray:
        if operator.y not in self._known_results:
            mixing = self._mixing(operator)
            self._known_results[operator.y] = _product(mixing, self._from_hidden(operator.x))
        return self._known_results[operator.y]

    @cached_property
    def _known_results(self) -> dict[Var, np.ndarray]:
        return {}

    @cached_property
    def _to_hidden(self) -> dict[Var, np.ndarray]:
        """For each operator's result, ``(hidden values, size of y)``: what its elements act on within the step."""
        found: dict[Var, np.ndarray] = {}
        for operator in reversed(self.plan.program.schedule.operators):
            y = operator.y
            reach = np.zeros((self.vector.size, _size(y)), bool)
            for v, pairs in self._rows(after=True):
                if (pattern := self._pattern(v, y)) is not None:
                    reach[pairs[:, 1]] |= pattern[pairs[:, 0]]
            for later in self._boundaries:
                if later.y in found and (pattern := self._pattern(later.x, y)) is not None:
                    reach |= _product(found[later.y], _product(self._mixing(later), pattern))
            if reach.any():
                found[y] = reach
        return found

    @cached_property
    def _frontiers(self) -> list[dict[Var, Any]]:
        """Values made of parameters, for some random parameters."""
        weights = self.plan.graph.module_info.weight_invars
        make = jax.jit(lambda values: list(self.plan.program.frontier(values).values()))
        names = self.plan.program.schedule.frontier
        draws = np.random.default_rng(0)
        return [dict(zip(names, make([_random(draws, v.aval) for v in weights]), strict=True)) for _ in range(_DRAWS)]

    def _draws(self, operator: Operator) -> list[list[Any]]:
        """The operator's operands for some random parameters, with a random ``x``."""
        x, draws = operator.eqn.primitive.x_index, np.random.default_rng(1)
        return [
            [
                _random(draws, operator.x.aval) if i == x else v
                for i, v in enumerate(self.plan.program.operand_values(operator, frontier))
            ]
            for frontier in self._frontiers
        ]

    def _mixing(self, operator: Operator) -> np.ndarray:
        """``(size of y, size of x)``: which elements of the result depend on which of the input."""
        if not is_differentiable(operator.x.aval):
            return np.zeros((_size(operator.y), _size(operator.x)), bool)
        return self._jacobian_support(operator, operator.eqn.primitive.x_index)

    def _support(self, operator: Operator, key: str) -> np.ndarray:
        """``(size of y, size of operand)``: which elements of the result depend on which of an operand."""
        place = operator.eqn.primitive.trainable_operands(operator.eqn.params)[key]
        found = self._jacobian_support(operator, place)
        if operator.x is not None and not is_differentiable(operator.x.aval):
            # An index chooses what acts: any row of the table may.
            rows = operator.eqn.invars[place].aval.shape[0]
            anywhere = found.reshape(len(found), rows, -1).any(1, keepdims=True)
            found = np.broadcast_to(anywhere, (len(found), rows, anywhere.shape[-1])).reshape(found.shape)
        return found

    def _jacobian_support(self, operator: Operator, place: int) -> np.ndarray:
        key = (operator.y, place)
        if key not in self._known_supports:
            self._known_supports[key] = self._find_support(operator, place)
        return self._known_supports[key]

    @cached_property
    def _known_supports(self) -> dict[Any, np.ndarray]:
        return {}

    def _find_support(self, operator: Operator, place: int) -> np.ndarray:
        eqn, primitive, y = operator.eqn, operator.eqn.primitive, operator.y.aval
        count = _size(operator.y)
        found = np.zeros((count, _size(eqn.invars[place])), bool)

        @jax.jit
        def rows_of(operands: list[Any], rows: Any) -> Any:
            def result(value: Any) -> Any:
                y = primitive.bind(*(value if i == place else v for i, v in enumerate(operands)), **eqn.params)
                return y[primitive.y_index] if primitive.multiple_results else y

            _, pull_back = jax.vjp(result, jnp.asarray(operands[place]))
            cotangents = jax.nn.one_hot(rows, count, dtype=y.dtype).reshape(rows.size, *y.shape)
            return jax.vmap(pull_back)(cotangents)[0].reshape(rows.size, -1) != 0

        with jax.ensure_compile_time_eval():  # structure is not data: it is found even while a function is traced
            for operands in self._draws(operator):
                for start in range(0, count, _ROWS):
                    rows = np.arange(start, start + _ROWS)
                    rows_found = np.asarray(rows_of(operands, rows))
                    found[start : start + _ROWS] |= rows_found[: count - start]
        return found


def colour_rows(conflicts: np.ndarray) -> tuple[np.ndarray, int]:
    """A colour for each row, such that rows in conflict differ, and the number of colours."""
    colour = np.full(len(conflicts), -1, np.int32)
    for row in range(len(conflicts)):
        taken = set(colour[conflicts[row]].tolist())
        colour[row] = next(c for c in range(len(conflicts) + 1) if c not in taken)
    return colour, int(colour.max(initial=0)) + 1


def _sets_of(parts: Sequence[tuple[np.ndarray, np.ndarray]], shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The sets of hidden values that elements of an operand act on, through all operators that have it."""
    size = parts[0][1].shape[0]
    columns = np.zeros((size, int(np.prod(shape, dtype=np.int64))), bool)
    for support, reach in parts:
        results, elements = np.nonzero(support)
        for k in range(_most(elements)):
            chosen = _occurrence(elements) == k
            columns[:, elements[chosen]] |= reach[:, results[chosen]]
    packed = np.packbits(columns, axis=0).T
    _, first, index = np.unique(packed, axis=0, return_index=True, return_inverse=True)
    return columns[:, first].T, index.reshape(shape)


def _occurrence(values: np.ndarray) -> np.ndarray:
    """For each value, how many times it stood before."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.concatenate([[True], ordered[1:] != ordered[:-1]]) if values.size else np.zeros(0, bool)
    since = np.arange(values.size) - np.maximum.accumulate(np.where(starts, np.arange(values.size), 0))
    result = np.empty(values.size, np.int64)
    result[order] = since
    return result


def _most(values: np.ndarray) -> int:
    return int(np.bincount(values).max(initial=0)) if values.size else 0


def _lift(pairs: np.ndarray, found: np.ndarray, size: int) -> np.ndarray:
    result = np.zeros((size, found.shape[1]), bool)
    result[pairs[:, 1]] = found[pairs[:, 0]]
    return result


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a.astype(np.float32) @ b.astype(np.float32)) > 0


def _size(v: Any) -> int:
    return int(np.prod(v.aval.shape, dtype=np.int64))


def _random(draws: np.random.Generator, aval: Any) -> Any:
    if not is_differentiable(aval):
        return np.zeros(aval.shape, aval.dtype)
    value = draws.standard_normal(aval.shape)
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        value = value + 1j * draws.standard_normal(aval.shape)
    return value.astype(aval.dtype)
