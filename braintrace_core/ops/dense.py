"""``matmul``: a dense layer's product, with or without leading axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from .hooks import prepare
from .primitive import register_primitive

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
    operands = [x, weight]
    if bias is not None:
        operands.append(prepare(bias, bias_fn))
        if operands[2].shape != weight.shape[1:]:
            raise ValueError(f"matmul needs bias of shape {weight.shape[1:]}, got {operands[2].shape}.")
    primitive = etp_mv_p if x.ndim == 1 else etp_mm_p
    return primitive.bind(*operands, has_bias=bias is not None, precision=None, preferred_element_type=None)


def _matmul(
    x: Array, weight: Array, bias: Array | None = None, *, has_bias: bool, precision: Any, preferred_element_type: Any
) -> Array:
    del has_bias
    contract = (((x.ndim - 1,), (0,)), ((), ()))
    y = lax.dot_general(x, weight, contract, precision=precision, preferred_element_type=preferred_element_type)
    return y if bias is None else y + lax.broadcast_in_dim(bias, y.shape, (y.ndim - 1,)).astype(y.dtype)


def _trainable(*, has_bias: bool, **_: Any) -> dict[str, int]:
    return {"weight": 1, "bias": 2} if has_bias else {"weight": 1}


etp_mv_p = register_primitive("etp_mv", _matmul, trainable=_trainable)
etp_mm_p = register_primitive("etp_mm", _matmul, trainable=_trainable)
etp_mv_p.batch_into = etp_mm_p.batch_into = etp_mm_p
