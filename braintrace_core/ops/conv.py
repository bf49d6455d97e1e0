"""``conv``: a convolution over one to three spatial axes, with or without a batch axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from .bias import add_bias, bias_operands
from .conv_trace import ConvTrace
from .hooks import prepare
from .primitive import register_primitive
from .trace_rules import EinsumTrace, OperatorTraces, TraceRule, letters_of

__all__ = ["conv", "etp_conv_p"]

_CHANNELS_LAST = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


def conv(
    x: ArrayLike,
    kernel: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: str | Sequence[tuple[int, int]] = "SAME",
    lhs_dilation: int | Sequence[int] | None = None,
    rhs_dilation: int | Sequence[int] | None = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    dimension_numbers: tuple[str, str, str] | lax.ConvDimensionNumbers | None = None,
    kernel_fn: Callable[[Array], Array] | None = None,
    bias_fn: Callable[[Array], Array] | None = None,
    mask: ArrayLike | None = None,
) -> Array:
    """``y = conv_general_dilated(x, kernel) + bias``, marked as trainable.

    Main Arguments:
      x: ``(batch, *space, in)``, or ``(*space, in)``; one to three spatial axes.
      kernel: ``(*window, in / feature_group_count, out)``.
      bias: ``(out,)``, optional; added on the channels of ``y``.
      strides: one for all spatial axes, or one for each.
      padding: ``"SAME"``, ``"SAME_LOWER"``, ``"VALID"``, or a pair ``(low, high)`` for each spatial axis.

    Other Arguments:
      lhs_dilation, rhs_dilation: spacing of the entries of ``x`` and of the kernel.
      feature_group_count, batch_group_count: as in ``jax.lax.conv_general_dilated``.
      dimension_numbers: another layout, such as ``("NCHW", "OIHW", "NCHW")``; ``x`` without a batch axis has the
        layout without its ``N``.
      kernel_fn, bias_fn: applied to the parameter first; gradients go back through them.
      mask: multiplies the kernel after ``kernel_fn``.

    >>> import jax.numpy as jnp
    >>> conv(jnp.arange(4.0)[:, None], jnp.ones((2, 1, 1)), padding="VALID")[:, 0].tolist()
    [1.0, 3.0, 5.0]
    """
    x, kernel = jnp.asarray(x), prepare(kernel, kernel_fn, mask)
    spatial = kernel.ndim - 2
    if spatial not in _CHANNELS_LAST or kernel.ndim - x.ndim not in (0, 1):
        raise ValueError(
            "conv needs a kernel with one to three spatial axes and two of channels, and x with as many axes, or one "
            f"less (no batch), got x {x.shape} and kernel {kernel.shape}."
        )
    # Only the number of axes matters here, and the kernel has that of a batched x.
    layout = lax.conv_dimension_numbers(kernel.shape, kernel.shape, dimension_numbers or _CHANNELS_LAST[spatial])
    batched = x.ndim == kernel.ndim
    sizes = list(x.shape)
    if not batched:
        sizes.insert(layout.lhs_spec[0], 1)
    channels, expected = sizes[layout.lhs_spec[1]], kernel.shape[layout.rhs_spec[1]] * feature_group_count
    if channels != expected:
        raise ValueError(
            f"conv needs x with {expected} channels (kernel {kernel.shape}, feature_group_count "
            f"{feature_group_count}), got {channels} in x {x.shape}."
        )
    strides = _per_axis("strides", strides, spatial)
    lhs_dilation = _per_axis("lhs_dilation", 1 if lhs_dilation is None else lhs_dilation, spatial)
    rhs_dilation = _per_axis("rhs_dilation", 1 if rhs_dilation is None else rhs_dilation, spatial)
    if isinstance(padding, str):
        if any(dilation != 1 for dilation in lhs_dilation):
            raise ValueError(f'conv with lhs_dilation needs padding as (low, high) pairs, got "{padding}".')
        window = [
            (kernel.shape[axis] - 1) * dilation + 1
            for axis, dilation in zip(layout.rhs_spec[2:], rhs_dilation, strict=True)
        ]
        padding = lax.padtype_to_pads([sizes[axis] for axis in layout.lhs_spec[2:]], window, strides, padding)
    elif np.shape(padding) != (spatial, 2):
        raise ValueError(
            f"conv needs padding as {spatial} pairs (low, high), one for each spatial axis, got {padding}."
        )
    biases = bias_operands("conv", bias, bias_fn, (kernel.shape[layout.rhs_spec[0]],))
    return etp_conv_p.bind(
        x,
        kernel,
        *biases,
        window_strides=strides,
        padding=tuple((int(low), int(high)) for low, high in padding),
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=layout,
        feature_group_count=int(feature_group_count),
        batch_group_count=int(batch_group_count),
        precision=None,
        preferred_element_type=None,
        has_bias=bool(biases),
        batched=batched,
    )


def _per_axis(name: str, value: int | Sequence[int], spatial: int) -> tuple[int, ...]:
    values = (value,) * spatial if isinstance(value, int) else tuple(value)
    if len(values) != spatial:
        raise ValueError(f"conv needs {name} as one integer or as {spatial}, one for each spatial axis, got {value}.")
    return tuple(int(entry) for entry in values)


def _conv(
    x: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    dimension_numbers: lax.ConvDimensionNumbers,
    has_bias: bool,
    batched: bool,
    **geometry: Any,
) -> Array:
    del has_bias
    if not batched:
        x = lax.expand_dims(x, (dimension_numbers.lhs_spec[0],))
    dtype = jnp.result_type(x, kernel)  # spikes may be integers, but lax convolves equal dtypes only
    y = lax.conv_general_dilated(x.astype(dtype), kernel.astype(dtype), dimension_numbers=dimension_numbers, **geometry)
    y = add_bias(y, bias, (dimension_numbers.out_spec[1],))
    return y if batched else lax.squeeze(y, (dimension_numbers.out_spec[0],))


def _trainable(*, has_bias: bool, **_: Any) -> dict[str, int]:
    return {"weight": 1, "bias": 2} if has_bias else {"weight": 1}


etp_conv_p = register_primitive("etp_conv", _conv, trainable=_trainable)


def _traces(params: dict[str, Any], operands: Sequence[Any], y: Any) -> OperatorTraces | None:
    if params["batch_group_count"] != 1:
        return None
    _, kernel, *biases = operands
    weight = ConvTrace(params, kernel, y.shape)
    rules: dict[str, TraceRule] = {"weight": weight}
    if params["has_bias"]:
        axes, sizes = letters_of(y.shape)
        rules["bias"] = EinsumTrace(f",{axes[weight.feature]}->{axes}", sizes, biases[0].dtype)
    return OperatorTraces(rules)


etp_conv_p.traces = _traces
