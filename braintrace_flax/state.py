"""The state of a training run."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["TrainState"]


class TrainState(NamedTuple):
    """All that training carries from call to call; a pytree.

    Attributes:
      step: how many optimizer updates there were.
      params, carry: of the model.
      opt_state: of the optimizer; the traces are in it.
      key: for what the user draws; the model's own random streams are in its carry.
      meter: what a quality meter keeps; None without one.
    """

    step: Any
    params: Any
    carry: Any
    opt_state: Any
    key: Any
    meter: Any = None
