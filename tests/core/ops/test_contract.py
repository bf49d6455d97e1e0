"""A marked operation is the plain one: same values, derivatives, batching, lowering and dtypes, for every operator."""

import itertools

import jax
import jax.export
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

from braintrace_core import ops

F64 = jnp.float64
# What an operator becomes when its first operand alone gains an axis; the others record the axis.
BATCH_INTO = {
    ops.etp_mv_p: ops.etp_mm_p,
    ops.etp_mm_p: ops.etp_mm_p,
    ops.etp_elemwise_p: ops.etp_elemwise_p,
    ops.etp_embedding_p: ops.etp_embedding_p,
    ops.etp_grouped_mv_p: ops.etp_grouped_mm_p,
    ops.etp_grouped_mm_p: ops.etp_grouped_mm_p,
    ops.etp_lora_mv_p: ops.etp_lora_mm_p,
    ops.etp_lora_mm_p: ops.etp_lora_mm_p,
    ops.etp_sp_mv_p: ops.etp_sp_mm_p,
    ops.etp_sp_mm_p: ops.etp_sp_mm_p,
}


def assert_close(actual, expected, rtol=1e-9):
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol)


def test_value_is_the_plain_one(case):
    operands = case.operands(F64)
    expected = case.plain(*operands)
    assert_close(case.operator(*operands), expected)
    assert_close(jax.jit(case.operator)(*operands), expected)
    # The abstract value too: weak types and shapes decide what happens downstream.
    (aval,) = jax.make_jaxpr(case.operator)(*operands).out_avals
    (plain_aval,) = jax.make_jaxpr(case.plain)(*operands).out_avals
    assert aval == plain_aval


def test_mark(case, marks):
    (eqn,) = marks(case.operator, *case.operands(F64))
    assert eqn.primitive is case.primitive
    assert eqn.primitive.trainable_operands(eqn.params) == case.trainable
    hash(tuple(sorted(eqn.params.items())))  # jit and the compiler use params as keys
    assert ops.is_boundary(eqn.primitive) == (case.name != "element_wise")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.bfloat16, jnp.complex64, jnp.complex128])
def test_dtype_is_the_plain_one(case, dtype):
    operands = case.operands(dtype)
    y, expected = jax.jit(case.operator)(*operands), jax.jit(case.plain)(*operands)
    assert y.dtype == expected.dtype == dtype
    wide = jnp.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else jnp.float64
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    # Judged by size: a result that nearly cancels keeps the rounding of what went into it.
    scale = 1 + float(jnp.abs(expected).max())
    np.testing.assert_allclose(y.astype(wide), expected.astype(wide), rtol=0, atol=tolerance * scale)


@pytest.mark.loose_promotion
@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int8, jnp.bfloat16])
@pytest.mark.parametrize(
    "case", ["matmul-batch", "grouped", "einsum-heads", "conv", "conv-2d-groups", "sparse-batch", "lora"], indirect=True
)
def test_spikes_have_their_own_dtype(case, dtype):
    """The input may be narrower than the parameters."""
    x, *rest = case.operands(jnp.float32)
    x = (x > 0).astype(dtype)

    def loss(weight, x):
        return jnp.sum(jnp.sin(case.operator(x, weight, *rest[1:])))

    y, expected = case.operator(x, *rest), case.operator(x.astype(jnp.float32), *rest)
    assert_close(y, expected, rtol=1e-6)
    gradients = (jax.jit(jax.grad(loss))(rest[0], value) for value in (x, x.astype(jnp.float32)))
    assert_close(*gradients, rtol=1e-5)


def test_gradients_are_the_plain_ones(case):
    operands = case.operands(F64)
    floats = case.floats(operands)
    every = tuple(range(len(floats)))

    def loss(function):
        of_floats = case.of_floats(function, operands)
        return lambda *values: jnp.sum(jnp.sin(of_floats(*values)))

    expected = jax.jit(jax.grad(loss(case.plain), every))(*floats)
    assert_close(jax.jit(jax.grad(loss(case.operator), every))(*floats), expected)
    assert_close(jax.jit(jax.jacfwd(loss(case.operator), every))(*floats), expected)


def test_gradients_are_finite_differences(case):
    operands = case.operands(F64)
    function = case.of_floats(case.operator, operands)
    jax.test_util.check_grads(jax.jit(function), case.floats(operands), order=2, modes=("fwd", "rev"))


def test_second_order(case):
    operands = case.operands(F64)
    floats = case.floats(operands)

    def hessian(function):
        of_floats = case.of_floats(function, operands)
        every = tuple(range(len(floats)))
        return jax.jit(jax.hessian(lambda *values: jnp.sum(jnp.sin(of_floats(*values))), every))(*floats)

    assert_close(hessian(case.operator), hessian(case.plain))


def subsets(count):
    """One operand at a time, then all of them."""
    return sorted({*((i,) for i in range(count)), tuple(range(count))})


def stacked(operands, mapped, axis=0):
    """``operands``, of which the ``mapped`` ones get an axis of two, and the ``in_axes`` that says so."""
    many = [jnp.stack([v, jnp.flip(v)], axis) if i in mapped else v for i, v in enumerate(operands)]
    return many, tuple(axis if i in mapped else None for i in range(len(operands)))


def loop(function, in_axes):
    """``vmap`` as the loop that it stands for."""

    def looped(*operands):
        def one(k):
            pairs = zip(operands, in_axes, strict=True)
            return function(*(value if axis is None else jnp.take(value, k, axis) for value, axis in pairs))

        return jnp.stack([one(0), one(1)])

    return looped


def outcomes(functions, operands):
    """``functions[k](*operands[k])`` for every ``k``; all in one compilation, which is what takes time here."""
    return jax.jit(lambda operands: [f(*values) for f, values in zip(functions, operands, strict=True)])(operands)


@pytest.mark.parametrize("axis", [0, -1])
def test_vmap_is_a_loop(case, marks, axis):
    choices = subsets(len(case.shapes))
    operands, in_axes = zip(*(stacked(case.operands(F64), mapped, axis) for mapped in choices), strict=True)
    batched = [jax.vmap(case.operator, axes) for axes in in_axes]
    assert_close(outcomes(batched, operands), outcomes([loop(case.plain, axes) for axes in in_axes], operands))
    many = BATCH_INTO.get(case.primitive)
    for mapped, function, values in zip(choices, batched, operands, strict=True):
        (eqn,) = marks(function, *values)
        assert eqn.primitive.trainable_operands(eqn.params) == case.trainable
        if many is not None and mapped == (0,):
            assert eqn.primitive is many
            assert "vmapped" not in eqn.params
        else:
            assert eqn.primitive is case.primitive
            assert len(eqn.params["vmapped"]) == 1


def test_nested_vmap_is_two_loops(case, marks):
    choices = subsets(len(case.shapes))
    operands, batched, loops = [], [], []
    for inner, outer in [*zip(choices, choices, strict=True), *itertools.pairwise([*choices, choices[0]])]:
        values, inner_axes = stacked(case.operands(F64), inner)
        values, outer_axes = stacked(values, outer)
        operands.append(values)
        batched.append(jax.vmap(jax.vmap(case.operator, inner_axes), outer_axes))
        loops.append(loop(loop(case.plain, inner_axes), outer_axes))
        assert len(marks(batched[-1], *values)) == 1
    assert_close(outcomes(batched, operands), outcomes(loops, operands))


def test_jit_of_grad_of_vmap(case, marks):
    operands, in_axes = stacked(case.operands(F64), range(len(case.shapes)))
    floats = case.floats(operands)
    every = tuple(range(len(floats)))

    def loss(function):
        of_floats = case.of_floats(jax.vmap(function, in_axes), operands)
        return lambda *values: jnp.sum(jnp.sin(of_floats(*values)))

    gradient = jax.jit(jax.value_and_grad(loss(case.operator), every))
    assert_close(gradient(*floats), jax.jit(jax.value_and_grad(loss(case.plain), every))(*floats))
    assert len(marks(gradient, *floats)) == 1

    # And the other way round: a gradient for each example.
    def each(function):
        def loss_of_one(*values):
            return jnp.sum(jnp.sin(function(*values)))

        return jax.jit(jax.vmap(jax.grad(loss_of_one, tuple(case.float_operands)), in_axes))

    assert_close(each(case.operator)(*operands), each(case.plain)(*operands))


def test_inside_scan_and_checkpoint(case):
    operands = case.operands(F64)

    def loss(function):
        of_floats = jax.checkpoint(case.of_floats(function, operands))

        def step(total, scale):
            return total + jnp.sum(jnp.sin(of_floats(*(scale * value for value in case.floats(operands))))), None

        return lambda scales: jax.lax.scan(step, jnp.zeros((), F64), scales)[0]

    scales = jnp.array([0.5, 1.0, 2.0], F64)
    assert_close(jax.jit(jax.grad(loss(case.operator)))(scales), jax.jit(jax.grad(loss(case.plain)))(scales))


def test_export_for_every_platform(case):
    operands = case.operands(jnp.float32)
    exported = jax.export.export(jax.jit(case.operator), platforms=("cpu", "tpu", "cuda"))(*operands)
    assert exported.platforms == ("cpu", "tpu", "cuda")
    assert_close(exported.call(*operands), case.plain(*operands), rtol=1e-5)
