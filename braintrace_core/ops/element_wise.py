"""``element_wise``: a parameter that acts unit by unit (bias, scale, decay, time constant)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import Array
from jax.typing import ArrayLike

from .hooks import prepare
from .primitive import register_primitive
from .trace_rules import EinsumTrace, OperatorTraces, letters_of

__all__ = ["element_wise", "etp_elemwise_p"]


def element_wise(
    weight: ArrayLike, *, weight_fn: Callable[[Array], Array] | None = None, mask: ArrayLike | None = None
) -> Array:
    """``y = weight_fn(weight)``, marked as trainable.

    The mark stands on the parameter's side alone and lets credit pass, so a recurrence such as
    ``element_wise(decay) * h`` keeps its derivative with respect to ``h``.

    >>> import jax.numpy as jnp
    >>> element_wise(jnp.zeros(2), weight_fn=jnp.exp).tolist()
    [1.0, 1.0]
    """
    return etp_elemwise_p.bind(prepare(weight, weight_fn, mask))


def _identity(weight: Array) -> Array:
    return weight


etp_elemwise_p = register_primitive(
    "etp_elemwise", _identity, trainable={"weight": 0}, x_index=None, gradient_enabled=True
)
etp_elemwise_p.batch_into = etp_elemwise_p


def _traces(params: dict[str, Any], operands: Sequence[Any], y: Any) -> OperatorTraces:
    del params
    (weight,) = operands
    axes, sizes = letters_of(y.shape)
    return OperatorTraces({"weight": EinsumTrace(f",{axes}->{axes}", sizes, weight.dtype)})


etp_elemwise_p.traces = _traces
