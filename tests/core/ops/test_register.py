"""``register_primitive``: what a user's own operator gets from the function that defines it."""

import jax
import jax.export
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

from braintrace_core.ops import is_boundary, is_etp, matmul, register_primitive


def gated(x, weight, gate, *, power):
    """Two results: the gate that was open, and ``y``."""
    open_gate = jax.nn.sigmoid(gate) ** power
    return open_gate, (x @ weight) * open_gate


gated_p = register_primitive(
    "etp_test_gated",
    gated,
    trainable=lambda *, power: {"weight": 1, "gate": 2} if power else {"weight": 1},
    y_index=1,
    multiple_results=True,
)


def ranked(x, weight):
    """A result without a derivative beside one that has it."""
    y = x @ weight
    return y, jnp.argmax(y, axis=-1)


ranked_p = register_primitive("etp_test_ranked", ranked, trainable={"weight": 1}, multiple_results=True)


@pytest.fixture
def operands(rng):
    return [jnp.asarray(rng.normal(size=shape), jnp.float64) for shape in [(3,), (3, 2), (2,)]]


def close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), actual, expected)


def test_declaration(operands, marks):
    (eqn,) = marks(lambda *values: gated_p.bind(*values, power=2), *operands)
    assert eqn.primitive is gated_p
    assert is_etp(gated_p)
    assert is_boundary(gated_p)
    assert (gated_p.x_index, gated_p.y_index) == (0, 1)
    assert gated_p.trainable_operands(eqn.params) == {"weight": 1, "gate": 2}
    assert gated_p.trainable_operands({"power": 0, "vmapped": ((0, None, None),)}) == {"weight": 1}
    assert [var.aval.shape for var in eqn.outvars] == [(2,), (2,)]
    assert not is_etp(jax.lax.add_p)
    assert not is_boundary(jax.lax.add_p)


def test_several_results(operands):
    def marked(*values):
        return gated_p.bind(*values, power=2)

    def plain(*values):
        return list(gated(*values, power=2))

    def loss(function):
        return lambda *values: sum(jnp.sum(jnp.sin(result)) for result in function(*values))

    def everything(function):
        """Values, gradients, both ways of batching and second derivatives, in one compilation."""

        def compute(x, weight, gate):
            many = [jnp.stack([value, 2 * value]) for value in (x, weight, gate)]
            return {
                "values": function(x, weight, gate),
                "gradients": jax.grad(loss(function), (0, 1, 2))(x, weight, gate),
                "batch": jax.vmap(function)(*many),
                "batch of weights": jax.vmap(function, (None, 0, None))(x, many[1], gate),
                "batch of gradients": jax.vmap(jax.grad(loss(function)))(*many),
                "hessian": jax.hessian(loss(function), (1, 2))(x, weight, gate),
            }

        return jax.jit(compute)(*operands)

    close(marked(*operands), plain(*operands))
    close(everything(marked), everything(plain))
    jax.test_util.check_grads(jax.jit(marked), operands, order=2)
    exported = jax.export.export(jax.jit(marked), platforms=("cpu", "tpu", "cuda"))(*operands)
    close(exported.call(*operands), plain(*operands))


def test_integer_result_has_no_derivative(operands):
    x, weight, _ = operands
    y, place = ranked_p.bind(x, weight)
    assert place == np.argmax(y)
    gradient = jax.grad(lambda w: jnp.sum(ranked_p.bind(x, w)[0] ** 2))(weight)
    np.testing.assert_allclose(gradient, jax.grad(lambda w: jnp.sum((x @ w) ** 2))(weight), rtol=1e-12)
    best = jax.jit(jax.grad(lambda w: (lambda y, i: y[i])(*ranked_p.bind(x, w))))(weight)
    np.testing.assert_allclose(best, np.outer(x, np.arange(2) == place), rtol=1e-12)
    many = jnp.stack([x, -x, 2 * x])
    np.testing.assert_array_equal(jax.vmap(ranked_p.bind, (0, None))(many, weight)[1], np.argmax(many @ weight, -1))


def test_operator_of_operators(operands, marks):
    """An operator may be defined by others; its own mark is the one that is seen."""
    outer_p = register_primitive("etp_test_outer", lambda x, w: jnp.tanh(matmul(x, w)), trainable={"weight": 1})
    x, weight, _ = operands
    assert [eqn.primitive for eqn in marks(outer_p.bind, x, weight)] == [outer_p]
    expected = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(weight)
    actual = jax.jit(jax.value_and_grad(lambda w: jnp.sum(outer_p.bind(x, w))))(weight)
    close(actual, expected)
