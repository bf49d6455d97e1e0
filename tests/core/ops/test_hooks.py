"""A function of the parameter and a mask stand before the operator, and gradients go back through both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_core import ops

WHERE = (np.array([0, 2, 1]), np.array([1, 0, 1]), (3, 2))
INDICES = np.array([1, 0, 1])
# operator(x, weight, bias, weight_fn, bias_fn, mask), the shapes of its operands
HOOKED = {
    "matmul": (lambda x, w, b, f, g, m: ops.matmul(x, w, b, weight_fn=f, bias_fn=g, mask=m), [(4, 3), (3, 2), (2,)]),
    "element_wise": (lambda x, w, b, f, g, m: x * ops.element_wise(w, weight_fn=f, mask=m), [(3,), (3,)]),
    "grouped_matmul": (
        lambda x, w, b, f, g, m: ops.grouped_matmul(x, w, b, weight_fn=f, bias_fn=g, mask=m),
        [(4, 2, 3), (2, 3, 2), (2, 2)],
    ),
    "einsum": (lambda x, w, b, f, g, m: ops.einsum("bi,oi->bo", x, w, weight_fn=f, mask=m), [(4, 3), (2, 3)]),
    "embedding": (lambda x, w, b, f, g, m: x * ops.embedding(INDICES, w, weight_fn=f, mask=m), [(3, 2), (4, 2)]),
    "conv": (
        lambda x, w, b, f, g, m: ops.conv(x, w, b, kernel_fn=f, bias_fn=g, mask=m),
        [(2, 5, 3), (2, 3, 2), (2,)],
    ),
    "sparse_matmul": (
        lambda x, w, b, f, g, m: ops.sparse_matmul(
            x, w, structure=WHERE, bias=b, weight_fn=(lambda v: f(v) * m) if f else None, bias_fn=g
        ),
        [(4, 3), (3,), (2,)],
    ),
}


@pytest.mark.parametrize("name", HOOKED)
def test_hooks_are_part_of_the_parameter(name, rng, marks):
    operator, shapes = HOOKED[name]
    x, weight, *bias = (jnp.asarray(rng.normal(size=shape), jnp.float64) for shape in shapes)
    mask = (jnp.arange(weight.size, dtype=jnp.float64) % 2).reshape(weight.shape)

    def hooked(x, weight, *bias):
        b = bias[0] if bias else None
        return jnp.sum(jnp.sin(operator(x, weight, b, jnp.tanh, jnp.exp, mask)))

    def by_hand(x, weight, *bias):
        b = jnp.exp(bias[0]) if bias else None
        return jnp.sum(jnp.sin(operator(x, jnp.tanh(weight) * mask, b, None, None, None)))

    every = tuple(range(len(shapes)))
    actual, expected = (jax.jit(jax.value_and_grad(f, every))(x, weight, *bias) for f in (hooked, by_hand))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), actual, expected)
    assert np.all(np.asarray(actual[1][1])[np.asarray(mask) == 0] == 0)
    assert len(marks(hooked, x, weight, *bias)) == 1


def test_boolean_mask_keeps_the_dtype():
    y = ops.matmul(jnp.ones(2, jnp.bfloat16), jnp.ones((2, 2), jnp.bfloat16), mask=np.eye(2, dtype=bool))
    assert y.dtype == jnp.bfloat16
    assert y.tolist() == [1.0, 1.0]


def test_hooks_of_lora(rng):
    x, B, A, bias = (jnp.asarray(rng.normal(size=shape)) for shape in [(4, 3), (3, 2), (2, 5), (5,)])

    def hooked(*operands):
        return jnp.sum(jnp.sin(ops.lora_matmul(*operands, alpha=2, b_fn=jnp.tanh, a_fn=jnp.exp, bias_fn=jnp.abs)))

    def by_hand(x, B, A, bias):
        return jnp.sum(jnp.sin(2 * x @ jnp.tanh(B) @ jnp.exp(A) + jnp.abs(bias)[None]))

    actual, expected = (jax.jit(jax.grad(f, (0, 1, 2, 3)))(x, B, A, bias) for f in (hooked, by_hand))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), actual, expected)
