"""On a mesh, a marked operation has the sharding of the plain one, and the same gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from braintrace_core.ops import embedding, matmul

pytestmark = pytest.mark.several_devices

P = PartitionSpec


def mesh(kind):
    return jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices()[:2])


WHOLE, ROWS, COLUMNS = P(None, None), P("d", None), P(None, "d")


def spread(x_spec, weight_spec):
    return jax.device_put(np.ones((4, 6)), x_spec), jax.device_put(np.ones((6, 8)), weight_spec)


@pytest.mark.parametrize(
    ("x_spec", "weight_spec"),
    [
        (WHOLE, WHOLE),
        (WHOLE, ROWS),
        (WHOLE, COLUMNS),
        (ROWS, WHOLE),
        (ROWS, ROWS),
        (COLUMNS, WHOLE),
        (COLUMNS, COLUMNS),
    ],
    ids=str,
)
def test_matmul_has_the_type_of_the_product(x_spec, weight_spec):
    with jax.set_mesh(mesh(AxisType.Explicit)):
        x, weight = spread(x_spec, weight_spec)
        assert jax.typeof(matmul(x, weight)) == jax.typeof(x @ weight)
        assert jax.typeof(jax.jit(matmul)(x, weight)) == jax.typeof(x @ weight)
        actual, plain = (
            jax.grad(lambda x, w, f=f: jnp.sum(f(x, w) ** 2), (0, 1))(x, weight) for f in (matmul, jnp.matmul)
        )
        assert jax.tree.map(jax.typeof, actual) == jax.tree.map(jax.typeof, plain)
        jax.tree.map(np.testing.assert_array_equal, actual, plain)


@pytest.mark.parametrize(("x_spec", "weight_spec"), [(COLUMNS, ROWS), (ROWS, COLUMNS)], ids=str)
def test_what_jax_refuses_stays_refused(x_spec, weight_spec):
    with jax.set_mesh(mesh(AxisType.Explicit)):
        x, weight = spread(x_spec, weight_spec)
        for product in (jnp.matmul, matmul):
            with pytest.raises(Exception, match=r"illegally sharded|ambiguous how the output should be sharded"):
                product(x, weight)


def test_bias_sharded_with_the_units():
    with jax.set_mesh(mesh(AxisType.Explicit)):
        weight = jax.device_put(jnp.ones((6, 8), jnp.float32), P(None, "d"))
        bias = jax.device_put(jnp.ones(8, jnp.float32), P("d"))
        y = matmul(jnp.ones((4, 6), jnp.float32), weight, bias)
        assert jax.typeof(y).sharding.spec == P(None, "d")


BATCHED = [
    "matmul-batch",
    "grouped-batch",
    "einsum",
    "embedding-batch",
    "conv-batch",
    "conv-2d-groups",
    "sparse-batch",
    "lora-batch",
]


def loss_of(case, operands):
    return lambda function: lambda *floats: jnp.sum(jnp.sin(case.of_floats(function, operands)(*floats)))


@pytest.mark.parametrize("case", BATCHED, indirect=True)
def test_batch_over_an_explicit_mesh(case):
    """The first axis of ``x`` is spread: so is that of ``y``, while the gradient of a parameter stays whole."""
    operands = case.operands(jnp.float64)
    parameters = tuple(range(len(case.floats(operands)) - len(case.trainable), len(case.floats(operands))))
    expected = case.plain(*operands)
    gradients = jax.grad(loss_of(case, operands)(case.plain), parameters)(*case.floats(operands))
    with jax.set_mesh(mesh(AxisType.Explicit)):
        placed = [jax.device_put(value, P("d") if i == 0 else P()) for i, value in enumerate(operands)]
        y = case.operator(*placed)
        assert jax.typeof(y).sharding.spec[0] == "d"
        np.testing.assert_allclose(y, expected, rtol=1e-9)
        found = jax.jit(jax.grad(loss_of(case, placed)(case.operator), parameters))(*case.floats(placed))
        for one, other in zip(found, gradients, strict=True):
            assert not any(jax.typeof(one).sharding.spec)
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", BATCHED, indirect=True)
def test_batch_over_shard_map(case):
    """Each device has its part of the batch and the whole of the parameters."""
    operands = case.operands(jnp.float64)
    parameters = tuple(case.trainable.values())
    specs = (P("d"), *(P() for _ in operands[1:]))

    def gradient(function):
        def total(*values):
            return jax.lax.psum(jnp.sum(jnp.sin(function(*values))), "d")

        local = jax.grad(total, parameters)
        return jax.jit(jax.shard_map(local, mesh=mesh(AxisType.Auto), in_specs=specs, out_specs=P()))(*operands)

    whole = jax.grad(lambda *values: jnp.sum(jnp.sin(case.plain(*values))), parameters)(*operands)
    for function in (case.operator, case.plain):
        for one, other in zip(gradient(function), whole, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def test_embedding_of_a_spread_table():
    indices, table = np.array([[0, 5], [3, 3]]), np.arange(24.0).reshape(6, 4)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        for spec in (P("d", None), P(None, "d")):
            y = embedding(indices, jax.device_put(table, spec))
            assert jax.typeof(y).sharding.spec == P(None, None, spec[1])
            np.testing.assert_array_equal(y, table[indices])
