"""The gradient of a weight over a whole window is one product, and the same as by differentiation."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_core.ops import einsum, grouped_matmul, matmul
from braintrace_core.ops.sums import product_over_steps, sum_leading
from braintrace_core.ops.trace_rules import traces_of

TIME, BATCH = 4, 3
OPERATORS = {
    "vector": (matmul, (3,), (3, 5)),
    "leading axis": (matmul, (2, 3), (3, 5)),
    "grouped": (grouped_matmul, (2, 3), (2, 3, 5)),
    "weight in another order": (lambda x, w: einsum("ai,oia->oa", x, w), (2, 3), (5, 3, 2)),
    "narrow": (matmul, (30,), (30, 2)),
    "narrow, grouped": (grouped_matmul, (2, 30), (2, 30, 1)),
    "narrow, in another order": (lambda x, w: einsum("ai,oia->oa", x, w), (2, 30), (1, 30, 2)),
    "scaled": (lambda x, w: einsum("i,i->i", x, w), (3,), (3,)),
}


def random(seed, shape, dtype):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def window(name, dtype, precision=None):
    """The operator's traces, a window's input and cotangent, and the weight."""
    operator, x_shape, w_shape = OPERATORS[name]
    weight, x = random(0, w_shape, dtype), random(1, (TIME, BATCH, *x_shape), dtype)
    (eqn,) = jax.make_jaxpr(operator)(x[0, 0], weight).jaxpr.eqns
    y = eqn.outvars[0].aval
    traces = traces_of(eqn.primitive, {**eqn.params, "precision": precision}, [x[0, 0], weight], y)
    return traces, x, random(2, (TIME, BATCH, *y.shape), dtype), weight


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.complex128])
@pytest.mark.parametrize("name", OPERATORS)
def test_it_is_that_of_differentiation(name, dtype):
    traces, x, cotangent, weight = window(name, dtype)
    over_window = jax.vmap(jax.vmap(OPERATORS[name][0], (0, None)), (0, None))
    _, pull_back = jax.vjp(lambda w: over_window(x, w), weight)
    np.testing.assert_allclose(traces.gradients(x, cotangent)["weight"], pull_back(cotangent)[0], rtol=1e-12)


def test_mixed_types_are_left_to_differentiation():
    traces, x, cotangent, _ = window("vector", jnp.float32)
    assert "weight" not in traces.gradients(x.astype(jnp.bfloat16), cotangent)


def test_the_operators_precision_is_kept():
    traces, x, cotangent, _ = window("vector", jnp.float32, jax.lax.Precision.HIGHEST)
    assert "HIGHEST" in str(jax.make_jaxpr(traces.gradients)(x, cotangent))


def test_the_cotangent_is_not_transposed():
    traces, x, cotangent, _ = window("vector", jnp.float64)
    text = jax.jit(lambda x, c: traces.gradients(x, jnp.tanh(c))).lower(x, cotangent).compile().as_text()
    assert not re.findall(r"= f64\[\d+,\d+,\d+\]\S* transpose\(%tanh", text)
    assert "rhs_contracting_dims={0}" in text


@pytest.mark.parametrize(("name", "product"), [("narrow", "2,30"), ("narrow, grouped", "2,1,30")])
def test_an_input_that_is_larger_than_all_else_is_not_transposed(name, product):
    traces, x, cotangent, _ = window(name, jnp.float64)
    text = jax.jit(lambda x, c: traces.gradients(jnp.tanh(x), c)).lower(x, cotangent).compile().as_text()
    assert re.search(rf"f64\[{product}\]\S* dot\(", text)
    assert f"30,{TIME * BATCH}]" not in text


@pytest.mark.parametrize(
    ("shape", "inputs", "outputs", "flat"),
    [
        *[((1, 16), 384, 256, True), ((4, 16), 256, 128, True), ((2, 64), 256, 256, True), ((1, 100), 640, 512, True)],
        *[((1, 21), 128, 256, False), ((8, 17), 384, 256, False), ((4, 16), 32, 64, False), ((8, 16), 640, 512, False)],
    ],
)
@pytest.mark.parametrize("devices", [1, 8])
def test_some_rows_are_one_axis_on_one_device(monkeypatch, shape, inputs, outputs, flat, devices):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    x, cotangent = random(0, (*shape, inputs), jnp.float64), random(1, (*shape, outputs), jnp.float64)
    product = jax.jit(lambda x, c: product_over_steps("i", "io", "o", x, c, None))
    np.testing.assert_allclose(product(x, cotangent), jnp.einsum("tbi,tbo->io", x, cotangent), rtol=1e-9, atol=1e-9)
    rows = f"f64[{math.prod(shape)},{inputs}]"
    assert (rows in str(product.trace(x, cotangent).jaxpr)) == (flat and devices == 1)


@pytest.mark.parametrize(
    ("shape", "dtype", "apart"),
    [
        *[((2, 1), jnp.float32, True), ((17, 1), jnp.float64, True), ((1, 20), jnp.complex64, True)],
        *[((1, 1), jnp.float32, False), ((3, 7), jnp.float32, False), ((4, 1), jnp.bfloat16, False)],
    ],
)
@pytest.mark.parametrize("devices", [1, 8])
def test_a_few_rows_are_added_one_by_one_on_one_device(monkeypatch, shape, dtype, apart, devices):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    x, cotangent = random(0, (*shape, 12), dtype), random(1, (*shape, 8), dtype)
    product = jax.jit(lambda x, c: product_over_steps("i", "io", "o", x, c, None))
    tolerance = 1e-2 if dtype == jnp.bfloat16 else 1e-5
    wide = [np.asarray(value, np.complex128) for value in (x, cotangent)]
    np.testing.assert_allclose(product(x, cotangent), np.einsum("tbi,tbo->io", *wide), rtol=tolerance, atol=tolerance)
    assert (" mul " in str(product.trace(x, cotangent).jaxpr)) == (apart and devices == 1)


def test_what_a_few_rows_are_made_of_is_made_once(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    x, cotangent = random(0, (2, 1, 12), jnp.float32), random(1, (2, 1, 8), jnp.float32)

    def of_two_steps(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        later = cotangent[1] - x[0, :, :8]
        return product_over_steps("i", "io", "o", x, jnp.stack([later - cotangent[0], later]), None)

    computations = jax.jit(of_two_steps).lower(x, cotangent).compile().as_text().split("\n\n")
    assert not any("f32[12,8]" in text and " subtract(" in text for text in computations)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.complex128])
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize(("lead", "count"), [((TIME, BATCH), 2), ((TIME,), 1), ((1, BATCH), 1), ((1,), 1)])
def test_leading_axes_are_summed(monkeypatch, lead, count, devices, dtype):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    values = random(0, (*lead, 5, 2), dtype)
    compiled = jax.jit(lambda values: sum_leading(values, count)).lower(values).compile()
    np.testing.assert_allclose(compiled(values), values.sum(tuple(range(count))), rtol=1e-12)
    assert devices > 1 or " reduce(" not in compiled.as_text()
