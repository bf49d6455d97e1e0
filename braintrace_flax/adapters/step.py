"""What every framework's model becomes: a pure step function with its initial values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["Parts", "Step", "check_arguments", "shape_of"]


@dataclass(frozen=True, eq=False)
class Step:
    """A model as pure functions.

    Attributes:
      run: ``run(params, carry, *inputs) -> (carry, out)``.
      init: ``init(key) -> params``.
      initial_carry: ``initial_carry(key) -> carry``.
      hidden: bools in the structure of the carry: which leaves are hidden states. Others are carried along.
      random: whether a step draws random numbers.
      names: for error messages, what the model is.
    """

    run: Callable[..., tuple[Any, Any]]
    init: Callable[[Any], Any]
    initial_carry: Callable[[Any], Any]
    hidden: Any
    random: bool
    names: str

    def shapes(self, *inputs: Any) -> tuple[Any, Any, Any, Any]:
        """Shapes of parameters, carry, new carry and outputs, for inputs like these."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        params, carry = jax.eval_shape(self.init, key), jax.eval_shape(self.initial_carry, key)
        new, out = jax.eval_shape(self.run, params, carry, *inputs)
        return params, carry, new, out


class Parts:
    """A carry made of named parts; a part that stands alone is the carry itself.

    >>> Parts(["carry"]).join({"carry": 1})
    1
    >>> Parts(["carry", "key"]).split({"carry": 1, "key": 2})
    {'carry': 1, 'key': 2}
    """

    def __init__(self, names: list[str]):
        self.names = names

    def join(self, parts: dict[str, Any]) -> Any:
        """The carry from its parts."""
        chosen = {name: parts[name] for name in self.names}
        return chosen[self.names[0]] if len(self.names) == 1 else chosen

    def split(self, carry: Any) -> dict[str, Any]:
        """The parts of a carry."""
        return {self.names[0]: carry} if len(self.names) == 1 else dict(carry)


def check_arguments(module: Any, inputs: Any, has_carry: bool) -> None:
    """Raise if a module's call wants a carry that nobody has given."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    wanted = [p for p in inspect.signature(module.__call__).parameters.values() if p.kind in kinds]
    needed = [p.name for p in wanted if p.default is inspect.Parameter.empty]
    if not has_carry and len(needed) == len(inputs) + 1:
        name = type(module).__name__
        raise ValueError(
            f"`{name}` is called with ({', '.join(needed)}), and there {'is' if len(inputs) == 1 else 'are'} "
            f"{len(inputs)} of `example_inputs`. If `{needed[0]}` is the carry, say what it starts from: "
            f"`compile({name}(...), example_input, carry=...)`; or give the module an `initialize_carry`."
        )


def shape_of(value: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array, a number or an abstract array."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype)
    if not hasattr(value, "dtype"):
        value = jnp.asarray(value)
    return jax.ShapeDtypeStruct(value.shape, value.dtype)
