"""Index patterns against Jacobians: never too little, and exactly what there is where elements are only moved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn
from jax.ad_checkpoint import checkpoint_name

from braintrace_core._compat import open_jaxpr
from braintrace_core.compiler.patterns import MAX_LISTED, Pattern, union
from braintrace_core.compiler.positions import Positions

A, B = (3, 4), (3, 4)
INDEX = np.array([2, 0, 1])


def moved_by_scan(x, y):
    carry, rows = lax.scan(lambda c, row: (0.5 * c + row, c * row), y[0], x, reverse=True)
    return jnp.concatenate([rows, carry[None]])


@jax.custom_jvp
def step_function(x):
    return (x > 0).astype(x.dtype)


step_function.defjvp(lambda primals, tangents: (step_function(*primals), tangents[0] * jnp.cos(primals[0])))

# Functions of x and y, both of shape (3, 4), whose pattern is exact: the Jacobian's non-zeros and no more.
EXACT = {
    "add": lambda x, y: x + y,
    "one": lambda x, y: jnp.tanh(x) + 1,
    "scalar": lambda x, y: x * y[0, 0],
    "where": lambda x, y: jnp.where(np.arange(12).reshape(A) % 2 == 0, x, 2 * x) + y,
    "clip": lambda x, y: jnp.clip(x, -10.0, 10.0) + nn.relu(100 + y),
    "cast": lambda x, y: x.astype(jnp.float32).astype(jnp.float64) + y,
    "functions": lambda x, y: nn.gelu(x) + nn.silu(y) + jnp.log2(4 + x) + jnp.sinc(x) + nn.softplus(y) + x**3,
    "complex": lambda x, y: jnp.abs(jnp.exp(lax.complex(x, y))) + jnp.real(jnp.conj(lax.complex(y, x))),
    "reshape": lambda x, y: x.reshape(2, 6).reshape(4, 3).T + y,
    "transpose": lambda x, y: x.T * jnp.moveaxis(y, 0, 1),
    "broadcast": lambda x, y: jnp.broadcast_to(x[:, :1], A) + y,
    "expand": lambda x, y: x[:, None, :] * y[:, None, :],
    "slice": lambda x, y: x[1:, ::2] + y[:2, 1::2],
    "negative slice": lambda x, y: x[::-1, ::-2] + y[:, :2],
    "split": lambda x, y: jnp.split(x, 2, axis=1)[1] * jnp.split(y, [1, 3], axis=1)[1],
    "unstack": lambda x, y: jnp.unstack(x, axis=1)[2] + jnp.unstack(y)[0][:3],
    "stack": lambda x, y: jnp.stack([x, 2 * y, jnp.ones(A)], axis=1),
    "concatenate": lambda x, y: jnp.concatenate([x, jnp.zeros((1, 4)), y], axis=0),
    "tile": lambda x, y: jnp.tile(x, (2, 1)),
    "repeat": lambda x, y: jnp.repeat(x, 2, axis=1),
    "roll": lambda x, y: jnp.roll(x, (1, 2), (0, 1)) + y,
    "flip": lambda x, y: jnp.flip(x) + y,
    "pad": lambda x, y: lax.pad(x, jnp.zeros(()), ((1, -1, 1), (0, 2, 0))),
    "squeeze": lambda x, y: jnp.squeeze(x[:, :1], 1) + jnp.expand_dims(y[:, 0], 0)[0],
    "gather": lambda x, y: x[INDEX] + y[:, np.array([3, 3, 0, 1])],
    "take": lambda x, y: jnp.take(x, jnp.asarray([0, 5, 2]), axis=1),
    "take along": lambda x, y: jnp.take_along_axis(x, np.array([[0, 1], [2, 3], [1, 0]]), axis=1),
    "dynamic slice": lambda x, y: lax.dynamic_slice(x, (1, 0), (2, 3)),
    "dynamic update": lambda x, y: lax.dynamic_update_slice(x, y[:2, :2], (1, 1)),
    "scatter": lambda x, y: x.at[INDEX[:2], 1].set(y[:2, 0]),
    "scatter add": lambda x, y: x.at[..., 2].add(y[:, 0]).at[0].multiply(y[1]),
    "sum of an axis": lambda x, y: x.sum(axis=1) + y.mean(axis=1),
    "product of an axis": lambda x, y: jnp.prod(x, axis=0),
    "sum of pairs": lambda x, y: x.reshape(3, 2, 2).sum(-1),
    "jit": lambda x, y: jax.jit(lambda x: jnp.roll(x, 1))(x) + y,
    "remat": lambda x, y: jax.checkpoint(jnp.sin)(x) + y,
    "named": lambda x, y: checkpoint_name(x, "x") + lax.optimization_barrier((y[0], x))[1],
    "custom rule": lambda x, y: step_function(x) * 2 + y,
    "cond": lambda x, y: lax.cond(True, lambda: x * y, lambda: x + y),
    "scan": moved_by_scan,
    "index in a scan": lambda x, y: lax.scan(lambda c, _: (c[jnp.asarray(INDEX)] + y, None), x, None, length=2)[0],
    "index in a branch": lambda x, y: lax.cond(True, lambda i: x[i], lambda i: 3 * x[i], jnp.asarray(INDEX)) * 2,
    "no derivative": lambda x, y: jnp.floor(x) + lax.stop_gradient(x) + jnp.sign(x) + (x > 0) + y,
    "argument of a choice": lambda x, y: jnp.where(x > 0, y, 2 * y),
    "reduce precision": lambda x, y: lax.reduce_precision(x, 8, 23) + y,
}

# Functions whose pattern may hold more than the Jacobian does.
BOUNDED = {
    "matmul": lambda x, y: x @ y.T,
    "matmul with a constant": lambda x, y: x @ np.ones((4, 2)),
    "sum": lambda x, y: x - x.sum() + y,
    "max": lambda x, y: x.max() * y,
    "max of an axis": lambda x, y: x.max(axis=0),
    "cumsum": lambda x, y: jnp.cumsum(x, axis=1),
    "sort": lambda x, y: jnp.sort(x, axis=0),
    "softmax": lambda x, y: nn.softmax(x, axis=1) * y,
    "logsumexp": lambda x, y: nn.logsumexp(x, axis=0),
    "variance": lambda x, y: (x - x.mean()) / jnp.sqrt(x.var() + 1),
    "conv": lambda x, y: lax.conv_general_dilated(
        x[None], jnp.ones((2, 4, 3)), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    ),
    "dynamic index": lambda x, y: x[(y[0, 0] > 0).astype(int)],
    "dynamic row": lambda x, y: lax.dynamic_update_slice(x, y[:1], ((y[0, 0] > 0).astype(int), 0)),
    "while": lambda x, y: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.roll(c[1], 1)), (0, x))[1],
    "long scan": lambda x, y: lax.scan(lambda c, _: (c + y, None), x, None, length=100)[0],
    "gather of mixed": lambda x, y: jnp.cumsum(x, axis=0)[INDEX],
    "scatter max": lambda x, y: x.at[0].max(y[1]) + y,
    "known mask": lambda x, y: jnp.where(np.arange(12).reshape(A) % 2 == 0, x, y),
    "gather of all mixed": lambda x, y: (x.sum() * y @ jnp.ones((4, 4)))[INDEX],
    "scatter twice": lambda x, y: x.at[np.array([1, 1])].add(y[:2]),
    "scatter of mixed": lambda x, y: x.at[0].add((y @ jnp.ones((4, 4)))[0]),
    "top k": lambda x, y: lax.top_k(x, 2)[0],
}


def patterns_of(function, *args):
    """The patterns of the results of ``function``, by argument; None where there is no dependence."""
    jaxpr, consts = open_jaxpr(jax.make_jaxpr(function)(*args))
    patterns = {v: {v: Pattern.identity(v.aval.shape)} for v in jaxpr.invars}
    Positions(dict(zip(jaxpr.constvars, consts, strict=True))).propagate(jaxpr.eqns, patterns)
    (out,) = jaxpr.outvars
    return [patterns.get(out, {}).get(v) for v in jaxpr.invars]


def as_matrix(pattern, rows, columns):
    """``(element of the value, element of the source)``: whether it is listed."""
    matrix = np.zeros((rows, columns), bool)
    if pattern is not None:
        units, elements, _ = pattern.listed()
        matrix[units, elements] = True
    return matrix


def jacobians(function, *args):
    out = jax.eval_shape(function, *args)
    full = jax.jacfwd(function, argnums=tuple(range(len(args))))(*args)
    return [np.abs(np.asarray(j)).reshape(out.size, a.size) > 0 for j, a in zip(full, args, strict=True)]


@pytest.fixture
def args(rng):
    return jnp.asarray(rng.normal(size=A)), jnp.asarray(rng.normal(size=B))


@pytest.mark.loose_promotion
@pytest.mark.parametrize("name", EXACT)
def test_the_pattern_is_the_jacobians(name, args):
    for pattern, jacobian in zip(patterns_of(EXACT[name], *args), jacobians(EXACT[name], *args), strict=True):
        assert pattern is None or not pattern.mixed
        np.testing.assert_array_equal(as_matrix(pattern, *jacobian.shape), jacobian)


@pytest.mark.loose_promotion
@pytest.mark.parametrize("name", BOUNDED)
def test_the_pattern_bounds_the_jacobian(name, args):
    for pattern, jacobian in zip(patterns_of(BOUNDED[name], *args), jacobians(BOUNDED[name], *args), strict=True):
        if pattern is None or not pattern.mixed:
            assert not (jacobian & ~as_matrix(pattern, *jacobian.shape)).any()
        if pattern is not None:
            assert pattern.shape == jax.eval_shape(BOUNDED[name], *args).shape


def test_a_custom_rule_is_followed_by_value(args):
    """Through its comparison, since its derivative is not that of its body."""
    (pattern,) = patterns_of(step_function, args[0])
    np.testing.assert_array_equal(as_matrix(pattern, 12, 12), np.eye(12, dtype=bool))


def test_what_a_broadcast_repeats_is_spread(args):
    x = args[0][0]
    (pattern,) = patterns_of(lambda x: x - x.mean(), x)
    rows, elements, spread = pattern.listed()
    np.testing.assert_array_equal(spread, rows != elements)
    (pattern,) = patterns_of(lambda x: x.reshape(2, 2).sum(axis=1), x)
    assert not pattern.listed()[2].any()
    (pattern,) = patterns_of(lambda x: jnp.tile(x, 2), x)
    assert pattern.listed()[2].all()
    (pattern,) = patterns_of(lambda x: jnp.pad(x, 2)[None], x)
    assert not pattern.listed()[2].any()


def test_more_elements_than_fit_in_a_list_count_as_all():
    many = jnp.ones(MAX_LISTED + 1)
    (pattern,) = patterns_of(lambda x: x * x.sum(), many)
    assert pattern.mixed
    rows, elements, spread = pattern.listed()
    np.testing.assert_array_equal(rows, elements)
    assert not spread.any()
    (pattern,) = patterns_of(jnp.sum, many)
    assert (pattern.mixed, pattern.width) == (True, 0)
    (pattern,) = patterns_of(lambda x: sum(jnp.roll(x, k) for k in range(MAX_LISTED + 1)), many)
    assert (pattern.mixed, pattern.width) == (True, 0)


def test_long_lists_give_way_to_direct_entries():
    def function(x):
        return sum(jnp.broadcast_to(x[k], x.shape) for k in range(MAX_LISTED)) + x

    (pattern,) = patterns_of(function, jnp.ones(30))
    rows, elements, spread = pattern.listed()
    assert pattern.mixed
    assert not spread.any()
    np.testing.assert_array_equal(rows, elements)


def test_unions_are_sorted_and_without_repetition():
    a, b = Pattern(np.array([[4, 3]])), Pattern(np.array([[5, 2]]))  # 2 direct, 1 spread; 2 spread, 1 direct
    np.testing.assert_array_equal(union([a, b]).entries, [[4, 2]])
    assert union([Pattern.mixing((1,)), a]).mixed
    assert union([a, Pattern.mixing((1,))]).mixed
    assert not union([a, a]).mixed
    assert Pattern(np.array([[-1]])).is_empty
    assert not a.is_empty
