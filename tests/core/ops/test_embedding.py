"""``embedding`` reads indices as ``weight[indices]`` does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_core.ops import embedding, etp_embedding_p

WEIGHT = jnp.arange(8, dtype=jnp.float64).reshape(4, 2)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.int64, jnp.uint8, jnp.uint32])
def test_index_dtypes(dtype):
    indices = jnp.array([3, 0, 3], dtype)
    np.testing.assert_array_equal(embedding(indices, WEIGHT), WEIGHT[indices])


def test_indices_out_of_range():
    indices = jnp.array([-1, -4, 4, -5, 100])
    np.testing.assert_array_equal(embedding(indices, WEIGHT), WEIGHT[indices])
    actual, expected = (jax.grad(lambda w, f=f: jnp.sum(f(indices, w)))(WEIGHT) for f in (embedding, lambda i, w: w[i]))
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
def test_modes_of_the_primitive(mode):
    indices = jnp.array([0, 3, 7])
    expected = WEIGHT.at[indices].get(mode=mode)
    np.testing.assert_array_equal(etp_embedding_p.bind(indices, WEIGHT, mode=mode), expected)


def test_repeated_indices_add_their_gradients():
    gradient = jax.grad(lambda w: jnp.sum(embedding(jnp.array([1, 1, 2]), w)))(WEIGHT)
    np.testing.assert_array_equal(gradient[:, 0], [0, 2, 1, 0])
