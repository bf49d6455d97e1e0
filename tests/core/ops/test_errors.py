"""What an operator says when its operands do not fit: which one, what was found, what was expected."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

from braintrace_core import ops


def zeros(*shape):
    return jnp.zeros(shape, jnp.float32)


WHERE = (np.array([0, 1]), np.array([1, 0]), (3, 2))
ERRORS = {
    "matmul": (
        lambda: ops.matmul(zeros(2, 3), zeros(2, 4)),
        "matmul needs x of shape (..., in) and weight of shape (in, out), got (2, 3) and (2, 4).",
    ),
    "matmul-scalar": (lambda: ops.matmul(1.0, zeros(2, 4)), "matmul needs x of shape (..., in)"),
    "matmul-bias": (
        lambda: ops.matmul(zeros(3), zeros(3, 4), zeros(3)),
        "matmul needs bias of shape (4,), got (3,).",
    ),
    "grouped": (
        lambda: ops.grouped_matmul(zeros(2, 3), zeros(3, 3, 4)),
        "grouped_matmul needs x of shape (..., groups, in) and weight of shape (groups, in, out), "
        "got (2, 3) and (3, 3, 4).",
    ),
    "grouped-bias": (
        lambda: ops.grouped_matmul(zeros(2, 3), zeros(2, 3, 4), zeros(4)),
        "grouped_matmul needs bias of shape (2, 4), got (4,).",
    ),
    "lora": (
        lambda: ops.lora_matmul(zeros(3), zeros(3, 2), zeros(3, 4)),
        "lora_matmul needs x of shape (..., in), B of shape (in, rank) and A of shape (rank, out), "
        "got (3,), (3, 2) and (3, 4).",
    ),
    "lora-bias": (
        lambda: ops.lora_matmul(zeros(3), zeros(3, 2), zeros(2, 4), zeros(1)),
        "lora_matmul needs bias of shape (4,), got (1,).",
    ),
    "lora-alpha": (
        lambda: ops.lora_matmul(zeros(3), zeros(3, 2), zeros(2, 4), alpha=jnp.ones(4)),
        "lora_matmul needs alpha as a plain number, got ArrayImpl. A scale that is computed or trained goes into a_fn.",
    ),
    "embedding-float": (
        lambda: ops.embedding(zeros(3), zeros(3, 2)),
        "embedding needs integer indices, got float32. Cast them with .astype(int).",
    ),
    "embedding-bool": (lambda: ops.embedding(np.array([True]), zeros(3, 2)), "integer indices, got bool"),
    "embedding-weight": (lambda: ops.embedding(0, 1.0), "embedding needs weight of shape (rows, ...), got ()."),
    "einsum-ellipsis": (
        lambda: ops.einsum("...i,io->...o", zeros(3), zeros(3, 4)),
        "einsum cannot use the equation \"...i,io->...o\": '...' is not supported. Name every axis, or map over the "
        "others with jax.vmap.",
    ),
    "einsum-arrow": (
        lambda: ops.einsum("i,io", zeros(3), zeros(3, 4)),
        "einsum cannot use the equation \"i,io\": it has no '->'. Say which axes the result has, as in 'bi,io->bo'.",
    ),
    "einsum-one": (lambda: ops.einsum("io->oi", zeros(3), zeros(3, 4)), "it needs two operands, x and the weight"),
    "einsum-three": (lambda: ops.einsum("i,io,o->i", zeros(3), zeros(3, 4)), "it needs two operands"),
    "einsum-letters": (
        lambda: ops.einsum("1i,io->1o", zeros(1, 3), zeros(3, 4)),
        "an axis is a letter from a to z or A to Z, got ['1'] in x.",
    ),
    "einsum-arrows": (lambda: ops.einsum("i,io->o->", zeros(3), zeros(3, 4)), "got ['-', '>'] in the result."),
    "einsum-diagonal": (
        lambda: ops.einsum("ii,io->o", zeros(3, 3), zeros(3, 4)),
        "['i'] repeats in x. Take the diagonal before, or give each axis its own letter.",
    ),
    "einsum-result": (lambda: ops.einsum("i,io->oo", zeros(3), zeros(3, 4)), "['o'] repeats in the result."),
    "einsum-unknown": (
        lambda: ops.einsum("i,io->oz", zeros(3), zeros(3, 4)),
        "['z'] of the result is in neither operand.",
    ),
    "einsum-lonely": (
        lambda: ops.einsum("bi,io->o", zeros(2, 3), zeros(3, 4)),
        "['b'] is in one operand only and not in the result. Sum that axis before, or keep it.",
    ),
    "einsum-axes": (
        lambda: ops.einsum("bi,io->bo", zeros(3), zeros(3, 4)),
        'einsum "bi,io->bo" needs x with 2 axes, got shape (3,).',
    ),
    "einsum-sizes": (
        lambda: ops.einsum("bi,io->bo", zeros(2, 3), zeros(5, 4)),
        'einsum "bi,io->bo" needs one size for "i", got 3 in x and 5 in weight.',
    ),
    "conv-axes": (
        lambda: ops.conv(zeros(3), zeros(3, 2, 4)),
        "conv needs a kernel with one to three spatial axes and two of channels, and x with as many axes, or one less "
        "(no batch), got x (3,) and kernel (3, 2, 4).",
    ),
    "conv-no-space": (lambda: ops.conv(zeros(1, 2), zeros(2, 4)), "one to three spatial axes"),
    "conv-channels": (
        lambda: ops.conv(zeros(6, 3), zeros(3, 2, 4), feature_group_count=2),
        "conv needs x with 4 channels (kernel (3, 2, 4), feature_group_count 2), got 3 in x (6, 3).",
    ),
    "conv-strides": (
        lambda: ops.conv(zeros(6, 2), zeros(3, 2, 4), strides=(1, 1)),
        "conv needs strides as one integer or as 1, one for each spatial axis, got (1, 1).",
    ),
    "conv-padding": (
        lambda: ops.conv(zeros(6, 6, 2), zeros(3, 3, 2, 4), padding=[(1, 1)]),
        "conv needs padding as 2 pairs (low, high), one for each spatial axis, got [(1, 1)].",
    ),
    "conv-padding-integers": (
        lambda: ops.conv(zeros(6, 6, 2), zeros(3, 3, 2, 4), padding=(1, 1)),
        "conv needs padding as 2 pairs (low, high), one for each spatial axis, got (1, 1).",
    ),
    "conv-transposed": (
        lambda: ops.conv(zeros(6, 2), zeros(3, 2, 4), lhs_dilation=2),
        'conv with lhs_dilation needs padding as (low, high) pairs, got "SAME".',
    ),
    "conv-bias": (
        lambda: ops.conv(zeros(6, 2), zeros(3, 2, 4), zeros(6, 4)),
        "conv needs bias of shape (4,), got (6, 4).",
    ),
    "sparse-x": (
        lambda: ops.sparse_matmul(zeros(2), zeros(2), structure=WHERE),
        "sparse_matmul needs x of shape (..., 3) for a matrix (3, 2), got (2,).",
    ),
    "sparse-weight": (
        lambda: ops.sparse_matmul(zeros(3), zeros(3), structure=WHERE),
        "sparse_matmul needs one weight for each entry, shape (2,), got (3,).",
    ),
    "sparse-bias": (
        lambda: ops.sparse_matmul(zeros(3), zeros(2), structure=WHERE, bias=zeros(3)),
        "sparse_matmul needs bias of shape (2,), got (3,).",
    ),
    "sparse-structure": (
        lambda: ops.sparse_matmul(zeros(3), zeros(2), structure="dense"),
        "sparse_matmul needs structure as (rows, cols, (in, out)) or as a sparse matrix with two axes, "
        "got str of shape ().",
    ),
    "sparse-dense": (
        lambda: ops.sparse_matmul(zeros(3), zeros(2), structure=zeros(3, 2)),
        "sparse_matmul cannot read the places of a ArrayImpl: both axes must be sparse. "
        "Give structure as (rows, cols, (in, out)).",
    ),
    "sparse-batched": (
        lambda: ops.sparse_matmul(zeros(3), zeros(2), structure=sparse.BCOO.fromdense(zeros(3, 2), n_batch=1)),
        "cannot read the places of a BCOO: both axes must be sparse.",
    ),
    "sparse-three-axes": (
        lambda: ops.sparse_matmul(zeros(3), zeros(2), structure=sparse.BCOO.fromdense(zeros(3, 2, 2))),
        "a sparse matrix with two axes, got BCOO of shape (3, 2, 2).",
    ),
    "sparse-places": (
        lambda: ops.sparse_matmul(zeros(3), zeros(2), structure=(zeros(2), np.array([0]), (3, 2))),
        "sparse_matmul needs rows and cols as two lists of integers of one length, got float32(2,) and int64(1,).",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error(name):
    call, text = ERRORS[name]
    with pytest.raises(ValueError, match=re.escape(text)):
        call()
