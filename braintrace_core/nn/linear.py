"""Dense, grouped, sign-constrained, standardised, sparse and low-rank linear layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import brainstate
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.nn import initializers
from jax.typing import ArrayLike, DTypeLike

from ..ops import grouped_matmul, lora_matmul, matmul, sparse_matmul
from .module import Initializer, Layer, Size, initial, matrix_shape, split_key, weight_and_bias

__all__ = ["GroupedLinear", "Linear", "LoRA", "ScaledWSLinear", "SignedWLinear", "SparseLinear"]

_HE = initializers.he_normal()
_HE_GROUPED = initializers.he_normal(batch_axis=0)


class Linear(Layer):
    """``y = x @ weight + bias`` for ``x`` of shape ``(..., in)``; ``y`` has shape ``(..., out)``.

    One ParamState ``weight`` holds ``{"weight": (in, out), "bias": (out,)}``.

    Main arguments:
      in_size, out_size: ``in`` and ``out``.
      key: a JAX key for the first values; ``None`` stands for ``jax.random.key(0)``.
      dtype: of parameters and result; ``None`` is JAX's default float.

    Further arguments:
      w_init, b_init: functions of ``(key, shape, dtype)`` or arrays; ``b_init=None`` for no bias.
      mask: ``(in, out)``, multiplies the weight.

    >>> import jax
    >>> layer = Linear(3, 2, key=jax.random.key(1))
    >>> layer(jnp.ones((5, 3))).shape
    (5, 2)
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        *,
        w_init: Initializer = _HE,
        b_init: Initializer | None = initializers.zeros,
        mask: ArrayLike | None = None,
        dtype: DTypeLike | None = None,
        key: Array | None = None,
    ) -> None:
        super().__init__(in_size, out_size, dtype)
        shape = matrix_shape(self)
        self.weight = brainstate.ParamState(weight_and_bias(self, w_init, shape, b_init, shape[1:], key))
        self.mask = _mask(mask, shape)

    def update(self, x: ArrayLike) -> Array:
        """``y`` for ``x``."""
        value = self.weight.value
        return matmul(self.check_input(x), value["weight"], value.get("bias"), mask=self.mask)


class GroupedLinear(Layer):
    """A linear layer for each of several groups: ``y[..., g, :] = x[..., g, :] @ weight[g] + bias[g]``.

    ``x`` has shape ``(..., groups, in)``, ``y`` ``(..., groups, out)``. One ParamState ``weight`` holds
    ``{"weight": (groups, in, out), "bias": (groups, out)}``. Keyword arguments as for :class:`Linear`.

    >>> GroupedLinear(2, 3, 4)(jnp.ones((5, 2, 3))).shape
    (5, 2, 4)
    """

    def __init__(
        self,
        groups: int,
        in_size: int,
        out_size: int,
        *,
        w_init: Initializer = _HE_GROUPED,
        b_init: Initializer | None = initializers.zeros,
        dtype: DTypeLike | None = None,
        key: Array | None = None,
    ) -> None:
        super().__init__((groups, in_size), (groups, out_size), dtype)
        shape, b_shape = (groups, in_size, out_size), (groups, out_size)
        self.weight = brainstate.ParamState(weight_and_bias(self, w_init, shape, b_init, b_shape, key))

    def update(self, x: ArrayLike) -> Array:
        """``y`` for ``x``."""
        value = self.weight.value
        return grouped_matmul(self.check_input(x), value["weight"], value.get("bias"))


class SignedWLinear(Layer):
    """``y = x @ (sign * |weight|)``: learning moves the magnitude of a weight, never its sign (Dale's law).

    The ParamState ``weight`` is the ``(in, out)`` array. ``sign`` is a constant ``(in, out)`` array, usually of +1 and
    -1; ``None`` makes all weights positive. Further arguments as for :class:`Linear`.

    >>> layer = SignedWLinear(2, 1, sign=[[1.0], [-1.0]], w_init=[[0.5], [-2.0]])
    >>> layer(jnp.ones(2)).tolist()
    [-1.5]
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        *,
        sign: ArrayLike | None = None,
        w_init: Initializer = _HE,
        dtype: DTypeLike | None = None,
        key: Array | None = None,
    ) -> None:
        super().__init__(in_size, out_size, dtype)
        shape = matrix_shape(self)
        self.weight = brainstate.ParamState(initial("w_init", w_init, split_key(key, 1)[0], shape, self.dtype))
        self.sign = _mask(sign, shape, "sign")

    def update(self, x: ArrayLike) -> Array:
        """``y`` for ``x``."""
        return matmul(self.check_input(x), self.weight.value, weight_fn=jnp.abs, mask=self.sign)


class ScaledWSLinear(Layer):
    """A linear layer with scaled weight standardisation (Qiao et al. 2019; Brock, De and Smith 2021).

    Each column of the weight is centred and divided by its norm, then multiplied by a learnt gain::

        W = gain * (weight - mean) / sqrt(max(in * variance, eps)),    y = x @ W + bias

    with mean and variance over the ``in`` axis. One ParamState ``weight`` holds
    ``{"weight": (in, out), "gain": (1, out), "bias": (out,)}``.

    Arguments as for :class:`Linear`; ``gain=False`` leaves the gain out, ``eps`` bounds the division.

    >>> layer = ScaledWSLinear(2, 1, w_init=[[1.0], [3.0]])
    >>> round(float(layer(jnp.array([0.0, 1.0]))[0]), 3)
    0.707
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        *,
        w_init: Initializer = _HE,
        b_init: Initializer | None = initializers.zeros,
        mask: ArrayLike | None = None,
        gain: bool = True,
        eps: float = 1e-4,
        dtype: DTypeLike | None = None,
        key: Array | None = None,
    ) -> None:
        super().__init__(in_size, out_size, dtype)
        shape = matrix_shape(self)
        value = weight_and_bias(self, w_init, shape, b_init, shape[1:], key)
        if gain:
            value["gain"] = jnp.ones((1, shape[1]), self.dtype)
        self.weight = brainstate.ParamState(value)
        self.mask = _mask(mask, shape)
        self.eps = eps

    def update(self, x: ArrayLike) -> Array:
        """``y`` for ``x``."""
        value = self.weight.value

        def standardise(weight: Array) -> Array:
            centred = weight - jnp.mean(weight, axis=0, keepdims=True)
            square = jnp.sum(centred * centred, axis=0, keepdims=True)
            scale = lax.rsqrt(jnp.maximum(square, self.eps))
            return centred * (scale * value["gain"] if "gain" in value else scale)

        return matmul(self.check_input(x), value["weight"], value.get("bias"), weight_fn=standardise, mask=self.mask)


class SparseLinear(Layer):
    """``y = x @ M + bias`` where only the non-zero entries of ``M`` exist and are learnt.

    One ParamState ``weight`` holds ``{"weight": (nnz,), "bias": (out,)}``.

    Main arguments:
      structure: where the entries are: ``(rows, cols, (in, out))``, or a sparse ``(in, out)`` matrix, see
        :func:`braintrace_core.ops.sparse_matmul`.
      w_init: the entries, in the order of the structure; ``None`` takes the data of a sparse matrix, and draws from a
        normal distribution of variance ``2 out / nnz`` for a tuple.

    Further arguments as for :class:`Linear`.

    >>> layer = SparseLinear(([0, 2], [1, 0], (3, 2)), w_init=[10.0, 20.0])
    >>> layer(jnp.array([1.0, 2.0, 3.0])).tolist()
    [60.0, 10.0]
    """

    def __init__(
        self,
        structure: Any,
        *,
        w_init: Initializer | None = None,
        b_init: Initializer | None = initializers.zeros,
        dtype: DTypeLike | None = None,
        key: Array | None = None,
    ) -> None:
        is_tuple = isinstance(structure, tuple)
        if not (len(structure) == 3 if is_tuple else hasattr(structure, "data") and hasattr(structure, "shape")):
            raise ValueError(
                "SparseLinear needs structure as (rows, cols, (in, out)) or as a sparse matrix, "
                f"got {type(structure).__name__}."
            )
        if is_tuple:
            structure = (np.asarray(structure[0]), np.asarray(structure[1]), tuple(structure[2]))
        (size_in, size_out), entries = (
            (structure[2], structure[0].size) if is_tuple else (structure.shape, structure.data.size)
        )
        super().__init__(size_in, size_out, dtype)
        if w_init is None:
            w_init = initializers.normal(math.sqrt(2 * size_out / max(entries, 1))) if is_tuple else structure.data
        self.weight = brainstate.ParamState(weight_and_bias(self, w_init, (entries,), b_init, (size_out,), key))
        self.structure = structure

    def update(self, x: ArrayLike) -> Array:
        """``y`` for ``x``."""
        value = self.weight.value
        return sparse_matmul(self.check_input(x), value["weight"], structure=self.structure, bias=value.get("bias"))


class LoRA(Layer):
    """A low-rank adapter, ``y = base(x) + (alpha / rank) * (x @ lora_a) @ lora_b`` (Hu et al. 2021).

    One ParamState ``weight`` holds ``{"lora_a": (in, rank), "lora_b": (rank, out)}``. ``lora_b`` starts at zero, so
    that the adapted layer starts as ``base``.

    Main arguments:
      in_size, rank, out_size: ``in``, ``rank``, ``out``.
      base: a layer or function of ``x`` whose result is adapted; ``None`` for the low-rank product alone.
      alpha: the scale; the product is divided by ``rank``.

    Further arguments as for :class:`Linear`: ``a_init``, ``b_init``, ``dtype``, ``key``.

    >>> adapted = LoRA(3, 2, 4, base=Linear(3, 4))
    >>> adapted(jnp.ones(3)).shape
    (4,)
    """

    def __init__(
        self,
        in_size: Size,
        rank: int,
        out_size: Size,
        *,
        base: Callable[[Array], Array] | None = None,
        alpha: float = 1.0,
        a_init: Initializer = _HE,
        b_init: Initializer = initializers.zeros,
        dtype: DTypeLike | None = None,
        key: Array | None = None,
    ) -> None:
        super().__init__(in_size, out_size, dtype)
        size_in, size_out = matrix_shape(self)
        if not isinstance(rank, (int, np.integer)) or not 0 < rank <= min(size_in, size_out):
            raise ValueError(f"LoRA needs a rank between 1 and {min(size_in, size_out)}, got {rank!r}.")
        a_key, b_key = split_key(key, 2)
        self.weight = brainstate.ParamState(
            {
                "lora_a": initial("a_init", a_init, a_key, (size_in, rank), self.dtype),
                "lora_b": initial("b_init", b_init, b_key, (rank, size_out), self.dtype),
            }
        )
        self.base = base
        self.scale = alpha / rank

    def update(self, x: ArrayLike) -> Array:
        """``y`` for ``x``."""
        x = self.check_input(x)
        value = self.weight.value
        y = lora_matmul(x, value["lora_a"], value["lora_b"], alpha=self.scale)
        return y if self.base is None else self.base(x) + y


def _mask(mask: Any, shape: tuple[int, int], name: str = "mask") -> np.ndarray | None:
    if mask is None:
        return None
    mask = np.asarray(mask)
    if mask.shape != shape:
        raise ValueError(f"{name} must have the weight's shape {shape}, got {mask.shape}.")
    return mask
