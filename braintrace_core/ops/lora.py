"""``lora_matmul``: a dense layer whose weight is the product of two thin ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from .bias import add_bias, bias_operands
from .hooks import prepare
from .primitive import register_primitive
from .trace_rules import LEAD, OperatorTraces, einsum_traces

__all__ = ["etp_lora_mm_p", "etp_lora_mv_p", "lora_matmul"]


def lora_matmul(
    x: ArrayLike,
    B: ArrayLike,
    A: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    alpha: float = 1.0,
    b_fn: Callable[[Array], Array] | None = None,
    a_fn: Callable[[Array], Array] | None = None,
    bias_fn: Callable[[Array], Array] | None = None,
) -> Array:
    """``y = alpha * (x @ B) @ A + bias``, marked as trainable; ``B @ A`` is never formed.

    Args:
      x: ``(..., in)``.
      B: ``(in, rank)``.
      A: ``(rank, out)``.
      bias: ``(out,)``, optional.
      alpha: a plain number, not trained.
      b_fn, a_fn, bias_fn: applied to the parameter first; gradients go back through them.

    >>> import jax.numpy as jnp
    >>> lora_matmul(jnp.ones(3), jnp.ones((3, 1)), jnp.array([[1.0, 2.0]]), alpha=0.5).tolist()
    [1.5, 3.0]
    """
    x, B, A = jnp.asarray(x), prepare(B, b_fn), prepare(A, a_fn)
    if B.ndim != 2 or A.ndim != 2 or x.ndim < 1 or x.shape[-1] != B.shape[0] or B.shape[1] != A.shape[0]:
        raise ValueError(
            "lora_matmul needs x of shape (..., in), B of shape (in, rank) and A of shape (rank, out), "
            f"got {x.shape}, {B.shape} and {A.shape}."
        )
    if not isinstance(alpha, Real):
        raise ValueError(
            f"lora_matmul needs alpha as a plain number, got {type(alpha).__name__}. "
            "A scale that is computed or trained goes into a_fn."
        )
    biases = bias_operands("lora_matmul", bias, bias_fn, A.shape[1:])
    primitive = etp_lora_mv_p if x.ndim == 1 else etp_lora_mm_p
    return primitive.bind(x, B, A, *biases, alpha=float(alpha), has_bias=bool(biases))


def _lora_matmul(x: Array, B: Array, A: Array, bias: Array | None = None, *, alpha: float, has_bias: bool) -> Array:
    del has_bias
    # Scaled between the products: the rank is the smallest axis.
    y = jnp.matmul(alpha * jnp.matmul(x, B), A)
    return add_bias(y, bias, (y.ndim - 1,))


def _trainable(*, has_bias: bool, **_: Any) -> dict[str, int]:
    return {"lora_b": 1, "lora_a": 2, "bias": 3} if has_bias else {"lora_b": 1, "lora_a": 2}


etp_lora_mv_p = register_primitive("etp_lora_mv", _lora_matmul, trainable=_trainable)
etp_lora_mm_p = register_primitive("etp_lora_mm", _lora_matmul, trainable=_trainable)
etp_lora_mv_p.batch_into = etp_lora_mm_p.batch_into = etp_lora_mm_p


def _traces(params: dict[str, Any], operands: Sequence[Any], y: Any) -> OperatorTraces:
    # One trace for the product B A: it is smaller than one for each factor, and both get their gradient from it.
    x, B, A, *biases = operands
    product = jax.ShapeDtypeStruct((B.shape[0], A.shape[1]), jnp.result_type(B.dtype, A.dtype))
    lead = LEAD[: y.ndim - 1]
    dense = einsum_traces(f"{lead}i,io->{lead}o", [x, product, *biases], "o" if params["has_bias"] else None)

    def to_operands(gradients: Mapping[str, Array]) -> dict[str, Array]:
        found = dict(gradients)
        if "weight" in found:
            of_product = params["alpha"] * found.pop("weight")
            found["lora_b"] = of_product @ A.T
            found["lora_a"] = B.T @ of_product
        return found

    return OperatorTraces(dense.rules, to_operands)


etp_lora_mv_p.traces = etp_lora_mm_p.traces = _traces
