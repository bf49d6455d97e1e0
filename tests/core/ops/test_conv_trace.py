"""The trace of a convolution in a long window: the same, without patches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_core.ops.conv_trace import ConvTrace

SETTINGS = {
    "plain": dict(layout=("NWC", "WIO", "NWC"), x=(7, 2), kernel=(3, 2, 4), padding=[(1, 1)]),
    "stride": dict(layout=("NWC", "WIO", "NWC"), x=(9, 2), kernel=(3, 2, 4), padding=[(1, 0)], strides=(2,)),
    "dilation": dict(layout=("NWC", "WIO", "NWC"), x=(9, 2), kernel=(3, 2, 4), padding=[(0, 0)], dilation=(2,)),
    "groups": dict(layout=("NWC", "WIO", "NWC"), x=(7, 4), kernel=(3, 2, 4), padding=[(1, 1)], groups=2),
    "image": dict(layout=("NHWC", "HWIO", "NHWC"), x=(5, 6, 2), kernel=(3, 2, 2, 3), padding=[(1, 1), (0, 1)]),
    "channels first": dict(layout=("NCHW", "OIHW", "NCHW"), x=(2, 5, 6), kernel=(3, 2, 3, 2), padding=[(1, 1), (0, 1)]),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_one_place_of_the_kernel_after_the_other_is_the_same_as_patches(name):
    made = SETTINGS[name]
    draws = np.random.default_rng(0)
    x, kernel = jnp.asarray(draws.normal(size=(6, 2, *made["x"]))), jnp.asarray(draws.normal(size=made["kernel"]))
    numbers = jax.lax.conv_dimension_numbers((1, *made["x"]), kernel.shape, made["layout"])
    spatial = len(made["padding"])
    params = {
        "dimension_numbers": numbers,
        "feature_group_count": made.get("groups", 1),
        "batched": False,
        "window_strides": made.get("strides", (1,) * spatial),
        "padding": made["padding"],
        "lhs_dilation": (1,) * spatial,
        "rhs_dilation": made.get("dilation", (1,) * spatial),
    }
    y = jax.lax.conv_general_dilated(
        x[:1, 0],
        kernel,
        params["window_strides"],
        params["padding"],
        rhs_dilation=params["rhs_dilation"],
        dimension_numbers=made["layout"],
        feature_group_count=params["feature_group_count"],
    )[0]
    rule = ConvTrace(params, kernel, y.shape)
    cotangent = jnp.asarray(draws.normal(size=(6, 2, *y.shape)))
    grouped = rule._in_groups(cotangent)
    expected = rule.product.instant(x, grouped)
    assert x.shape[0] > rule.channels_out, "as long a window as takes the other way"
    np.testing.assert_allclose(rule.instant(x, cotangent), expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(rule._by_places(x, grouped), expected, rtol=1e-12, atol=1e-14)
    no_patches = jax.make_jaxpr(rule.instant)(x, cotangent)
    assert "conv_general_dilated" not in str(no_patches)
