"""Runs the parts of a step: on a batch, on all steps of a window at once, or step by step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._compat import JaxprEqn, Var, bind_equation
from ..compiler.schedule import Operator, Part
from ..ops.in_place import on_one_device
from .loop import scan_at_once

__all__ = ["PartRunner", "TimeLoop"]


@dataclass(frozen=True, eq=False)
class PartRunner:
    """Runs parts of a step on a batch, or on all steps of a window at once.

    Attributes:
      operators: the operators whose results may be moved.
      static: values that are the same for all steps and examples.
      direct: values that take the place of ``static`` wherever they are not an operator's trainable operand.
      feedback: operator index -> operands through which errors go back to its input, instead of its own.
      products: operator index -> its result but for what ``deltas`` hold of it already, from its input; and those of
        others that are made with it, by operator index.
      still: operator's result -> what to add to it, the same for all steps and examples.
      held: variables whose values are taken as they are: nothing is asked of what made them.
    """

    operators: tuple[Operator, ...]
    static: Mapping[Var, Any]
    direct: Mapping[Var, Any]
    feedback: Mapping[int, Any]
    products: Mapping[int, Callable[[Any], Mapping[int, Any]]] = field(default_factory=dict)
    still: Mapping[Var, Array] = field(default_factory=dict)
    held: Collection[Var] = ()

    def over_batch(
        self, part: Part, batched: Mapping[Var, Any], deltas: Mapping[Var, Array], batch: int
    ) -> dict[Var, Any]:
        """Values for what ``part`` writes, ``(batch, ...)``, from values of the same form."""
        if not part.writes:
            return {}
        reads = [v for v in part.reads if v in batched]
        made = {v for eqn in part.eqns for v in eqn.outvars}
        moved = [v for v in deltas if v in made]

        def one(values: list[Any], terms: list[Any]) -> list[Any]:
            known = {**self.static, **self.direct, **dict(zip(reads, values, strict=True))}
            return part.run(known, self._equation(dict(zip(moved, terms, strict=True))))

        results = jax.vmap(one, axis_size=batch)([batched[v] for v in reads], [deltas[v] for v in moved])
        return dict(zip(part.writes, results, strict=True))

    def over_window(
        self, part: Part, windowed: Mapping[Var, Any], deltas: Mapping[Var, Array], sizes: tuple[int, int]
    ) -> dict[Var, Any]:
        """The same for ``(time, batch, ...)``, all steps at once."""
        reads = [v for v in part.reads if v in windowed]
        made = {v for eqn in part.eqns for v in eqn.outvars}
        moved = [v for v in deltas if v in made]

        def step(values: list[Any], terms: list[Any]) -> list[Any]:
            now = dict(zip(reads, values, strict=True))
            return list(self.over_batch(part, now, dict(zip(moved, terms, strict=True)), sizes[1]).values())

        over = [windowed[v] for v in reads], [deltas[v] for v in moved]
        if sizes[0] == 1:  # as the loop does a step, so that the compiler sees what both make
            results = [value[None] for value in step(*jax.tree.map(lambda a: a[0], over))]
        else:
            results = jax.vmap(step, axis_size=sizes[0])(*over)
        return dict(zip(part.writes, results, strict=True))

    def stacked(self, atom: Any, windowed: Mapping[Var, Any], sizes: tuple[int, int]) -> Any:
        """The value of ``atom`` for each step and example."""
        if isinstance(atom, Var) and atom in windowed:
            return windowed[atom]
        value = jnp.asarray({**self.static, **self.direct}[atom] if isinstance(atom, Var) else atom.val)
        return jnp.broadcast_to(value, (*sizes, *value.shape))

    def _equation(self, terms: Mapping[Var, Any]) -> Callable[[JaxprEqn, list[Any]], list[Any]]:
        trains = {id(op.eqn): (i, op) for i, op in enumerate(self.operators)}
        terms = {**self.still, **terms}
        made: dict[int, Any] = {}

        def run(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
            index, operator = trains.get(id(eqn), (-1, None))
            if operator is not None:
                # Trainable operands are not differentiated here: their gradient is formed from that of the result.
                kept = set(operator.operands.values())
                operands = [
                    self.static[v] if isinstance(v, Var) and v in kept else value
                    for v, value in zip(eqn.invars, operands, strict=True)
                ]
            if index in self.products:
                if index not in made:
                    made.update(self.products[index](operands[eqn.primitive.x_index]))
                results = [made[index]]
            else:
                results = bind_equation(eqn, operands)
            if index in self.feedback:
                x = eqn.primitive.x_index
                back = bind_equation(eqn, [operands[x] if i == x else b for i, b in enumerate(self.feedback[index])])
                fixed = bind_equation(eqn, [lax.stop_gradient(v) if i == x else v for i, v in enumerate(operands)])
                results = [f + (b - lax.stop_gradient(b)) for f, b in zip(fixed, back, strict=True)]
            results = [
                lax.stop_gradient(value) if v in self.held else value
                for v, value in zip(eqn.outvars, results, strict=True)
            ]
            return [value + terms[v] if v in terms else value for v, value in zip(eqn.outvars, results, strict=True)]

        return run


class TimeLoop:
    """The recurrent part of a window, step by step.

    Args:
      part: the part.
      runner: runs it on a batch.
      before, after: the states' variables before and after a step.
      needed: the variables whose values are wanted of every step.
      deltas: operator's result -> what to add to it, ``(time, batch, ...)``.
      reset, initial: where new sequences start, and what they start from.
    """

    def __init__(
        self,
        part: Part,
        runner: PartRunner,
        before: Sequence[Var],
        after: Sequence[Var],
        needed: Collection[Var],
        deltas: Mapping[Var, Array],
        reset: Any,
        initial: Sequence[Any] | None,
    ) -> None:
        self.part, self.runner = part, runner
        self.before, self.after = before, after
        self.reset, self.initial = reset, initial
        made = {v for eqn in part.eqns for v in eqn.outvars}
        self.deltas = {v: d for v, d in deltas.items() if v in made}
        self.kept = [*before, *(v for v in part.writes if v in needed)]

    def run(
        self, states: list[Any], windowed: Mapping[Var, Any], sizes: tuple[int, int]
    ) -> tuple[list[Any], dict[Var, Any]]:
        """States after the window, and what later parts need of each step, ``(time, batch, ...)``."""
        steps, batch = sizes
        reads = [v for v in dict.fromkeys((*self.part.reads, *self.after)) if v in windowed]

        def body(states: list[Any], now: Any) -> tuple[list[Any], list[Any]]:
            values, terms, reset = now
            states = self._restart(states, reset)
            batched = {**dict(zip(reads, values, strict=True)), **dict(zip(self.before, states, strict=True))}
            batched.update(
                self.runner.over_batch(self.part, batched, dict(zip(self.deltas, terms, strict=True)), batch)
            )
            after = [self._state(v, batched, old) for v, old in zip(self.after, states, strict=True)]
            return after, [batched[v] for v in self.kept]

        over = ([windowed[v] for v in reads], list(self.deltas.values()), self.reset)
        if steps == 1:
            states, kept = body(states, jax.tree.map(lambda a: a[0], over))
            return states, {v: value[None] for v, value in zip(self.kept, kept, strict=True)}
        states, kept = (
            scan_at_once(body, states, over, steps) if on_one_device() else lax.scan(body, states, over, steps)
        )
        return states, dict(zip(self.kept, kept, strict=True))

    def _restart(self, states: list[Any], reset: Any) -> list[Any]:
        if reset is None or self.initial is None:
            return states
        return [
            state if start is None else restart(reset, start, state)
            for state, start in zip(states, self.initial, strict=True)
        ]

    def _state(self, atom: Any, batched: Mapping[Var, Any], old: Any) -> Any:
        if isinstance(atom, Var) and atom in batched:
            return batched[atom]
        value = jnp.asarray(self.runner.static[atom] if isinstance(atom, Var) else atom.val)
        return jnp.broadcast_to(value, old.shape).astype(old.dtype)


def restart(reset: Array, start: Any, state: Array) -> Array:
    """``start`` where ``reset`` (one bool for each example), ``state`` elsewhere."""
    where = jnp.expand_dims(reset, tuple(range(1, state.ndim)))
    return jnp.where(where, jnp.broadcast_to(start, state.shape).astype(state.dtype), state)
