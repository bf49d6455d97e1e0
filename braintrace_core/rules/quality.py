"""How close a rule's gradient comes to that of back-propagation: as a table, and as a meter during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .baselines import checkpointed_gradient
from .plan import RulePlan
from .window import WindowResult

__all__ = ["GradientComparison", "ParameterComparison", "Quality", "QualityMeter", "compare_gradients"]


class ParameterComparison(NamedTuple):
    """One parameter's gradient against the true one.

    Attributes:
      name: of the parameter.
      cosine: of the angle between the two.
      norm_ratio: the norm of the one over that of the true one.
      relative_error: the norm of the difference over that of the true one.
    """

    name: str
    cosine: float
    norm_ratio: float
    relative_error: float


@dataclass(frozen=True)
class GradientComparison:
    """A table of comparisons, one row a parameter, the last for all together. Printing it shows the table."""

    rows: tuple[ParameterComparison, ...]
    title: str = ""

    @property
    def overall(self) -> ParameterComparison:
        """All parameters as one vector."""
        return self.rows[-1]

    def __getitem__(self, name: str) -> ParameterComparison:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"{name!r}; there are {', '.join(row.name for row in self.rows)}")

    def __str__(self) -> str:
        width = max(len("parameter"), *(len(row.name) for row in self.rows))
        lines = [self.title] if self.title else []
        lines.append(f"{'parameter':<{width}}  {'cosine':>8}  {'norm ratio':>10}  {'rel. error':>10}")
        for row in self.rows:
            lines.append(f"{row.name:<{width}}  {row.cosine:8.4f}  {row.norm_ratio:10.4f}  {row.relative_error:10.2e}")
        return "\n".join(lines)


def compare_gradients(found: Mapping[str, Any], truth: Mapping[str, Any], title: str = "") -> GradientComparison:
    """Compare gradients, by parameter, with the true ones.

    >>> import jax.numpy as jnp
    >>> print(compare_gradients({"w": jnp.array([1.0, 1.0])}, {"w": jnp.array([1.0, 0.0])}))
    parameter    cosine  norm ratio  rel. error
    w            0.7071      1.4142    1.00e+00
    all          0.7071      1.4142    1.00e+00

    Raises:
      ValueError: where both gradients of a parameter are zero: there is nothing to compare.
    """
    if set(found) != set(truth):
        raise ValueError(f"The gradients are of other parameters: {sorted(set(found) ^ set(truth))}.")
    vectors = {name: (_vector(found[name]), _vector(truth[name])) for name in truth}
    empty = [name for name, (a, b) in vectors.items() if not a.any() and not b.any()]
    if empty:
        raise ValueError(
            f"Nothing to compare: the gradients of {', '.join(empty)} are zero, by this rule and by back-propagation. "
            "Use data that make the model respond (a spiking model must spike), or leave these parameters out."
        )
    rows = [_compare(name, a, b) for name, (a, b) in vectors.items()]
    whole = [np.concatenate([pair[i] for pair in vectors.values()]) for i in (0, 1)]
    return GradientComparison((*rows, _compare("all", *whole)), title)


class Quality(NamedTuple):
    """What a meter reads: the gradient of a window against that of back-propagation through the windows before it."""

    cosine: Array
    norm_ratio: Array


class _Ring(NamedTuple):
    recorded: Array
    items: Any


@dataclass(frozen=True)
class QualityMeter:
    """Compares, every now and then during training, a window's gradient with back-propagation.

    The last few windows are kept in a ring; the true gradient of the newest window's loss goes back through all of
    them, with the parameters of now. Its cost is bounded by one such pass each ``every`` windows, its memory by the
    windows' inputs and first states. Pure functions; it goes into a jitted step.

    Attributes:
      every: how many windows lie between two readings.
      windows: how many windows the true gradient reaches back.
    """

    every: int = 100
    windows: int = 4

    def __post_init__(self) -> None:
        if self.every < 1 or self.windows < 1:
            raise ValueError(f"QualityMeter needs every >= 1 and windows >= 1, got {self.every} and {self.windows}.")

    def init(self, item: Any) -> _Ring:
        """An empty ring for items like ``item``: ``(states, inputs, targets, reset)`` of a window, or their shapes."""
        items = jax.tree.map(lambda a: jnp.zeros((self.windows, *a.shape), a.dtype), item)
        return _Ring(jnp.zeros((), jnp.int32), items)

    def record(self, ring: _Ring, item: Any) -> _Ring:
        """The ring with one more window; the oldest makes place."""
        place = ring.recorded % self.windows
        items = jax.tree.map(lambda a, b: lax.dynamic_update_index_in_dim(a, b, place, 0), ring.items, item)
        return _Ring(ring.recorded + 1, items)

    def measure(
        self,
        ring: _Ring,
        plan: RulePlan,
        loss: Callable[[WindowResult, Any], Array],
        parameters: Sequence[Any],
        found: Sequence[Any] | Callable[[], Sequence[Any]],
        initial: Sequence[Any] | None = None,
    ) -> Quality:
        """A reading if one is due, else NaN.

        Args:
          ring: with the newest window recorded.
          plan: of the model.
          loss: ``loss(window, targets)`` of the newest window.
          parameters: leaves, as they were for that window.
          found: the gradients to be judged, or a function that computes them when a reading is due.
          initial: what resets start from.
        """
        due = (ring.recorded >= self.windows) & (ring.recorded % self.every == 0)

        def read(_: Any) -> Quality:
            order = (ring.recorded + jnp.arange(self.windows, dtype=jnp.int32)) % self.windows
            states, inputs, targets, reset = jax.tree.map(lambda a: a[order], ring.items)
            length = jax.tree.leaves(inputs)[0].shape[1]

            def newest(window: WindowResult) -> tuple[Array, None]:
                outputs = [output[-length:] for output in window.outputs]
                return loss(window._replace(outputs=outputs), jax.tree.map(lambda a: a[-1], targets)), None

            flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), (list(inputs), reset))
            _, _, _, truth = checkpointed_gradient(
                plan.program, newest, parameters, [s[0] for s in states], flat[0], flat[1], initial
            )
            return _read(found() if callable(found) else found, truth)

        nothing = jnp.full((), jnp.nan, jnp.result_type(float))
        return lax.cond(due, read, lambda _: Quality(nothing, nothing), None)


def _read(found: Sequence[Any], truth: Sequence[Any]) -> Quality:
    dtype = jnp.result_type(float)

    def dot(a: Sequence[Any], b: Sequence[Any]) -> Array:
        parts = [jnp.real(jnp.sum(x * jnp.conj(y))).astype(dtype) for x, y in zip(a, b, strict=True)]
        return jnp.sum(jnp.stack(parts))

    norm, true_norm = jnp.sqrt(dot(found, found)), jnp.sqrt(dot(truth, truth))
    return Quality(dot(found, truth) / (norm * true_norm), norm / true_norm)


def _vector(value: Any) -> np.ndarray:
    array = np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(value)])
    if np.iscomplexobj(array):
        array = np.concatenate([array.real, array.imag])
    return array.astype(np.float64)


def _compare(name: str, found: np.ndarray, truth: np.ndarray) -> ParameterComparison:
    norm, true_norm = float(np.linalg.norm(found)), float(np.linalg.norm(truth))
    difference = float(np.linalg.norm(found - truth))
    if true_norm == 0.0:
        return ParameterComparison(name, 0.0, float("inf"), float("inf"))
    cosine = float(found @ truth) / (norm * true_norm) if norm else 0.0
    return ParameterComparison(name, cosine, norm / true_norm, difference / true_norm)
