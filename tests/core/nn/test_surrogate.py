"""Spikes are exact, their derivatives are the stated bumps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_core.nn import surrogate
from tests.core.nn.zoo import assert_close

X = np.linspace(-3, 3, 61)


def normal(x, sigma):
    return np.exp(-(x**2) / (2 * sigma**2)) / np.sqrt(2 * np.pi * sigma**2)


# Surrogate, formula, area under it (None: not a simple number).
BUMPS = {
    "triangular": (surrogate.Triangular(), lambda x: 0.3 * np.maximum(0, 1 - abs(x)), 0.3),
    "triangular wide": (surrogate.Triangular(2.0, 0.5), lambda x: 2 * np.maximum(0, 1 - abs(x) / 0.5), 1.0),
    "rectangular": (surrogate.Rectangular(1.5), lambda x: (abs(x) < 0.75) / 1.5, 1.0),
    "sigmoid": (surrogate.Sigmoid(), lambda x: 4 * np.exp(-4 * x) / (1 + np.exp(-4 * x)) ** 2, 1.0),
    "fast sigmoid": (surrogate.FastSigmoid(), lambda x: (1 + 10 * abs(x)) ** -2.0, 0.2),
    "arctan": (surrogate.Arctan(), lambda x: 1 / (1 + (np.pi * x) ** 2), 1.0),
    "gaussian": (surrogate.Gaussian(), lambda x: normal(x, 0.5), 1.0),
    "gaussian scaled": (surrogate.Gaussian(0.7, 0.3), lambda x: 0.3 * normal(x, 0.7), 0.3),
    "multi-gaussian": (
        surrogate.MultiGaussian(),
        lambda x: 1.15 * normal(x, 0.5) - 0.15 * normal(x - 0.5, 3.0) - 0.15 * normal(x + 0.5, 3.0),
        0.85,
    ),
}
over = pytest.mark.parametrize("name", BUMPS)
dtypes = pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])


def test_every_surrogate_is_tested():
    classes = {name for name in surrogate.__all__ if isinstance(getattr(surrogate, name), type)} - {"Surrogate"}
    assert classes == {type(bump).__name__ for bump, _, _ in BUMPS.values()}


@over
@dtypes
def test_forward_is_the_step(name, dtype):
    x = jnp.asarray([-np.inf, -1.0, -1e-7, -0.0, 0.0, 1e-7, 1.0, np.inf], dtype)
    for spikes in (BUMPS[name][0](x), jax.jit(BUMPS[name][0])(x)):
        assert (spikes.dtype, spikes.weak_type) == (dtype, False)
        np.testing.assert_array_equal(spikes, [0, 0, 0, 1, 1, 1, 1, 1])


@over
@dtypes
def test_derivative_is_the_formula(name, dtype):
    spike, formula, _ = BUMPS[name]
    x = jnp.asarray(X, dtype)
    gradient = jax.vmap(jax.grad(spike))(x)
    assert gradient.dtype == dtype
    tolerance = {"float64": 1e-14, "float32": 1e-6, "float16": 5e-3, "bfloat16": 3e-2}[dtype]
    assert_close(np.asarray(gradient, float), formula(np.asarray(x, float)), atol=tolerance)
    np.testing.assert_array_equal(gradient, jax.jvp(spike, (x,), (jnp.ones_like(x),))[1])


@over
def test_area_and_symmetry(name):
    spike, _, area = BUMPS[name]
    x = np.linspace(-200, 200, 400_001)
    bump = np.asarray(spike.derivative(jnp.asarray(x)))
    assert_close(bump, bump[::-1])
    assert bump.argmax() == pytest.approx(200_000, abs=750)  # the rectangle is flat
    assert_close(np.trapezoid(bump, x), area, atol=5e-3)


def test_equal_surrogates_share_a_compilation():
    traces = []

    count = jax.jit(lambda x, spike: traces.append(spike) or spike(x), static_argnums=1)
    count(1.0, surrogate.Triangular())
    count(1.0, surrogate.Triangular())
    assert len(traces) == 1


def test_a_derivative_of_ones_own():
    gradient = jax.grad(lambda x: surrogate.heaviside(x, lambda x: jnp.full_like(x, 7.0)))(-3.0)
    assert gradient == 7.0


def test_spikes_of_integers_are_refused():
    with pytest.raises(TypeError, match="A spike needs a floating x, to be differentiated; got dtype int64"):
        surrogate.Triangular()(jnp.arange(3))


def test_a_bump_needs_positive_numbers():
    with pytest.raises(ValueError, match=r"Gaussian needs a positive sigma, got 0\.0\."):
        surrogate.Gaussian(sigma=0.0)
    with pytest.raises(ValueError, match="Triangular needs a positive width, got nan"):
        surrogate.Triangular(width=float("nan"))
