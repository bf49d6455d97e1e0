"""The dtype in which arrays of different dtypes meet."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["common_dtype"]


def common_dtype(a: Any, b: Any) -> Any:
    """The smallest dtype that holds both, also where JAX is set to refuse implicit promotion: this one is meant."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)
