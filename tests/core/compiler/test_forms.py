"""Forms: values with the same form are the same numbers, whatever goes in."""

from __future__ import annotations

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braintrace_core.compiler.forms import ZERO, Form, forms_of, scaled

A, B = jnp.array([0.3, -1.2]), jnp.array([2.0, 0.7])
C, D = jax.lax.complex(A, B), jax.lax.complex(B, 2 * A)


def forms(function, *args):
    return forms_of(jax.make_jaxpr(function)(*args))


def seen(x):
    return x


def watched(x):
    """Its results may differ from call to call."""
    return jax.experimental.io_callback(seen, x, x)


EQUAL = {
    "product in the other order": lambda a, b, c: (a * b, b * a),
    "sum in the other order": lambda a, b, c: (a + b, b + a),
    "difference": lambda a, b, c: (a - b, -(b - a)),
    "sum of negatives": lambda a, b, c: (-(a + b), -a - b),
    "negatives of both factors": lambda a, b, c: (a * b, (-a) * (-b)),
    "times one": lambda a, b, c: (a, a * jnp.ones_like(a)),
    "plus zero": lambda a, b, c: (b, b + 0 * a),
    "twice": lambda a, b, c: (a + a, 2 * a),
    "the same function": lambda a, b, c: (jnp.tanh(a * b), jnp.tanh(b * a)),
    "a quarter turn": lambda a, b, c: (jnp.real(c * -1j), jnp.imag(c)),
    "a quarter turn back": lambda a, b, c: (jnp.imag(c * -1j), -jnp.real(c)),
    "moved alike": lambda a, b, c: (-(a[None].reshape(2)), (-a)[None].reshape(2)),
    "cast to complex": lambda a, b, c: (jnp.real((-a).astype(c.dtype)), -jnp.real(a.astype(c.dtype))),
}
OTHER = {
    "other values": lambda a, b, c: (a, b),
    "other sign": lambda a, b, c: (a, -a),
    "other function": lambda a, b, c: (jnp.tanh(a), jnp.sin(a)),
    "other parameters": lambda a, b, c: (a[:1], a[1:]),
    "other proportions": lambda a, b, c: (a + 2 * b, a + 3 * b),
    "other part": lambda a, b, c: (jnp.real(c), jnp.imag(c)),
    "rounded": lambda a, b, c: (a.astype(jnp.float32).astype(a.dtype), a),
    "a number that a cast rounds": lambda a, b, c: (
        jnp.full_like(a, 0.1).astype(jnp.float32).astype(a.dtype) * b,
        0.1 * b,
    ),
    "what is seen from outside": lambda a, b, c: (watched(a), watched(a)),
    "known arrays": lambda a, b, c: (a * np.array([1.0, 2.0]), a * np.array([1.0, 3.0])),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_values_have_one_form(name):
    first, second = forms(EQUAL[name], A, B, C)
    assert first == second
    values = EQUAL[name](A, B, C)
    np.testing.assert_allclose(*values)


@pytest.mark.parametrize("name", OTHER)
def test_other_values_have_other_forms(name):
    first, second = forms(OTHER[name], A, B, C)
    assert first != second


def test_numbers_are_known():
    found = forms(lambda a, b: (0 * a, jnp.ones_like(a) - 1, 3 * jnp.ones_like(a), -2 * a), A, B)
    assert found[:2] == [ZERO, ZERO]
    assert found[2] == Form(3)
    assert found[3] == scaled(forms(lambda a, b: a, A, B)[0], -2)


def expressions(depth=4):
    """Functions of four values; the last two are complex."""
    leaves = st.sampled_from(
        [lambda v, i=i: v[i] for i in range(4)] + [lambda v, k=k: k + 0 * v[0] for k in (0, 1, -2)]
    )

    def grow(inner):
        one = st.sampled_from([lambda x: -x, jnp.real, jnp.imag, lambda x: 1j * x, lambda x: 0.5 * x, jnp.sin])
        two = st.sampled_from([jnp.add, jnp.subtract, jnp.multiply])
        return st.one_of(
            st.builds(lambda f, g: lambda v: f(g(v)), one, inner),
            st.builds(lambda f, g, h: lambda v: f(g(v), h(v)), two, inner, inner),
        )

    return st.recursive(leaves, grow, max_leaves=depth)


@pytest.mark.loose_promotion
@settings(max_examples=150, deadline=None)
@given(st.lists(expressions(), min_size=2, max_size=6))
def test_what_has_one_form_is_equal(functions):
    values = [A, B, C, D]
    found = forms(lambda *v: [f(v) for f in functions], *values)
    results = [np.broadcast_to(np.asarray(f(values), complex), 2) for f in functions]
    for form, result in zip(found, results, strict=True):
        for other, same in zip(found, results, strict=True):
            if form.value == other.value and form.number:
                np.testing.assert_allclose(result * (other.number / form.number), same, rtol=1e-9, atol=1e-9)
