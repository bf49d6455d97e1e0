"""``sparse_matmul``: a product with a matrix of which only the non-zero entries exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from .bias import add_bias, bias_operands
from .hooks import prepare
from .primitive import register_primitive
from .trace_rules import EinsumTrace, OperatorTraces, SparseTrace, TraceRule, letters_of

__all__ = ["etp_sp_mm_p", "etp_sp_mv_p", "sparse_matmul"]


def sparse_matmul(
    x: ArrayLike,
    weight: ArrayLike,
    *,
    structure: Any,
    bias: ArrayLike | None = None,
    weight_fn: Callable[[Array], Array] | None = None,
    bias_fn: Callable[[Array], Array] | None = None,
) -> Array:
    """``y = x @ M + bias``, marked as trainable, where ``M`` holds ``weight`` at the places that ``structure`` gives.

    Args:
      x: ``(..., in)``.
      weight: ``(nnz,)``, the non-zero entries in the order of the structure's own data.
      structure: the places, from ``(rows, cols, (in, out))`` or from a sparse ``(in, out)`` matrix: a COO, CSR or CSC
        of brainevent, jax or scipy, a BCOO or BCSR of ``jax.experimental.sparse``. Its data are not used. Entries at
        the same place add up; those past the end, with which jax pads, count for nothing.
      bias: ``(out,)``, optional.
      weight_fn, bias_fn: applied to the parameter first; gradients go back through them.

    >>> import jax.numpy as jnp
    >>> structure = (jnp.array([0, 2]), jnp.array([1, 0]), (3, 2))
    >>> sparse_matmul(jnp.array([1.0, 2.0, 3.0]), jnp.array([10.0, 20.0]), structure=structure).tolist()
    [60.0, 10.0]
    """
    x, weight = jnp.asarray(x), prepare(weight, weight_fn)
    # At compile time where it can be: otherwise a scan over time would do it again in each step.
    with jax.ensure_compile_time_eval():
        rows, cols, shape = _places(structure)
    if x.ndim < 1 or x.shape[-1] != shape[0]:
        raise ValueError(f"sparse_matmul needs x of shape (..., {shape[0]}) for a matrix {shape}, got {x.shape}.")
    if weight.shape != rows.shape:
        raise ValueError(f"sparse_matmul needs one weight for each entry, shape {rows.shape}, got {weight.shape}.")
    biases = bias_operands("sparse_matmul", bias, bias_fn, shape[1:])
    primitive = etp_sp_mv_p if x.ndim == 1 else etp_sp_mm_p
    return primitive.bind(x, weight, rows, cols, *biases, shape=shape, has_bias=bool(biases))


def _places(structure: Any) -> tuple[Array, Array, tuple[int, int]]:
    """Row and column of each entry, in the order of the data, and the shape of the matrix."""
    is_tuple = isinstance(structure, tuple) and len(structure) == 3
    shape = tuple(structure[2] if is_tuple else getattr(structure, "shape", ()))
    if len(shape) != 2:
        raise ValueError(
            "sparse_matmul needs structure as (rows, cols, (in, out)) or as a sparse matrix with two axes, "
            f"got {type(structure).__name__} of shape {shape}."
        )
    # By attributes, not by class: the libraries that bring these matrices need not be installed.
    if is_tuple:
        rows, cols = structure[:2]
    elif hasattr(structure, "indptr"):
        lengths, cols = jnp.diff(jnp.asarray(structure.indptr)), structure.indices
        rows = jnp.repeat(jnp.arange(len(lengths)), lengths, total_repeat_length=len(cols))
        if any("csc" in base.__name__.lower() for base in type(structure).__mro__):
            rows, cols = cols, rows
    elif hasattr(structure, "row"):
        rows, cols = structure.row, structure.col
    elif getattr(structure, "n_sparse", None) == 2:
        rows, cols = structure.indices[:, 0], structure.indices[:, 1]
    else:
        raise ValueError(
            f"sparse_matmul cannot read the places of a {type(structure).__name__}: both axes must be sparse. "
            "Give structure as (rows, cols, (in, out))."
        )
    rows, cols = jnp.asarray(rows), jnp.asarray(cols)
    integers = all(jnp.issubdtype(index.dtype, jnp.integer) for index in (rows, cols))
    if rows.ndim != 1 or rows.shape != cols.shape or not integers:
        raise ValueError(
            "sparse_matmul needs rows and cols as two lists of integers of one length, "
            f"got {rows.dtype}{rows.shape} and {cols.dtype}{cols.shape}."
        )
    return rows, cols, (int(shape[0]), int(shape[1]))


def _sparse_matmul(
    x: Array,
    weight: Array,
    rows: Array,
    cols: Array,
    bias: Array | None = None,
    *,
    shape: tuple[int, int],
    has_bias: bool,
) -> Array:
    del has_bias
    dtype = jnp.result_type(x, weight)
    # Half-precision sums would stop growing after a few hundred terms.
    is_half = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    sum_dtype = jnp.dtype(jnp.float32) if is_half else dtype
    values = weight.astype(sum_dtype)

    def of_vector(vector: Array) -> Array:
        products = vector.at[rows].get(mode="fill", fill_value=0).astype(sum_dtype) * values
        return jnp.zeros(shape[1], sum_dtype).at[cols].add(products, mode="drop")

    for _ in range(x.ndim - 1):
        of_vector = jax.vmap(of_vector)
    y = of_vector(x).astype(dtype)
    return add_bias(y, bias, (y.ndim - 1,))


def _trainable(*, has_bias: bool, **_: Any) -> dict[str, int]:
    return {"weight": 1, "bias": 4} if has_bias else {"weight": 1}


etp_sp_mv_p = register_primitive("etp_sp_mv", _sparse_matmul, trainable=_trainable)
etp_sp_mm_p = register_primitive("etp_sp_mm", _sparse_matmul, trainable=_trainable)
etp_sp_mv_p.batch_into = etp_sp_mm_p.batch_into = etp_sp_mm_p


def _traces(params: dict[str, Any], operands: Sequence[Any], y: Any) -> OperatorTraces:
    x, weight, rows, cols, *biases = operands
    rules: dict[str, TraceRule] = {"weight": SparseTrace(x.shape[:-1], weight, rows, cols)}
    if params["has_bias"]:
        axes, sizes = letters_of(y.shape)
        rules["bias"] = EinsumTrace(f",{axes[-1]}->{axes}", sizes, biases[0].dtype)
    return OperatorTraces(rules)


etp_sp_mv_p.traces = etp_sp_mm_p.traces = _traces
