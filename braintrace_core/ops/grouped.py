"""``grouped_matmul``: one small dense layer for each group of units, all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from .bias import add_bias, bias_operands
from .hooks import prepare
from .primitive import register_primitive
from .trace_rules import LEAD, OperatorTraces, einsum_traces

__all__ = ["etp_grouped_mm_p", "etp_grouped_mv_p", "grouped_matmul"]


def grouped_matmul(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    weight_fn: Callable[[Array], Array] | None = None,
    bias_fn: Callable[[Array], Array] | None = None,
    mask: ArrayLike | None = None,
) -> Array:
    """``y[..., g, :] = x[..., g, :] @ weight[g] + bias[g]``, marked as trainable.

    Args:
      x: ``(..., groups, in)``.
      weight: ``(groups, in, out)``.
      bias: ``(groups, out)``, optional.
      weight_fn, bias_fn: applied to the parameter first; gradients go back through them.
      mask: multiplies the weight after ``weight_fn``.

    Returns:
      ``(..., groups, out)``.

    >>> import jax.numpy as jnp
    >>> weight = jnp.stack([jnp.eye(2), 2 * jnp.eye(2)])
    >>> grouped_matmul(jnp.ones((2, 2)), weight).tolist()
    [[1.0, 1.0], [2.0, 2.0]]
    """
    x, weight = jnp.asarray(x), prepare(weight, weight_fn, mask)
    if weight.ndim != 3 or x.ndim < 2 or x.shape[-2:] != weight.shape[:2]:
        raise ValueError(
            "grouped_matmul needs x of shape (..., groups, in) and weight of shape (groups, in, out), "
            f"got {x.shape} and {weight.shape}."
        )
    biases = bias_operands("grouped_matmul", bias, bias_fn, (weight.shape[0], weight.shape[2]))
    primitive = etp_grouped_mv_p if x.ndim == 2 else etp_grouped_mm_p
    return primitive.bind(x, weight, *biases, has_bias=bool(biases), precision=None, preferred_element_type=None)


def _grouped_matmul(
    x: Array, weight: Array, bias: Array | None = None, *, has_bias: bool, precision: Any, preferred_element_type: Any
) -> Array:
    del has_bias
    y = jnp.einsum("...gi,gio->...go", x, weight, precision=precision, preferred_element_type=preferred_element_type)
    return add_bias(y, bias, (y.ndim - 2, y.ndim - 1))


def _trainable(*, has_bias: bool, **_: Any) -> dict[str, int]:
    return {"weight": 1, "bias": 2} if has_bias else {"weight": 1}


etp_grouped_mv_p = register_primitive("etp_grouped_mv", _grouped_matmul, trainable=_trainable)
etp_grouped_mm_p = register_primitive("etp_grouped_mm", _grouped_matmul, trainable=_trainable)
etp_grouped_mv_p.batch_into = etp_grouped_mm_p.batch_into = etp_grouped_mm_p


def _traces(params: dict[str, Any], operands: Sequence[Any], y: Any) -> OperatorTraces:
    lead = LEAD[: y.ndim - 2]
    bias = "go" if params["has_bias"] else None
    return einsum_traces(f"{lead}gi,gio->{lead}go", operands, bias, params["precision"])


etp_grouped_mv_p.traces = etp_grouped_mm_p.traces = _traces
