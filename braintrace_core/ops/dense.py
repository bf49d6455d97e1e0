"""``matmul``: a dense layer's product, with or without leading axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from .bias import add_bias, bias_operands
from .hooks import prepare
from .primitive import register_primitive
from .trace_rules import LEAD, OperatorTraces, einsum_traces

__all__ = ["etp_mm_p", "etp_mv_p", "matmul"]


def matmul(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    weight_fn: Callable[[Array], Array] | None = None,
    bias_fn: Callable[[Array], Array] | None = None,
    mask: ArrayLike | None = None,
) -> Array:
    """``y = x @ weight + bias``, marked as trainable.

    Args:
      x: ``(..., in)``.
      weight: ``(in, out)``.
      bias: ``(out,)``, optional.
      weight_fn, bias_fn: applied to the parameter first (``jnp.abs``, a normalisation, ...); gradients go back
        through them.
      mask: multiplies the weight after ``weight_fn``.

    >>> import jax.numpy as jnp
    >>> matmul(jnp.ones(2), jnp.eye(2), jnp.array([0.0, 1.0])).tolist()
    [1.0, 2.0]
    """
    x, weight = jnp.asarray(x), prepare(weight, weight_fn, mask)
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"matmul needs x of shape (..., in) and weight of shape (in, out), got {x.shape} and {weight.shape}."
        )
    biases = bias_operands("matmul", bias, bias_fn, weight.shape[1:])
    primitive = etp_mv_p if x.ndim == 1 else etp_mm_p
    return primitive.bind(x, weight, *biases, has_bias=bool(biases), precision=None, preferred_element_type=None)


def _matmul(
    x: Array, weight: Array, bias: Array | None = None, *, has_bias: bool, precision: Any, preferred_element_type: Any
) -> Array:
    del has_bias
    contract = (((x.ndim - 1,), (0,)), ((), ()))
    y = lax.dot_general(x, weight, contract, precision=precision, preferred_element_type=preferred_element_type)
    return add_bias(y, bias, (y.ndim - 1,))


def _trainable(*, has_bias: bool, **_: Any) -> dict[str, int]:
    return {"weight": 1, "bias": 2} if has_bias else {"weight": 1}


etp_mv_p = register_primitive("etp_mv", _matmul, trainable=_trainable)
etp_mm_p = register_primitive("etp_mm", _matmul, trainable=_trainable)
etp_mv_p.batch_into = etp_mm_p.batch_into = etp_mm_p


def _traces(params: dict[str, Any], operands: Sequence[Any], y: Any) -> OperatorTraces:
    lead = LEAD[: y.ndim - 1]
    bias = "o" if params["has_bias"] else None
    return einsum_traces(f"{lead}i,io->{lead}o", operands, bias, params["precision"])


etp_mv_p.traces = etp_mm_p.traces = _traces
