"""Each layer without states against NumPy."""

import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.nn import initializers

from braintrace_core import nn
from tests.core.nn.zoo import HALF, LAYERS, STRUCTURE, assert_close


def built(name):
    """A layer of the zoo, a batch of inputs, its output, its parameters."""
    layer, x = LAYERS[name].build(), LAYERS[name].inputs(1, 5)[0]
    return layer, np.asarray(x), np.asarray(layer(x)), layer.weight.value


@pytest.mark.parametrize(("name", "mask"), [("Linear", 1), ("Linear masked", HALF)])
def test_linear(name, mask):
    _, x, y, p = built(name)
    assert_close(y, x @ (np.asarray(p["weight"]) * mask) + np.asarray(p["bias"])[None])


def test_linear_takes_any_leading_axes(rng):
    layer, x = nn.Linear(3, 4), rng.normal(size=(2, 5, 3))
    assert_close(layer(x)[1], layer(x[1]))


def test_no_bias():
    assert set(nn.Linear(3, 4, b_init=None).weight.value) == {"weight"}
    assert set(nn.Conv1d((6, 3), 4, 3, b_init=None).weight.value) == {"weight"}
    assert set(nn.GroupedLinear(2, 3, 4, b_init=None).weight.value) == {"weight"}
    assert set(nn.SparseLinear(STRUCTURE, b_init=None).weight.value) == {"weight"}
    assert set(nn.ScaledWSLinear(3, 4, b_init=None, gain=False).weight.value) == {"weight"}


def test_grouped_linear():
    _, x, y, p = built("GroupedLinear")
    for g in range(2):
        assert_close(y[:, g], x[:, g] @ p["weight"][g] + np.asarray(p["bias"])[g][None])


def test_grouped_linear_scales_by_the_inputs_of_one_group():
    weight = nn.GroupedLinear(50, 20, 30).weight.value["weight"]
    assert np.std(weight) == pytest.approx(np.sqrt(2 / 20), rel=0.05)


def test_signed_linear():
    layer, x, y, p = built("SignedWLinear")
    assert_close(y, x @ ((2 * HALF - 1) * np.abs(p)))
    layer.weight.value = -layer.weight.value
    assert_close(layer(x), y)


def test_signed_linear_is_positive_unless_told():
    assert (nn.SignedWLinear(3, 4)(np.eye(3)) >= 0).all()


@pytest.mark.parametrize("gain", [True, False])
def test_scaled_weight_standardisation(gain, rng):
    layer = nn.ScaledWSLinear(6, 4, gain=gain, mask=np.arange(24).reshape(6, 4) % 3)
    if gain:
        layer.weight.value = layer.weight.value | {"gain": jnp.asarray(rng.normal(size=(1, 4)))}
    p, x = layer.weight.value, rng.normal(size=(5, 6))
    weight = np.asarray(p["weight"])
    standard = (weight - weight.mean(0)) / np.sqrt(6 * weight.var(0))
    assert_close(np.linalg.norm(standard, axis=0), 1)
    expected = x @ (standard * np.asarray(p.get("gain", np.ones((1, 4)))) * layer.mask)
    assert_close(layer(x), expected)


def test_equal_weights_are_standardised_to_zero():
    layer = nn.ScaledWSLinear(3, 2, w_init=np.ones((3, 2)))
    assert (layer(np.ones(3)) == 0).all()


def test_sparse_linear():
    _, x, y, p = built("SparseLinear")
    matrix = np.zeros((3, 4))
    matrix[STRUCTURE[0], STRUCTURE[1]] = p["weight"]
    assert_close(y, x @ matrix + np.asarray(p["bias"])[None])


def test_sparse_linear_starts_from_the_data_of_a_matrix():
    matrix = np.where(HALF, np.arange(12.0).reshape(3, 4), 0)
    layer = nn.SparseLinear(jax.experimental.sparse.BCOO.fromdense(matrix))
    assert_close(layer(np.eye(3)), matrix)


def test_sparse_linear_scales_by_the_mean_number_of_inputs(rng):
    layer = nn.SparseLinear((rng.integers(100, size=5000), rng.integers(50, size=5000), (100, 50)))
    assert np.std(layer.weight.value["weight"]) == pytest.approx(np.sqrt(2 / 100), rel=0.05)


def test_lora():
    _, x, y, p = built("LoRA")
    assert_close(y, 3.0 / 2 * (x @ p["lora_a"] @ p["lora_b"]))


def test_lora_starts_as_its_base(rng):
    base, x = nn.Linear(3, 4), rng.normal(size=(5, 3))
    adapted = nn.LoRA(3, 2, 4, base=base)
    np.testing.assert_array_equal(adapted(x), base(x))
    adapted.weight.value = jax.tree.map(jnp.ones_like, adapted.weight.value)
    assert not np.allclose(adapted(x), base(x))
    assert set(adapted.states()) == {("base", "weight"), ("weight",)}


def test_embedding():
    layer, x, y, p = built("Embedding")
    np.testing.assert_array_equal(y, np.asarray(p)[x])
    assert layer(np.zeros((2, 3), int)).shape == (2, 3, 4)
    assert nn.Embedding(5, (2, 3))(np.zeros(7, int)).shape == (7, 2, 3)


@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        ("Conv1d", ("NWC", "WIO", "NWC"), {"window_strides": (1,), "padding": "SAME"}),
        ("Conv2d", ("NHWC", "HWIO", "NHWC"), {"window_strides": (2, 2), "padding": "SAME", "feature_group_count": 2}),
        ("Conv3d", ("NDHWC", "DHWIO", "NDHWC"), {"window_strides": (1, 1, 1), "padding": "VALID"}),
    ],
)
def test_conv(name, layout, options):
    layer, x, y, p = built(name)
    plain = lax.conv_general_dilated(jnp.asarray(x), p["weight"], dimension_numbers=layout, **options)
    expected = plain + jnp.broadcast_to(p["bias"], plain.shape)
    assert_close(y, expected)
    assert y.shape[1:] == layer.out_size


def test_conv_masks_and_dilates(rng):
    mask = np.array([1.0, 0.0, 1.0]).reshape(3, 1, 1)
    layer = nn.Conv1d((8, 1), 1, 3, rhs_dilation=2, padding=[(4, 0)], mask=mask, w_init=np.ones((3, 1, 1)))
    x = rng.normal(size=(8, 1))
    padded = np.concatenate([np.zeros((4, 1)), x])
    assert_close(layer(x), padded[:8] + padded[4:])


def test_first_values_may_be_arrays():
    weight = np.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(nn.Linear(3, 4, w_init=weight).weight.value["weight"], weight)


def test_first_values_differ_between_weight_and_bias():
    value = nn.Linear(1, 4, w_init=initializers.normal(), b_init=initializers.normal()).weight.value
    assert not np.allclose(value["weight"][0], value["bias"])
