"""The trace of a convolution's kernel: a product of patches of ``x`` with the kernel, at every position of ``y``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .trace_rules import EinsumTrace, TraceRule, letters_of

__all__ = ["ConvTrace"]


class ConvTrace(TraceRule):
    """``y = conv(x, kernel)``, in feature groups.

    The trace's axes are the positions of ``y``, the group, the patch (input channels of the group times kernel places),
    and the output channels of the group.

    Args:
      params: the static parameters of the operator.
      kernel: its kernel, or shape and dtype.
      y_shape: the shape of its result.
    """

    def __init__(self, params: Mapping[str, Any], kernel: Any, y_shape: Sequence[int]):
        self.params, self.kernel = params, kernel
        layout = params["dimension_numbers"]
        self.groups = params["feature_group_count"]
        self.batched = params["batched"]
        batch, feature = layout.out_spec[:2]
        self.feature = feature - (0 if self.batched else int(batch < feature))
        positions = [n for i, n in enumerate(y_shape) if i != self.feature]
        self.places = tuple(kernel.shape[i] for i in layout.rhs_spec[2:])
        self.channels_in = kernel.shape[layout.rhs_spec[1]]
        self.channels_out = kernel.shape[layout.rhs_spec[0]] // self.groups
        patch = self.channels_in * int(np.prod(self.places))
        axes, sizes = letters_of([*positions, self.groups, patch, self.channels_out])
        where, (g, i, o) = axes[:-3], tuple(axes[-3:])
        self.product = EinsumTrace(
            f"{where}{g}{i},{g}{i}{o}->{where}{g}{o}", sizes, kernel.dtype, prepare=jax.vmap(jax.vmap(self._patches))
        )
        self.shape, self.dtype = self.product.shape, self.product.dtype

    def instant(self, x: Any, cotangent: Array) -> Array:
        places = self.params["dimension_numbers"].out_spec[2:]
        is_plain = not self.batched and set(self.params["lhs_dilation"]) == {1} and list(places) == sorted(places)
        if x.shape[0] > self.channels_out and is_plain:
            return self._by_places(x, self._in_groups(cotangent))
        return self.product.instant(x, self._in_groups(cotangent))

    def align(self, value: Array) -> Array:
        return self.product.align(self._in_groups(value))

    def contract(self, trace: Array, signal: Array) -> Array:
        found = self.product.contract(trace, self._in_groups(signal))
        found = found.reshape(self.groups, self.channels_in, *self.places, self.channels_out)
        # (group, in, places, out) -> (group and out, in, places) -> the kernel's own order of axes
        found = jnp.moveaxis(found, -1, 1).reshape(self.groups * self.channels_out, self.channels_in, *self.places)
        return jnp.moveaxis(found, range(found.ndim), self.params["dimension_numbers"].rhs_spec)

    def _by_places(self, x: Array, cotangent: Array) -> Array:
        """The same, one place of the kernel after the other; patches of a long window are larger than the trace."""
        layout, spatial = self.params["dimension_numbers"], len(self.places)
        # (time, batch, *spatial, channels): an example has no batch axis of its own
        order = [i - int(i > layout.lhs_spec[0]) + 2 for i in (*layout.lhs_spec[2:], layout.lhs_spec[1])]
        x = x.transpose(0, 1, *order).astype(self.kernel.dtype)
        around = [(0, 0, 0), (0, 0, 0), *((*pair, 0) for pair in self.params["padding"]), (0, 0, 0)]
        x = lax.pad(x, jnp.zeros((), x.dtype), around)
        sizes, strides = cotangent.shape[2 : 2 + spatial], self.params["window_strides"]
        where = "".join("pqrs"[:spatial])
        found = []
        for place in np.ndindex(*self.places):
            starts = [k * d for k, d in zip(place, self.params["rhs_dilation"], strict=True)]
            ends = [s + (n - 1) * t + 1 for s, n, t in zip(starts, sizes, strides, strict=True)]
            part = lax.slice(x, (0, 0, *starts, 0), (*x.shape[:2], *ends, x.shape[-1]), (1, 1, *strides, 1))
            part = part.reshape(*part.shape[:-1], self.groups, self.channels_in)
            product = jnp.einsum(f"tb{where}gi,tb{where}go->b{where}gio", part, cotangent.astype(part.dtype))
            found.append(product)
        stacked = jnp.stack(found, axis=-2)  # (..., group, in, places, out)
        return stacked.reshape(*stacked.shape[:-3], -1, self.channels_out)

    def _in_groups(self, value: Array) -> Array:
        lead = value.ndim - (len(self.shape) - 2)  # y has the positions and one axis of features
        value = jnp.moveaxis(value, lead + self.feature, -1)
        return value.reshape(*value.shape[:-1], self.groups, self.channels_out)

    def _patches(self, x: Array) -> Array:
        layout = self.params["dimension_numbers"]
        if not self.batched:
            x = jnp.expand_dims(x, layout.lhs_spec[0])
        patches = lax.conv_general_dilated_patches(
            x.astype(self.kernel.dtype),
            self.places,
            self.params["window_strides"],
            self.params["padding"],
            self.params["lhs_dilation"],
            self.params["rhs_dilation"],
            dimension_numbers=layout,
            precision=lax.Precision.HIGHEST,
        )
        if not self.batched:
            patches = jnp.squeeze(patches, layout.out_spec[0])
        patches = jnp.moveaxis(patches, self.feature, -1)
        return patches.reshape(*patches.shape[:-1], self.groups, -1)
