"""Random step functions from a small grammar, against the oracle; renaming and reordering change nothing but names."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from braintrace_core import compile_step_graph, element_wise, matmul
from tests.core.compiler.oracle import PLAIN, at_home, diagonal, expected_factors
from tests.core.compiler.support import state_values
from tests.core.compiler.test_factors import close

UNITS, INPUTS = 3, 2
EXAMPLES = 40


@dataclass
class Program:
    """A random step.

    Each action makes a value from earlier ones, which it names by number (the old states come first); the new states
    are made of the values that ``outputs`` numbers.
    """

    states: int
    actions: list[tuple[Any, ...]]
    outputs: list[int]
    by_hand: bool = False

    def params(self, rename=lambda name: name):
        rng = np.random.default_rng(5)
        values = {}
        for k, (kind, *_) in enumerate(self.actions):
            if kind in SHAPES:
                values[f"p{k}"] = jnp.asarray(rng.normal(size=SHAPES[kind]))
        return {rename(name): value for name, value in values.items()}

    def carry(self):
        rng = np.random.default_rng(6)
        return [jnp.asarray(rng.normal(size=UNITS)) for _ in range(self.states)]

    def step(self, p, carry, x, op, rename=lambda name: name):
        values = list(carry)
        for k, (kind, *read) in enumerate(self.actions):
            arguments = [values[i % len(values)] for i in read]
            parameter = p.get(rename(f"p{k}"))
            values.append(ACTIONS[kind](op, f"p{k}", parameter, x, self.by_hand, *arguments))
        new = [jnp.tanh(values[i % len(values)]) + 0.3 * h for i, h in zip(self.outputs, carry, strict=True)]
        return new, new[0]


def product(by_hand):
    return matmul if by_hand else jnp.matmul


def marked(by_hand, parameter):
    return element_wise(parameter) if by_hand else parameter


# Each is a function of (hooks, name, parameter, input, by hand, values).
ACTIONS = {
    "input": lambda op, n, p, x, by_hand: op.cut(n, product(by_hand)(x, p)),
    "recur": lambda op, n, p, x, by_hand, a: op.cut(n, product(by_hand)(a, p)),
    "doubled": lambda op, n, p, x, by_hand, a: op.cut(n, product(by_hand)(jnp.sin(a), 2 * p)),
    "fused": lambda op, n, p, x, by_hand, a: (lambda i, g: jax.nn.sigmoid(i) * jnp.tanh(g) * a)(
        *jnp.split(op.cut(n, product(by_hand)(x, p)), 2)
    ),
    "branches": lambda op, n, p, x, by_hand: op.cut(n, product(by_hand)(x, p)).reshape(UNITS, 2).sum(axis=1),
    "decay": lambda op, n, p, x, by_hand, a: op.mark(n, marked(by_hand, p)) * a,
    "bias": lambda op, n, p, x, by_hand, a: a + op.mark(n, marked(by_hand, jnp.exp(p))),
    "tanh": lambda op, n, p, x, by_hand, a: jnp.tanh(a),
    "square": lambda op, n, p, x, by_hand, a: 0.3 * a * a,
    "roll": lambda op, n, p, x, by_hand, a: jnp.roll(a, 1),
    "permute": lambda op, n, p, x, by_hand, a: a[np.array([2, 0, 1])],
    "swap": lambda op, n, p, x, by_hand, a, b: jnp.concatenate([a[1:], b[:1]]),
    "interleave": lambda op, n, p, x, by_hand, a, b: jnp.stack([a, b], axis=1).reshape(2 * UNITS)[::2],
    "add": lambda op, n, p, x, by_hand, a, b: a + 0.5 * b,
    "multiply": lambda op, n, p, x, by_hand, a, b: 0.5 * a * b,
    "choose": lambda op, n, p, x, by_hand, a, b: jnp.where(np.array([True, False, True]), a, b),
    "centre": lambda op, n, p, x, by_hand, a: a - a.mean(),
    "jit": lambda op, n, p, x, by_hand, a, b: jax.jit(lambda a, b: jnp.cos(a) + b)(a, b),
}
SHAPES = {
    "input": (INPUTS, UNITS),
    "recur": (UNITS, UNITS),
    "doubled": (UNITS, UNITS),
    "fused": (INPUTS, 2 * UNITS),
    "branches": (INPUTS, 2 * UNITS),
    "decay": (UNITS,),
    "bias": (UNITS,),
}
READS = {kind: ACTIONS[kind].__code__.co_argcount - 5 for kind in ACTIONS}

place = st.integers(0, 30)


@st.composite
def programs(draw, by_hand=False):
    states = draw(st.integers(1, 2))
    chosen = draw(st.lists(st.sampled_from(sorted(ACTIONS)), min_size=1, max_size=7))
    # The first value is always a new state's, so that something is learnt.
    actions = [(kind, *(draw(place) for _ in range(READS[kind]))) for kind in ["input", *chosen]]
    last = states + len(actions) - 1
    outputs = [draw(st.integers(states, last)) for _ in range(states)]
    outputs[draw(st.integers(0, states - 1))] = states
    return Program(states, actions, outputs, by_hand)


def compile_program(program, rename=lambda name: name, order=sorted, **options):
    params = program.params(rename)
    params = {name: params[name] for name in order(params)}

    def step(p, carry, x):
        return program.step(p, carry, x, PLAIN, rename)

    return compile_step_graph(step, params, program.carry(), X, **options), params


X = jnp.asarray([0.4, -0.9])


@settings(max_examples=EXAMPLES)
@given(programs())
def test_factors_of_random_steps(program):
    graph, params = compile_program(program)
    carry = program.carry()
    old = state_values(graph, params, carry)
    out, _, factors = graph.step_with_factors(X, old_state_vals=old)
    close(out, program.step(params, carry, X, PLAIN)[1], 1e-12)
    plan = graph.factor_plan
    for group in graph.hidden_groups:
        members = [int(path[1]) for path in group.hidden_paths]
        dense = expected_factors(program.step, params, carry, (X,), members)
        close(plan.dense_D(factors, group.index), diagonal(dense.D), 1e-12)
        for r in plan.groups[group.index].relations:
            relation = graph.hidden_param_op_relations[r]
            place = [g.index for g in relation.hidden_groups].index(group.index)
            positions = plan.groups[group.index].positions(r)
            jacobian = dense.df[relation.path[-1]]
            found = np.asarray(plan.dense_df(factors, r, place)).reshape(-1, len(members))
            close(found, at_home(jacobian, positions.unit.ravel()), 1e-12)
            if positions.exact:  # nothing acts anywhere else
                total = np.abs(jacobian).sum(axis=1)
                close(np.abs(found).sum(axis=0), total.sum(axis=1), 1e-10)


def signature(graph, rename=lambda name: name):
    """All that the compiler found, without its own order and with the parameters' original names."""
    plan = graph.factor_plan
    relations = sorted(
        (
            relation.primitive.name,
            sorted(rename(path[-1]) for path in relation.trainable_paths.values()),
            relation.connected_hidden_paths,
            sorted(map(str, relation.path_classification.items())),
            [plan.groups[g.index].positions(r).unit.tolist() for g in relation.hidden_groups],
        )
        for r, relation in enumerate(graph.hidden_param_op_relations)
    )
    kinds = sorted((record.kind.name, record.hidden_paths) for record in graph.diagnostics)
    return [g.hidden_paths for g in graph.hidden_groups], relations, kinds, plan.num_passes


@given(programs(), st.randoms(use_true_random=False))
def test_names_and_order_of_parameters_do_not_matter(program, random):
    graph, _ = compile_program(program)
    names = sorted(program.params())
    shuffled = list(names)
    random.shuffle(shuffled)
    new = {name: f"q{shuffled.index(name)}" for name in names}
    old = {value: key for key, value in new.items()}
    renamed, params = compile_program(program, new.get, lambda p: random.sample(sorted(p), len(p)))
    assert signature(graph) == signature(renamed, old.get)
    factors = [
        g.step_with_factors(X, old_state_vals=state_values(g, p, program.carry()))[2]
        for g, p in ((graph, program.params()), (renamed, params))
    ]
    for a, b in zip(factors[0].D, factors[1].D, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            close(a[key], b[key], 1e-12)


@given(programs(by_hand=True))
def test_operators_written_by_hand_need_no_lifting(program):
    with_lift, _ = compile_program(program)
    without, _ = compile_program(program, lift=False)
    assert list(map(repr, with_lift.hidden_param_op_relations)) == list(map(repr, without.hidden_param_op_relations))
    assert [g.hidden_paths for g in with_lift.hidden_groups] == [g.hidden_paths for g in without.hidden_groups]
    lifted, _ = compile_program(Program(program.states, program.actions, program.outputs, by_hand=False))
    assert parameters(lifted) == parameters(without)


def parameters(graph):
    """The parameters that have a relation; a lifted bias may have joined the product before it."""
    return {path for r in graph.hidden_param_op_relations for path in r.trainable_paths.values()}
