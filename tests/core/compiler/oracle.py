"""Dense Jacobians as a reference for factors.

Two oracles. :func:`expected_factors` never looks at a jaxpr: the models of ``zoo.py`` say themselves where their
operators are (``op.cut``, ``op.mark``), and the Jacobians are taken of the plain Python function.
:func:`factors_from_jaxpr` takes them of the flat jaxpr of any graph, for models that were not written for it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from braintrace_core import ETraceGraph, is_boundary
from braintrace_core._compat import Literal, bind_equation

TINY = 1e-14


class Hooks:
    """What a model of the zoo calls its operators' results with. As it stands it does nothing: the model as written."""

    def cut(self, name: str, y: jax.Array) -> jax.Array:
        """The result of a mixing operator, at which the recurrence is cut."""
        del name
        return y

    def mark(self, name: str, y: jax.Array) -> jax.Array:
        """A value made of parameters that acts unit by unit, or the result of an operator that lets credit pass."""
        del name
        return y


PLAIN = Hooks()


class Shifted(Hooks):
    """Adds a given term to each operator's result, and cuts behind the mixing ones."""

    def __init__(self, terms: dict[str, jax.Array] | None = None):
        self.terms = terms or {}
        self.shapes: dict[str, jax.ShapeDtypeStruct] = {}

    def mark(self, name, y):
        assert name not in self.shapes, f"two operators are called {name}"
        self.shapes[name] = jax.ShapeDtypeStruct(y.shape, y.dtype)
        return y + self.terms[name].reshape(y.shape) if name in self.terms else y

    def cut(self, name, y):
        return self.mark(name, jax.lax.stop_gradient(y))


class Dense(NamedTuple):
    """``D[a, u, b, v]`` between components and units, and ``df[name][a, u, element]`` (complex: d re - i d im)."""

    D: np.ndarray
    df: dict[str, np.ndarray]


def expected_factors(step: Callable[..., Any], params: Any, carry: Any, inputs: tuple, members: list[int]) -> Dense:
    """The Jacobians of the states ``members`` (indices of the carry's leaves) of one step."""
    leaves, tree = jax.tree.flatten(carry)

    def run(z, terms):
        new = list(leaves)
        for i, value in zip(members, _from_components(z, [leaves[i] for i in members]), strict=True):
            new[i] = value
        hooks = Shifted(terms)
        result, _ = step(params, jax.tree.unflatten(tree, new), *inputs, hooks)
        states = jax.tree.leaves(result)
        return _components([states[i] for i in members]), hooks.shapes

    z = _components([leaves[i] for i in members])
    _, shapes = run(z, {})
    between = jax.jacrev(lambda z: run(z, {})[0])(z)
    return Dense(
        np.asarray(between), {name: _by_term(lambda terms: run(z, terms)[0], name, s) for name, s in shapes.items()}
    )


def _by_term(run, name, shape):
    """The Jacobian of ``run({name: term})`` at zero, for a term with this shape and dtype."""

    def along(direction):
        zero = jnp.zeros(int(np.prod(shape.shape)), jnp.finfo(shape.dtype).dtype)
        return np.asarray(jax.jacrev(lambda d: run({name: d.astype(shape.dtype) * direction}))(zero))

    if jnp.issubdtype(shape.dtype, jnp.complexfloating):
        return along(jnp.ones((), shape.dtype)) - 1j * along(jnp.asarray(1j, shape.dtype))
    return along(jnp.ones((), shape.dtype))


def factors_from_jaxpr(graph: ETraceGraph, group: int, args: tuple, state_values: list[Any]) -> Dense:
    """The same for one group of a graph, named by the relations' indices."""
    minfo, members = graph.module_info, graph.hidden_groups[group]
    flat = minfo.flatten_inputs(args, {}, state_values)
    start = dict(zip((*minfo.jaxpr.constvars, *minfo.jaxpr.invars), (*minfo.consts, *flat), strict=True))
    split = members.components

    def read(values, atom):
        return atom.val if isinstance(atom, Literal) else values[atom]

    fixed = dict(start)
    for eqn in minfo.jaxpr.eqns:
        fixed.update(zip(eqn.outvars, bind_equation(eqn, [read(fixed, v) for v in eqn.invars]), strict=True))

    def run(z, y=None, term=None):
        values = dict(start)
        old = _from_components(z, [start[v] for v in members.hidden_invars], split.stacked)
        values.update(zip(members.hidden_invars, old, strict=True))
        for eqn in minfo.jaxpr.eqns:
            if is_boundary(eqn.primitive):
                results = [fixed[v] for v in eqn.outvars]
            else:
                results = bind_equation(eqn, [read(values, v) for v in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
            if y in eqn.outvars:
                values[y] = values[y] + term.reshape(y.aval.shape)
        return _components([values[v] for v in members.hidden_outvars], split.stacked)

    z = _components([start[v] for v in members.hidden_invars], split.stacked)
    df = {}
    for index in graph.factor_plan.groups[group].relations:
        y = graph.hidden_param_op_relations[index].y_var
        df[index] = np.asarray(jax.jacrev(lambda d: run(z, y, d))(jnp.zeros(y.aval.size, y.aval.dtype)))  # noqa: B023
    return Dense(np.asarray(jax.jacrev(run)(z)), df)


def diagonal(dense: np.ndarray) -> np.ndarray:
    """``(unit, a, b)`` from ``D[a, u, b, v]``."""
    return np.einsum("aubu->uab", dense)


def homes(jacobian: np.ndarray) -> np.ndarray:
    """The one unit that each element acts on, from ``df[a, u, element]``; -1 for an element that acts on none."""
    acts = (np.abs(jacobian) > TINY).any(axis=0)
    assert (acts.sum(axis=0) <= 1).all(), "an element acts on several units: the zoo must say to which it belongs"
    return np.where(acts.any(axis=0), acts.argmax(axis=0), -1)


def at_home(jacobian: np.ndarray, home: np.ndarray) -> np.ndarray:
    """``(element, a)``: the derivative of each element's own unit with respect to it."""
    columns = jacobian[:, np.maximum(home, 0), np.arange(len(home))].T
    return np.where(home[:, None] >= 0, columns, 0)


def _components(states, stacked=None):
    """``(component, unit)`` from states."""
    rows = []
    for state, is_stacked in zip(states, stacked or [False] * len(states), strict=True):
        parts = [state[..., k] for k in range(state.shape[-1])] if is_stacked else [state]
        for part in parts:
            is_complex = jnp.iscomplexobj(part)
            rows += [jnp.real(part).ravel(), jnp.imag(part).ravel()] if is_complex else [part.ravel()]
    dtype = jnp.float64 if any(row.dtype == jnp.float64 for row in rows) else rows[0].dtype
    return jnp.stack([row.astype(dtype) for row in rows])


def _from_components(z, like, stacked=None):
    rows, states = list(z), []
    for state, is_stacked in zip(like, stacked or [False] * len(like), strict=True):
        shape = state.shape[:-1] if is_stacked else state.shape
        parts = []
        for _ in range(state.shape[-1] if is_stacked else 1):
            part = rows.pop(0).reshape(shape)
            if jnp.iscomplexobj(state):
                part = jax.lax.complex(part, rows.pop(0).reshape(shape))
            parts.append(part.astype(state.dtype))
        states.append(jnp.stack(parts, -1) if is_stacked else parts[0])
    return states
