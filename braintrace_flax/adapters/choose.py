"""Which adapter a model needs."""

from __future__ import annotations

from typing import Any

import brainstate
from flax import linen, nnx

from .brainstate import adapt_brainstate
from .function import adapt_function
from .linen import adapt_linen
from .nnx import adapt_nnx
from .step import Step

__all__ = ["adapt"]


def adapt(model: Any, inputs: Any, params: Any, carry: Any) -> Step:
    """The model as a pure step.

    Args:
      model: a Linen, NNX or brainstate module, or a step function.
      inputs: shapes and dtypes of one step's inputs.
      params, carry: given ones, or None.
    """
    if isinstance(model, linen.Module):
        return adapt_linen(model, inputs, params, carry)
    if isinstance(model, nnx.Module):
        return adapt_nnx(model, inputs, params, carry)
    if isinstance(model, brainstate.nn.Module):
        return adapt_brainstate(model, inputs, params, carry)
    if isinstance(model, type):
        raise TypeError(
            f"`compile` got the class {model.__name__}, not a model: make one first, as in `compile({model.__name__}"
            "(...), example_input)`."
        )
    if callable(model):
        return adapt_function(model, inputs, params, carry)
    raise TypeError(
        f"`compile` takes a Linen, NNX or brainstate module or a function `step(params, carry, *inputs)`, got a "
        f"{type(model).__name__}."
    )
