"""Convolutions over one, two or three spatial axes, channels last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import brainstate
import jax
from jax import Array
from jax.nn import initializers
from jax.typing import ArrayLike, DTypeLike

from .. import ops
from .module import Initializer, Layer, weight_and_bias

__all__ = ["Conv", "Conv1d", "Conv2d", "Conv3d"]

_GLOROT = initializers.glorot_normal()


class Conv(Layer):
    """What :class:`Conv1d`, :class:`Conv2d` and :class:`Conv3d` share: all but the number of spatial axes.

    ``x`` has shape ``(*space, in)`` or ``(batch, *space, in)``; ``y`` has ``out`` channels. One ParamState ``weight``
    holds ``{"weight": (*window, in / groups, out), "bias": (out,)}``.

    Main arguments:
      in_size: ``(*space, in)``.
      out_channels: ``out``.
      window: size of the kernel, one number or one per spatial axis.
      strides: steps of the window, likewise.
      padding: ``"SAME"``, ``"VALID"``, or a pair ``(low, high)`` per spatial axis.
      key: a JAX key for the first values; ``None`` stands for ``jax.random.key(0)``.

    Further arguments:
      lhs_dilation, rhs_dilation: spacing of the entries of ``x`` and of the kernel.
      groups: input and output channels are split into so many groups, each convolved by itself.
      w_init, b_init: functions of ``(key, shape, dtype)`` or arrays; ``b_init=None`` for no bias.
      mask: multiplies the kernel.
      dtype: of parameters and result; ``None`` is JAX's default float.
    """

    spatial: ClassVar[int]

    def __init__(
        self,
        in_size: Sequence[int],
        out_channels: int,
        window: int | Sequence[int],
        *,
        strides: int | Sequence[int] = 1,
        padding: str | Sequence[tuple[int, int]] = "SAME",
        lhs_dilation: int | Sequence[int] = 1,
        rhs_dilation: int | Sequence[int] = 1,
        groups: int = 1,
        w_init: Initializer = _GLOROT,
        b_init: Initializer | None = initializers.zeros,
        mask: ArrayLike | None = None,
        dtype: DTypeLike | None = None,
        key: Array | None = None,
    ) -> None:
        super().__init__(in_size, out_channels, dtype)
        name = type(self).__name__
        if len(self.in_size) != self.spatial + 1:
            raise ValueError(
                f"{name} needs in_size as {self.spatial} spatial sizes and the channels, got {tuple(self.in_size)}."
            )
        window = (window,) * self.spatial if isinstance(window, int) else tuple(window)
        if len(window) != self.spatial:
            raise ValueError(f"{name} needs window as one integer or as {self.spatial}, got {window}.")
        channels = self.in_size[-1]
        if channels % groups or out_channels % groups:
            raise ValueError(
                f"{name} cannot split {channels} input and {out_channels} output channels into {groups} equal groups."
            )
        shape = (*window, channels // groups, out_channels)
        self.weight = brainstate.ParamState(weight_and_bias(self, w_init, shape, b_init, shape[-1:], key))
        self.mask = mask
        self.strides, self.padding, self.groups = strides, padding, groups
        self.lhs_dilation, self.rhs_dilation = lhs_dilation, rhs_dilation
        self.out_size = jax.eval_shape(self.update, jax.ShapeDtypeStruct(self.in_size, self.dtype)).shape

    def update(self, x: ArrayLike) -> Array:
        """``y`` for ``x``."""
        value = self.weight.value
        return ops.conv(
            self.check_input(x),
            value["weight"],
            value.get("bias"),
            strides=self.strides,
            padding=self.padding,
            lhs_dilation=self.lhs_dilation,
            rhs_dilation=self.rhs_dilation,
            feature_group_count=self.groups,
            mask=self.mask,
        )


class Conv1d(Conv):
    """A convolution over one spatial axis; arguments as for :class:`Conv`.

    >>> import jax.numpy as jnp
    >>> Conv1d((8, 3), 5, window=3)(jnp.ones((8, 3))).shape
    (8, 5)
    """

    spatial = 1


class Conv2d(Conv):
    """A convolution over two spatial axes; arguments as for :class:`Conv`.

    >>> import jax.numpy as jnp
    >>> Conv2d((8, 8, 3), 5, window=3, strides=2)(jnp.ones((2, 8, 8, 3))).shape
    (2, 4, 4, 5)
    """

    spatial = 2


class Conv3d(Conv):
    """A convolution over three spatial axes; arguments as for :class:`Conv`.

    >>> Conv3d((4, 4, 4, 3), 5, window=(1, 3, 3), padding="VALID").out_size
    (4, 2, 2, 5)
    """

    spatial = 3
