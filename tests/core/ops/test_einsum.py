"""``einsum`` takes any equation that two operands and a result can have."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from braintrace_core.ops import einsum

# Where a letter may stand: anything but in one operand alone.
PLACES = ["x,y", "weight,y", "x,weight", "x,weight,y"]


@st.composite
def equations(draw):
    """An equation, with spaces anywhere, and the shapes of its operands."""
    letters = draw(st.lists(st.sampled_from("abcxyzABZ"), unique=True, max_size=5))
    places = {letter: draw(st.sampled_from(PLACES)).split(",") for letter in letters}
    sizes = {letter: draw(st.integers(1, 3)) for letter in letters}
    x, weight, y = (
        draw(st.permutations([letter for letter in letters if name in places[letter]])) for name in ("x", "weight", "y")
    )
    space = draw(st.sampled_from(["", " "]))
    equation = f"{space.join(x)},{space}{''.join(weight)}{space}->{space}{''.join(y)}"
    return equation, tuple(sizes[letter] for letter in x), tuple(sizes[letter] for letter in weight)


@given(equations())
def test_any_equation_is_jnp_einsum(problem):
    equation, *shapes = problem
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.float64) for shape in shapes)
    np.testing.assert_allclose(einsum(equation, x, weight), jnp.einsum(equation, x, weight), rtol=1e-12, atol=1e-12)


def test_spaces_make_no_difference_to_the_mark(marks):
    x, weight = jnp.ones((2, 3)), jnp.ones((3, 4))
    (eqn,) = marks(lambda x, w: einsum(" bi, io -> bo ", x, w), x, weight)
    assert eqn.params["equation"] == "bi,io->bo"


def test_leading_axes_come_from_vmap():
    x, weight = jnp.ones((5, 2, 3)), jnp.ones((2, 3, 4))
    y = jax.vmap(lambda x: einsum("hi,hio->ho", x, weight))(x)
    assert y.shape == (5, 2, 4)
