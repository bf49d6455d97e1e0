"""Spikes, and the pseudo-derivatives that let gradients through them.

A spike is ``1`` where ``x >= 0`` and ``0`` elsewhere; its derivative is zero almost everywhere, so learning replaces
it by a smooth bump around the threshold. Each class here is one bump: calling it on ``x`` gives spikes, of the dtype of
``x`` (float16, bfloat16, float32, float64), and ``derivative(x)`` is what differentiation sees. Neurons scale ``x`` so
that it is 0 at the threshold and -1 at the reset potential.

>>> import jax
>>> spike = Triangular(height=0.3)
>>> spike(jnp.array([-0.5, 0.0, 2.0])).tolist()
[0.0, 1.0, 1.0]
>>> round(float(jax.grad(spike)(-0.5)), 3)
0.15
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

__all__ = [
    "Arctan",
    "FastSigmoid",
    "Gaussian",
    "MultiGaussian",
    "Rectangular",
    "Sigmoid",
    "Surrogate",
    "Triangular",
    "heaviside",
]


def heaviside(x: ArrayLike, derivative: Callable[[Array], Array]) -> Array:
    """``1`` where ``x >= 0``, else ``0``; differentiates as ``derivative(x)``, which has the shape of ``x``.

    >>> jax.grad(lambda x: heaviside(x, jnp.cos))(0.0).tolist()
    1.0
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"A spike needs a floating x, to be differentiated; got dtype {x.dtype.name}.")
    return _heaviside(x, derivative)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _heaviside(x: Array, derivative: Callable[[Array], Array]) -> Array:
    del derivative
    return (x >= 0).astype(x.dtype)


@_heaviside.defjvp
def _heaviside_jvp(derivative: Callable[[Array], Array], primals: Any, tangents: Any) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    return _heaviside(x, derivative), derivative(x) * tangent


@dataclass(frozen=True)
class Surrogate(ABC):
    """A spike function. Subclasses are frozen dataclasses of positive numbers and define ``derivative``."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"{type(self).__name__} needs a positive {field.name}, got {value}.")

    @abstractmethod
    def derivative(self, x: Array) -> Array:
        """The pseudo-derivative at ``x``, of the same shape and dtype."""

    def __call__(self, x: ArrayLike) -> Array:
        """``1`` where ``x >= 0``, else ``0``."""
        return heaviside(x, self.derivative)


@dataclass(frozen=True)
class Triangular(Surrogate):
    """``height * max(0, 1 - |x| / width)``, a tent (Esser et al. 2016; Bellec et al. 2018, with height 0.3)."""

    height: float = 0.3
    width: float = 1.0

    def derivative(self, x: Array) -> Array:
        """The formula above."""
        return self.height * jax.nn.relu(1 - jnp.abs(x) / self.width)


@dataclass(frozen=True)
class Rectangular(Surrogate):
    """``1 / width`` where ``|x| < width / 2``, else 0, a box of area 1 (Wu et al. 2018)."""

    width: float = 1.0

    def derivative(self, x: Array) -> Array:
        """The formula above."""
        return (jnp.abs(x) < self.width / 2).astype(x.dtype) / self.width


@dataclass(frozen=True)
class Sigmoid(Surrogate):
    """``slope * s * (1 - s)`` with ``s = sigmoid(slope * x)``, of height ``slope / 4`` (Zenke and Vogels 2021)."""

    slope: float = 4.0

    def derivative(self, x: Array) -> Array:
        """The formula above."""
        s = jax.nn.sigmoid(self.slope * x)
        return self.slope * s * (1 - s)


@dataclass(frozen=True)
class FastSigmoid(Surrogate):
    """``1 / (1 + slope * |x|)**2``, of height 1 with long tails, known as SuperSpike (Zenke and Ganguli 2018)."""

    slope: float = 10.0

    def derivative(self, x: Array) -> Array:
        """The formula above."""
        return 1 / jnp.square(1 + self.slope * jnp.abs(x))


@dataclass(frozen=True)
class Arctan(Surrogate):
    """``(slope / 2) / (1 + (pi / 2 * slope * x)**2)``, of height ``slope / 2`` with long tails (Fang et al. 2021)."""

    slope: float = 2.0

    def derivative(self, x: Array) -> Array:
        """The formula above."""
        return self.slope / 2 / (1 + jnp.square(jnp.pi / 2 * self.slope * x))


@dataclass(frozen=True)
class Gaussian(Surrogate):
    """``height * N(x; 0, sigma)``, a normal density scaled by ``height`` (Yin et al. 2020)."""

    sigma: float = 0.5
    height: float = 1.0

    def derivative(self, x: Array) -> Array:
        """The formula above."""
        return self.height * _normal(x, self.sigma)


@dataclass(frozen=True)
class MultiGaussian(Surrogate):
    """A normal density with a negative rim, which keeps silent and busy units learning (Yin et al. 2021)::

        height * ((1 + h) N(x; 0, sigma) - h N(x; sigma, s sigma) - h N(x; -sigma, s sigma))

    with ``N(x; mean, deviation)``. The values are the paper's; its code scales by ``height = 0.5``.
    """

    sigma: float = 0.5
    h: float = 0.15
    s: float = 6.0
    height: float = 1.0

    def derivative(self, x: Array) -> Array:
        """The formula above."""
        rim = _normal(x - self.sigma, self.s * self.sigma) + _normal(x + self.sigma, self.s * self.sigma)
        return self.height * ((1 + self.h) * _normal(x, self.sigma) - self.h * rim)


def _normal(x: Array, sigma: float) -> Array:
    return jnp.exp(-0.5 * jnp.square(x / sigma)) / (sigma * (2 * jnp.pi) ** 0.5)
