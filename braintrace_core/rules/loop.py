"""A loop over time that is differentiated at all its steps at once.

Differentiated as it stands, a loop computes step by step whatever its derivative needs, and keeps all of it. Here it
keeps no more than it is asked for. What else the derivative needs is made of that for all steps together, and the loop
of the derivative, forward or back, is left with what must be done step by step. A few steps are written out: arrays
that a loop fills and reads step by step would take longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from .._compat import Jaxpr, JaxprEqn, Literal, Var, bind_equation, eval_jaxpr, open_jaxpr
from ..compiler.jaxpr_tools import IndexedJaxpr
from ..compiler.module_info import is_differentiable

__all__ = ["scan", "scan_at_once"]

Body = Callable[[list[Array], Any], tuple[list[Array], list[Array]]]


def scan(step: Callable[..., Any], carry: Any, over: Any, steps: int) -> tuple[Any, Any]:
    """``lax.scan``, written out if there are few steps."""
    return lax.scan(step, carry, over, steps, unroll=steps <= _FEW)


def scan_at_once(body: Body, states: list[Array], over: Any, steps: int) -> tuple[list[Array], list[Array]]:
    """``lax.scan(body, states, over, steps)``.

    Args:
      body: ``body(states, now) -> (states, kept)``. What it keeps begins with the states before the step; if it puts
        others in the place of some, with those.
      states: before the first step.
      over: a tree; the first axis of each array is time.
      steps: how many.
    """
    leaves, tree = jax.tree.flatten(over)
    now = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in leaves]
    traced = jax.make_jaxpr(lambda states, now: body(states, jax.tree.unflatten(tree, now)))(states, now)
    jaxpr, consts = open_jaxpr(traced)

    @jax.custom_jvp
    def loop(consts: list[Array], states: list[Array], over: list[Array]) -> tuple[list[Array], list[Array]]:
        def step(states: list[Array], now: list[Array]) -> tuple[list[Array], list[Array]]:
            found = eval_jaxpr(jaxpr, consts, *states, *now)
            return found[: len(states)], found[len(states) :]

        return scan(step, states, over, steps)

    def jvp(primals: Any, tangents: Any) -> Any:
        results = loop(*primals)
        return results, _tangents(jaxpr, primals, tangents, results, steps)

    loop.defjvp(jvp, symbolic_zeros=True)
    return loop(consts, states, leaves)


def _tangents(jaxpr: Jaxpr, primals: Any, tangents: Any, results: Any, steps: int) -> Any:
    """The tangents of what a loop found.

    Args:
      jaxpr: one step, from constants, states and what there is of each step.
      primals, tangents: lists of these; a symbolic zero is the tangent of what does not move.
      results: the states after the loop, and what it kept.
      steps: how many.
    """
    (consts, states, over), (_, kept) = primals, results
    moves = [[not isinstance(tangent, SymbolicZero) for tangent in of] for of in tangents]
    moves[1] = [is_differentiable(state) for state in states]  # a state moves once anything else does
    derivative, constants = _derivative(jaxpr, len(consts), jax.tree.leaves(moves))
    split, num_results = len(jaxpr.constvars) + len(jaxpr.invars), len(jaxpr.outvars)
    inputs, moved = derivative.invars[:split], derivative.invars[split:]
    found, moved_found = derivative.outvars[:num_results], derivative.outvars[num_results:]

    still = dict(zip((*derivative.constvars, *inputs[: len(consts)]), (*constants, *consts), strict=True))
    timed = dict(zip(inputs[len(consts) :], (*kept[: len(states)], *over), strict=True))
    recorded = zip(found[len(states) :], kept, strict=True)
    timed.update((v, value) for v, value in recorded if isinstance(v, Var) and v not in still)
    still, timed, eqns = _before_the_loop(IndexedJaxpr(derivative), moved, moved_found, still, timed)

    of_consts, of_states, of_over = (
        [_instantiated(tangent, primal) for tangent, primal, move in zip(*of, strict=True) if move]
        for of in zip(tangents, primals, moves, strict=True)
    )

    def step(of_states: list[Array], now: Any) -> tuple[list[Array], list[Array]]:
        of_over, known = now
        values = {**still, **dict(zip(timed, known, strict=True))}
        values.update(zip(moved, (*of_consts, *of_states, *of_over), strict=True))
        _run(eqns, values)
        new = [v.val if isinstance(v, Literal) else values[v] for v in moved_found]
        return new[: len(of_states)], new[len(of_states) :]

    after, of_kept = scan(step, of_states, (of_over, list(timed.values())), steps)
    rest = iter((*after, *of_kept))
    return jax.tree.map(
        lambda value: next(rest) if is_differentiable(value) else np.zeros(value.shape, jax.dtypes.float0), results
    )


def _derivative(jaxpr: Jaxpr, num_consts: int, moves: Sequence[bool]) -> tuple[Jaxpr, list[Any]]:
    """A step and its derivative, from all inputs and the tangents of those that move, and the constants of that."""

    def step(values: list[Array], moved: list[Array]) -> tuple[list[Array], list[Array]]:
        def of(moving: list[Array]) -> list[Array]:
            rest = iter(moving)
            every = [next(rest) if move else value for value, move in zip(values, moves, strict=True)]
            return eval_jaxpr(jaxpr, every[:num_consts], *every[num_consts:])

        found, tangents = jax.jvp(of, ([v for v, move in zip(values, moves, strict=True) if move],), (moved,))
        return found, [of for value, of in zip(found, tangents, strict=True) if is_differentiable(value)]

    avals = [v.aval for v in (*jaxpr.constvars, *jaxpr.invars)]
    return open_jaxpr(jax.make_jaxpr(step)(avals, [aval for aval, move in zip(avals, moves, strict=True) if move]))


def _before_the_loop(
    indexed: IndexedJaxpr,
    moved: Sequence[Var],
    outvars: Sequence[Any],
    still: Mapping[Var, Any],
    timed: Mapping[Var, Any],
) -> tuple[dict[Var, Any], dict[Var, Any], list[JaxprEqn]]:
    """What the loop of a derivative needs, made for all steps at once; and the equations that are left to it.

    Args:
      indexed: a step and its derivative.
      moved: the variables of tangents that come in.
      outvars: and of those that go out.
      still, timed: known values, of all steps alike and for each step.

    Returns:
      what it needs of either kind, and its equations.
    """
    eqns = indexed.jaxpr.eqns
    moving = indexed.reached(moved, range(len(eqns)))
    way = [i for i in indexed.ancestors(outvars) if any(v in moving for v in eqns[i].outvars)]
    read = [*outvars, *(v for i in way for v in eqns[i].invars)]
    needed = indexed.in_order({v for v in read if isinstance(v, Var) and v not in moving})
    ahead = indexed.ancestors(needed, lambda v: v in still or v in timed)
    changing = indexed.reached(timed, ahead)
    alike = {**still}
    _run([eqns[i] for i in ahead if not any(v in changing for v in eqns[i].outvars)], alike)
    of_steps = [eqns[i] for i in ahead if any(v in changing for v in eqns[i].outvars)]

    def one(now: list[Any]) -> list[Any]:
        values = {**alike, **dict(zip(timed, now, strict=True))}
        _run(of_steps, values)
        return [values[v] for v in needed if v in changing]

    made = jax.vmap(one)(list(timed.values())) if any(v in changing for v in needed) else []
    return (
        {v: alike[v] for v in needed if v not in changing},
        dict(zip([v for v in needed if v in changing], made, strict=True)),
        [eqns[i] for i in way],
    )


def _run(eqns: Sequence[JaxprEqn], values: dict[Var, Any]) -> None:
    """Run equations, and add what they make to the values."""
    for eqn in eqns:
        operands = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        values.update(zip(eqn.outvars, bind_equation(eqn, operands), strict=True))


def _instantiated(tangent: Any, primal: Array) -> Array:
    return jnp.zeros_like(primal) if isinstance(tangent, SymbolicZero) else tangent


_FEW = 4  # steps; of more, written out, products of different steps get into each other's way
