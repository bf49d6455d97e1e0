"""``etp_conv`` can stand for any convolution that JAX has, and ``conv`` writes it down in one way only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from braintrace_core.ops import conv, etp_conv_p

NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
MIXED = ("CNHW", "IHOW", "HNWC")
# shape of x, shape of the kernel, strides, padding, further arguments of lax.conv_general_dilated
PLAIN = {
    "no-space": ((2, 3), (4, 3), (), "SAME", {}),
    "1d": ((2, 3, 8), (4, 3, 3), (2,), "VALID", {}),
    "layout": ((3, 2, 6, 5), (3, 3, 4, 2), (1, 2), "SAME", {"dimension_numbers": MIXED}),
    "negative-padding": ((2, 6, 5, 3), (3, 3, 3, 4), (1, 1), [(-1, 2), (3, 0)], {"dimension_numbers": NHWC}),
    "transposed": ((2, 3, 6, 5), (4, 3, 3, 3), (1, 1), [(2, 1), (1, 1)], {"lhs_dilation": (2, 3)}),
    "groups": ((4, 6, 5, 5), (8, 3, 2, 2), (1, 1), "SAME", {"feature_group_count": 2, "rhs_dilation": (2, 1)}),
    "batch-groups": ((4, 6, 5, 5), (8, 6, 2, 2), (1, 1), "SAME", {"batch_group_count": 2}),
    "precision": ((2, 3, 8), (4, 3, 3), (1,), "SAME", {"precision": lax.Precision.HIGHEST}),
    "wide-result": ((2, 3, 8), (4, 3, 3), (1,), "SAME", {"preferred_element_type": jnp.float64}),
    "4d": ((1, 2, 3, 3, 3, 3), (2, 2, 2, 2, 2, 2), (1,) * 4, "SAME", {}),
}


@pytest.mark.parametrize("name", PLAIN)
def test_any_plain_equation_can_be_marked(name, rng):
    x_shape, kernel_shape, strides, padding, options = PLAIN[name]
    x, kernel = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (x_shape, kernel_shape))

    def plain(x, kernel):
        return lax.conv_general_dilated(x, kernel, strides, padding, **options)

    (eqn,) = jax.make_jaxpr(plain)(x, kernel).eqns

    def marked(x, kernel):
        return etp_conv_p.bind(x, kernel, **eqn.params, has_bias=False, batched=True)

    def gradients(function):
        return jax.grad(lambda *values: jnp.sum(jnp.sin(function(*values))), (0, 1))(x, kernel)

    y, expected = marked(x, kernel), plain(x, kernel)
    assert y.dtype == expected.dtype
    np.testing.assert_array_equal(y, expected)
    jax.tree.map(np.testing.assert_array_equal, gradients(marked), gradients(plain))


def test_mark_has_the_parameters_of_the_plain_equation(marks):
    x, kernel = jnp.ones((2, 6, 5, 3), jnp.float32), jnp.ones((3, 2, 3, 4), jnp.float32)
    (eqn,) = marks(lambda x, k: conv(x, k, strides=2, rhs_dilation=[2, 1]), x, kernel)
    (plain,) = jax.make_jaxpr(
        lambda x, k: lax.conv_general_dilated(x, k, (2, 2), "SAME", rhs_dilation=(2, 1), dimension_numbers=NHWC)
    )(x, kernel).eqns
    assert {name: plain.params[name] for name in eqn.params if name in plain.params} == {
        name: value for name, value in eqn.params.items() if name not in ("has_bias", "batched")
    }


@pytest.mark.parametrize("layout", [NCHW, MIXED, lax.conv_dimension_numbers((1,) * 4, (1,) * 4, NCHW)])
def test_without_a_batch_in_any_layout(layout, rng):
    numbers = lax.conv_dimension_numbers((1,) * 4, (1,) * 4, layout)
    sizes = dict(zip(numbers.lhs_spec, (1, 3, 6, 5), strict=True))
    x = jnp.asarray(rng.normal(size=[sizes[axis] for axis in range(4)]))
    sizes = dict(zip(numbers.rhs_spec, (4, 3, 2, 3), strict=True))
    kernel, bias = jnp.asarray(rng.normal(size=[sizes[axis] for axis in range(4)])), jnp.asarray(rng.normal(size=4))
    y = conv(jnp.squeeze(x, numbers.lhs_spec[0]), kernel, bias, dimension_numbers=layout)
    expected = conv(x, kernel, bias, dimension_numbers=layout)
    np.testing.assert_allclose(y, jnp.squeeze(expected, numbers.out_spec[0]), rtol=1e-12)


def test_bias_is_on_the_channels(rng):
    x, kernel = jnp.asarray(rng.normal(size=(2, 3, 4, 4))), jnp.zeros((4, 3, 2, 2))
    y = conv(x, kernel, jnp.arange(4.0), dimension_numbers=NCHW)
    np.testing.assert_array_equal(y, np.broadcast_to(np.arange(4.0)[None, :, None, None], (2, 4, 4, 4)))
