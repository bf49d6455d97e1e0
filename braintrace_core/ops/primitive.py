"""ETP primitives: JAX primitives that mark a trainable operation ``y = op(x, theta)``.

A marked operation is an ordinary one in every other respect. Its evaluation, derivatives, batching and lowering all
come from one pure function, so an operator is defined by writing that function and saying which operands train.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from .._compat import Primitive, ad, batching, mlir

__all__ = ["ETPPrimitive", "is_boundary", "is_etp", "register_primitive"]

Trainable = Mapping[str, int] | Callable[..., Mapping[str, int]]


class ETPPrimitive(Primitive):
    """A primitive that stands for ``y = op(x, theta)``. Make one with :func:`register_primitive`.

    Attributes:
      function: the plain operation, ``function(*operands, **params) -> y`` (or a tuple of results).
      x_index: which operand is the input ``x``; ``None`` if there is none (element-wise operators).
      y_index: which result is ``y``.
      gradient_enabled: whether credit may pass through the operator on its way to a hidden state. All others are
        boundaries: the recurrence is cut there.
      batch_into: the primitive that this one becomes when ``x`` alone gains a leading axis; ``None`` to keep the
        primitive and record the mapped axes in its ``vmapped`` parameter.
      traces: ``(params, operands, y) -> OperatorTraces``, the operator's trace rules; None for the general fallback.
    """

    function: Callable[..., Any]
    x_index: int | None
    y_index: int
    gradient_enabled: bool
    batch_into: ETPPrimitive | None
    traces: Callable[..., Any] | None

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        trainable: Trainable,
        *,
        x_index: int | None,
        y_index: int,
        gradient_enabled: bool,
        multiple_results: bool,
    ) -> None:
        super().__init__(name)
        self.function = function
        self.x_index = x_index
        self.y_index = y_index
        self.gradient_enabled = gradient_enabled
        self.multiple_results = multiple_results
        self.batch_into = None
        self.traces = None
        self._trainable = trainable

    def trainable_operands(self, params: Mapping[str, Any]) -> dict[str, int]:
        """Key name of each trainable operand and its index, for an equation with these static parameters."""
        if callable(self._trainable):
            return dict(self._trainable(**_without_vmapped(params)))
        return dict(self._trainable)

    def apply(self, *operands: Any, vmapped: tuple[tuple[int | None, ...], ...] = (), **params: Any) -> Any:
        """The plain operation on ``operands``, mapped over the axes that ``vmapped`` records, innermost first."""
        function = partial(self.function, **params)
        for in_axes in vmapped:
            function = jax.vmap(function, in_axes)
        results = function(*operands)
        # A list, as JAX returns while tracing: code that runs both ways sees one structure.
        return list(results) if self.multiple_results else results


def register_primitive(
    name: str,
    function: Callable[..., Any],
    *,
    trainable: Trainable,
    x_index: int | None = 0,
    y_index: int = 0,
    gradient_enabled: bool = False,
    multiple_results: bool = False,
) -> ETPPrimitive:
    """Make an ETP primitive from a plain JAX function.

    Main Arguments:
      name: the primitive's name in jaxprs and reports, by custom ``etp_...``.
      function: ``function(*operands, **params) -> y``; ``params`` are hashable and static.
      trainable: key name -> operand index (``{"weight": 1}``), or a function of ``params`` that gives it.
      x_index: the operand that is the input ``x``, or ``None``.

    Other Arguments:
      y_index: the result that is ``y``, if ``function`` returns several.
      gradient_enabled: whether credit may pass through the operator to a hidden state behind it.
      multiple_results: whether ``function`` returns a tuple.

    Returns:
      The primitive; call its ``bind`` inside the function that users call.

    Example, a matrix product with a learnt gain for each output:

    >>> import jax, jax.numpy as jnp
    >>> def gained(x, weight, gain):
    ...     return (x @ weight) * gain
    >>> gained_p = register_primitive("etp_gained", gained, trainable={"weight": 1, "gain": 2})
    >>> y = gained_p.bind(jnp.ones(3), jnp.ones((3, 2)), jnp.array([1.0, 2.0]))
    >>> y.tolist()
    [3.0, 6.0]
    >>> jax.grad(lambda g: gained_p.bind(jnp.ones(3), jnp.ones((3, 2)), g).sum())(jnp.ones(2)).tolist()
    [3.0, 3.0]
    """
    primitive = ETPPrimitive(
        name,
        function,
        trainable,
        x_index=x_index,
        y_index=y_index,
        gradient_enabled=gradient_enabled,
        multiple_results=multiple_results,
    )
    primitive.def_impl(primitive.apply)
    primitive.def_abstract_eval(partial(_abstract_eval, primitive))
    ad.primitive_jvps[primitive] = partial(_jvp, primitive)
    batching.primitive_batchers[primitive] = partial(_batch, primitive)
    mlir.register_lowering(primitive, mlir.lower_fun(primitive.apply, multiple_results))
    return primitive


def is_etp(primitive: Primitive) -> bool:
    """Whether ``primitive`` marks a trainable operation."""
    return isinstance(primitive, ETPPrimitive)


def is_boundary(primitive: Primitive) -> bool:
    """Whether the recurrence is cut at ``primitive``: an ETP primitive that is not gradient-enabled."""
    return isinstance(primitive, ETPPrimitive) and not primitive.gradient_enabled


def _without_vmapped(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != "vmapped"}


def _abstract_eval(primitive: ETPPrimitive, *avals: Any, **params: Any) -> Any:
    # Through a jaxpr rather than eval_shape: the shardings of an explicit mesh are part of the avals.
    out_avals = jax.make_jaxpr(partial(primitive.apply, **params))(*avals).out_avals
    return list(out_avals) if primitive.multiple_results else out_avals[0]


def _jvp(primitive: ETPPrimitive, primals: Any, tangents: Any, **params: Any) -> Any:
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def of_moving(*values: Any) -> Any:
        operands = list(primals)
        for i, value in zip(moving, values, strict=True):
            operands[i] = value
        return primitive.apply(*operands, **params)

    _, tangent_out = jax.jvp(of_moving, tuple(primals[i] for i in moving), tuple(tangents[i] for i in moving))
    return primitive.bind(*primals, **params), tangent_out


def _batch(primitive: ETPPrimitive, operands: Any, axes: Any, *, vmapped: Any = (), **params: Any) -> Any:
    mapped = [i for i, axis in enumerate(axes) if axis is not None]
    if primitive.batch_into is not None and not vmapped and mapped == [primitive.x_index or 0]:
        operands = list(operands)
        operands[mapped[0]] = jax.numpy.moveaxis(operands[mapped[0]], axes[mapped[0]], 0)
        return primitive.batch_into.bind(*operands, **params), 0
    results = primitive.bind(*operands, vmapped=(*vmapped, tuple(axes)), **params)
    return results, (0,) * len(results) if primitive.multiple_results else 0
