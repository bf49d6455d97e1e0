"""``sparse_matmul`` reads a matrix from wherever its places are written, in the order of that matrix's data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax.experimental import sparse

from braintrace_core.ops import sparse_matmul

DENSE = np.array([[0, 1, 0, 2], [0, 0, 0, 0], [3, 0, 4, 5]], np.float64)


def _unsorted_bcoo():
    places = jnp.array([[2, 3], [0, 1], [2, 2], [2, 0], [0, 3]])
    return sparse.BCOO((jnp.array([5.0, 1.0, 4.0, 3.0, 2.0]), places), shape=DENSE.shape)


def _brainevent(name):
    brainevent = pytest.importorskip("brainevent")
    return getattr(brainevent, name).fromdense(jnp.asarray(DENSE))


def _saiunit_coo():
    saiunit = pytest.importorskip("saiunit")
    return saiunit.sparse.COO.fromdense(jnp.asarray(DENSE))


STRUCTURES = {
    "bcoo": lambda: sparse.BCOO.fromdense(DENSE),
    "bcoo-unsorted": _unsorted_bcoo,
    "bcoo-padded": lambda: sparse.BCOO.fromdense(DENSE, nse=8),
    "bcsr": lambda: sparse.BCSR.fromdense(DENSE),
    "bcsr-padded": lambda: sparse.BCSR.from_bcoo(sparse.BCOO.fromdense(DENSE, nse=8)),
    "jax-coo": lambda: sparse.COO.fromdense(DENSE),
    "jax-csr": lambda: sparse.CSR.fromdense(DENSE),
    "jax-csc": lambda: sparse.CSC.fromdense(DENSE),
    "scipy-coo": lambda: scipy.sparse.coo_array(DENSE),
    "scipy-csr": lambda: scipy.sparse.csr_array(DENSE),
    "scipy-csc": lambda: scipy.sparse.csc_matrix(DENSE),
    "brainevent-csr": lambda: _brainevent("CSR"),
    "brainevent-csc": lambda: _brainevent("CSC"),
    "saiunit-coo": _saiunit_coo,
}


@pytest.mark.loose_promotion  # brainevent and scipy
@pytest.mark.parametrize("name", STRUCTURES)
def test_structure(name, rng):
    structure = STRUCTURES[name]()
    x = jnp.asarray(rng.normal(size=(2, 3)))

    def of_weight(weight):
        return sparse_matmul(x, weight, structure=structure)

    weight = jnp.asarray(structure.data)
    np.testing.assert_allclose(jax.jit(of_weight)(weight), x @ DENSE, rtol=1e-12)
    # d sum(y) / d weight is the sum of the inputs of that row: the places of the data, read back.
    gradient = jax.jit(jax.grad(lambda w: jnp.sum(of_weight(w))))(weight)
    sums = np.asarray(x).sum(axis=0)
    expected = [sums[np.argwhere(value == DENSE)[0, 0]] if value else 0 for value in np.asarray(weight)]
    np.testing.assert_allclose(gradient, expected, rtol=1e-12)
    # A known structure is read once, outside the program that uses it.
    assert len(jax.make_jaxpr(of_weight)(weight).eqns) == 1


def test_structure_inside_jit(rng):
    """The places may themselves be traced: a matrix is an argument like any other."""
    x, matrix = jnp.asarray(rng.normal(size=3)), sparse.BCSR.fromdense(DENSE)
    y = jax.jit(lambda x, matrix: sparse_matmul(x, matrix.data, structure=matrix))(x, matrix)
    np.testing.assert_allclose(y, x @ DENSE, rtol=1e-12)


def test_entries_past_the_end_count_for_nothing():
    x, weight = jnp.ones(3), jnp.array([1.0, 10.0, 100.0])
    structure = (np.array([0, 3, 0]), np.array([1, 1, 2]), (3, 2))

    def of(x, weight):
        return sparse_matmul(x, weight, structure=structure)

    assert of(x, weight).tolist() == [0.0, 1.0]
    gradients = jax.grad(lambda *values: jnp.sum(of(*values)), (0, 1))(x, weight)
    assert [gradient.tolist() for gradient in gradients] == [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]


def test_half_precision_is_summed_in_full():
    entries = 2000
    structure = (np.arange(entries), np.zeros(entries, int), (entries, 1))
    ones = jnp.ones(entries, jnp.bfloat16)
    y = sparse_matmul(ones, ones, structure=structure)
    assert y.dtype == jnp.bfloat16
    assert y.tolist() == [2000.0]
