"""The dtype in which arrays of different dtypes meet."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["accumulation_dtype", "common_dtype", "storage_dtype"]


def common_dtype(a: Any, b: Any) -> Any:
    """The smallest dtype that holds both, also where JAX is set to refuse implicit promotion: this one is meant."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


def accumulation_dtype(*dtypes: Any) -> Any:
    """The dtype to sum values of these dtypes in over time: short ones would stop growing."""
    result = jnp.dtype(jnp.float32)
    for dtype in dtypes:
        result = common_dtype(result, dtype)
    return result


def storage_dtype(asked: Any, own: Any) -> Any:
    """The dtype to store an array of dtype ``own`` in where ``asked`` is asked for; complex ones stay complex."""
    if asked is None:
        return own
    return common_dtype(jnp.complex64, asked) if jnp.issubdtype(own, jnp.complexfloating) else asked
