"""Checkpoints of a training run: written beside the training, checked to the bit when they are read."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax

from .manifest import Manifest, begin_manifest, named_leaves
from .preemption import Preemption, preemption
from .restoring import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    as_state,
    read_checkpoint,
    read_manifest,
    shortened,
)
from .state import TrainState
from .storage import UNFINISHED, as_path, begin_writing, remove, set_aside
from .train_step import TrainStep

__all__ = ["CheckpointDamaged", "CheckpointError", "CheckpointMismatch", "Checkpoints", "Restored"]

_DELETED = ".deleted"
# Up to this many bytes a state is copied on its devices, and training need not wait for anything else.
_SMALL = 2**28


class Restored(NamedTuple):
    """What :meth:`Checkpoints.restore` returns.

    Attributes:
      state: the train state.
      data, config, metrics: as they were given when it was saved.
      versions: of the packages that wrote it.
      number: of the checkpoint.
    """

    state: TrainState
    data: Any
    config: Any
    metrics: dict[str, float]
    versions: dict[str, str]
    number: int


class Checkpoints:
    """The checkpoints of a run, in one directory; a context manager.

    Main arguments:
      directory: where they are, one folder each.
      keep: how many of the newest to keep.
      every: save at each call of :meth:`save` whose number is a multiple of this; None for each call.
      best: ``"max:accuracy"`` or ``"min:loss"``: the checkpoint with the best value of this metric is kept too.

    Other arguments:
      config: what the run was started with, made of what JSON knows; stored in each checkpoint.

    Call :meth:`save` once after each call of the train step. The calls are counted, and the count is the checkpoint's
    number; it goes on where the newest checkpoint ended. Within ``with``, SIGTERM makes the next call save whatever
    ``every`` says, and :meth:`reached_preemption` true.

    With several processes each makes the same calls, on a directory that all of them see.

    >>> import tempfile, jax, jax.numpy as jnp, optax, braintrace_flax as braintrace
    >>> from flax import linen as nn
    >>> model = braintrace.compile(nn.SimpleCell(4), jnp.zeros((2, 3)))
    >>> tx = optax.chain(braintrace.online_grad(model), optax.adam(1e-2))
    >>> @braintrace.train_step(model, tx, window=5)
    ... def step(outputs, targets):
    ...     return jnp.mean((outputs - targets) ** 2)
    >>> state, folder = step.init(jax.random.key(0)), tempfile.TemporaryDirectory()
    >>> with Checkpoints(folder.name, every=2) as checkpoints:
    ...     for epoch in range(1, 5):
    ...         state, metrics = step(state, jnp.ones((5, 2, 3)), jnp.zeros((5, 2, 4)))
    ...         saved = checkpoints.save(state, data={"epoch": epoch})
    ...         if checkpoints.reached_preemption():
    ...             break
    >>> with Checkpoints(folder.name) as checkpoints:  # the next run
    ...     print(checkpoints.all_steps)
    ...     state, data, *_ = checkpoints.restore(step)
    [2, 4]
    >>> int(state.step), data
    (4, {'epoch': 4})
    >>> folder.cleanup()
    """

    def __init__(
        self,
        directory: Any,
        *,
        keep: int = 3,
        every: int | None = None,
        best: str | None = None,
        config: Any = None,
    ):
        for name, value in (("keep", keep), ("every", 1 if every is None else every)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` is a whole number, at least 1; got {value!r}.")
        self._sign, self._metric = _parse_best(best)
        self.directory, self.keep, self.every, self.config = as_path(directory), keep, every, config
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            names = [path.name for path in self.directory.iterdir()]
        except OSError as error:
            raise CheckpointError(f"`{self.directory}` cannot be used for checkpoints: {error}.") from error
        self._numbers = sorted(int(name) for name in names if name.isdecimal())
        self._scores: dict[int, float] = {}
        self._count = self._numbers[-1] if self._numbers else 0
        self._may_write = not self._numbers
        self._cleaned = False
        self._structures: list[Any] = []
        self._thread = ThreadPoolExecutor(1)  # one for all saves: to start a thread is to wait for it
        self._pending: tuple[int, Callable[[], Any]] | None = None
        self._notice = Preemption()
        self._exits = contextlib.ExitStack()

    @property
    def all_steps(self) -> list[int]:
        """The numbers of the checkpoints, the newest last; one that is still being written is not among them."""
        return list(self._numbers)

    @property
    def latest(self) -> int | None:
        """The number of the newest checkpoint; None if there is none."""
        return self._numbers[-1] if self._numbers else None

    @property
    def best(self) -> int | None:
        """The number of the checkpoint with the best metric; the newest of several. None if none has the metric."""
        if self._metric is None:
            raise ValueError('`Checkpoints` was not told what is best: `Checkpoints(directory, best="max:accuracy")`.')
        scores = {number: score for number in self._numbers if (score := self._score(number)) > -math.inf}
        return max(scores, key=lambda number: (scores[number], number), default=None)

    def save(
        self, state: TrainState, *, data: Any = None, metrics: Mapping[str, Any] | None = None, force: bool = False
    ) -> bool:
        """Save the state, if it is time to; whether it was.

        Only copying takes place at once (on the devices for a small state, else to the host), after which the state may
        be donated; files are written meanwhile. An error of writing is raised by the next call of ``save``,
        :meth:`wait` or :meth:`close`.

        Args:
          state: of the train step.
          data: the position in the data, made of what JSON knows.
          metrics: numbers by name.
          force: save whatever ``every`` says.
        """
        self._count += 1
        stop = self._notice.agreed(self._count)
        if not (force or stop or self._count % (self.every or 1) == 0):
            return False
        if not self._may_write:
            raise CheckpointError(
                f"`{self.directory}` holds checkpoints up to {self.latest} of a run that was not restored, and new "
                "ones would displace them. Go on with `restore`, or take another directory."
            )
        self.wait()
        copy = jax.process_count() == 1 and sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(state)) <= _SMALL
        if (structure := jax.tree.structure(state)) not in self._structures:
            named_leaves(state)  # which refuses what cannot be told apart
            self._structures = [structure]
        number, content = self._count, begin_manifest(state, data, self.config, metrics, copy=copy)
        try:
            self._clean()
            finish = begin_writing(
                self.directory / str(number), lambda: _files(*content()), self._thread if copy else None
            )
        except Exception as error:
            raise self._not_written(number, error) from error
        self._pending = number, finish
        if stop:
            self.wait()  # there may be no other chance
        return True

    def restore(
        self,
        like: TrainStep | TrainState,
        *,
        step: int | None = None,
        only: Sequence[str] | None = None,
    ) -> Restored:
        """Read a checkpoint, and check every bit.

        Args:
          like: the train step that is to go on; or a train state of arrays or shapes. Arrays are put where this one
            says (``step.sharded(mesh)``, shardings of the shapes), whatever devices they were saved from.
          step: the checkpoint's number; None for the newest.
          only: what to take from the checkpoint, ``("params", "opt_state/1")``; all else stays as in ``like``, which is
            then a state of arrays, and may be of another optimizer, rule or batch size.

        Raises:
          CheckpointMismatch: it is of another model; a line for each difference.
          CheckpointDamaged: files are missing or changed; the newest that is intact is named.
        """
        self.wait()
        state = as_state(like, only)
        number = self.latest if step is None else step
        if number not in self._numbers:
            raise CheckpointError(
                f"`{self.directory}` has no checkpoint{'' if number is None else f' {number}'}; there are "
                f"{', '.join(map(str, self._numbers)) or 'none'}."
            )
        try:
            manifest, restored = read_checkpoint(self.directory / str(number), state, only)
        except CheckpointDamaged as error:
            raise CheckpointDamaged(f"{error}{self._advice(number, state, only)}") from error.__cause__
        self._may_write = True
        return Restored(restored, manifest.data, manifest.config, manifest.metrics, manifest.versions, number)

    def reached_preemption(self) -> bool:
        """Whether the process was told to stop. With several processes, ask after :meth:`save`: all hear the same."""
        return bool(self._notice)

    def wait(self) -> None:
        """Wait until what was saved is on disk; only then older checkpoints go."""
        if self._pending is None:
            return
        (number, finish), self._pending = self._pending, None
        try:
            finish()
        except Exception as error:
            raise self._not_written(number, error) from error
        self._numbers.append(number)
        self._delete_old()

    def close(self) -> None:
        """Wait, and let go of SIGTERM."""
        try:
            self.wait()
        finally:
            self._thread.shutdown(wait=False)
            self._thread = ThreadPoolExecutor(1)  # starts nothing until it is used again
            self._exits.close()

    def __enter__(self) -> Self:
        self._notice = self._exits.enter_context(preemption())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _advice(self, number: int, like: TrainState, only: Sequence[str] | None) -> str:
        for other in reversed(self._numbers):
            if other != number:
                try:
                    read_checkpoint(self.directory / str(other), like, only)
                except CheckpointError:
                    continue
                return f"\nThe newest that is intact is {other}: `restore(..., step={other})`."
        return "\nNo other is intact."

    def _not_written(self, number: int, error: Exception) -> CheckpointError:
        kept = ", ".join(map(str, self._numbers)) or "none"
        with contextlib.suppress(OSError):  # what is left is ignored
            remove(self.directory, lambda name: name.startswith(f"{number}{UNFINISHED}"))
        return CheckpointError(
            f"Checkpoint {number} could not be written to `{self.directory}`: {shortened(error)}\nEarlier ones are as "
            f"they were ({kept}), and the training state is not affected: make room or permissions, and save again."
        )

    def _clean(self) -> None:
        """Remove what interrupted runs have left."""
        if not self._cleaned:
            remove(self.directory, lambda name: name.endswith(_DELETED) or UNFINISHED in name)
            self._cleaned = True

    def _delete_old(self) -> None:
        kept = set(self._numbers[-self.keep :])
        if self._metric is not None:
            kept.add(self.best or 0)
        old = [number for number in self._numbers if number not in kept]
        self._numbers = [number for number in self._numbers if number in kept]
        for number in old:  # renamed first: what is half deleted must not look like a checkpoint
            set_aside(self.directory, str(number), f"{number}{_DELETED}")
        if old:
            remove(self.directory, lambda name: name.endswith(_DELETED))

    def _score(self, number: int) -> float:
        if number not in self._scores:
            try:
                self._scores[number] = self._score_of(read_manifest(self.directory / str(number)))
            except CheckpointDamaged:
                self._scores[number] = -math.inf
        return self._scores[number]

    def _score_of(self, manifest: Manifest) -> float:
        value = self._sign * manifest.metrics.get(self._metric or "", math.nan)
        return -math.inf if math.isnan(value) else value


def _files(arrays: dict[str, Any], manifest: Manifest) -> tuple[dict[str, Any], dict[str, str]]:
    """What is written: arrays with something in them, and the manifest as text."""
    return {name: array for name, array in arrays.items() if array.size}, manifest.encode()


def _parse_best(best: str | None) -> tuple[int, str | None]:
    if best is None:
        return 1, None
    kind, _, metric = best.partition(":")
    if kind not in ("max", "min") or not metric:
        raise ValueError(f'`best` is "max:accuracy", "min:loss" or the like; got {best!r}.')
    return (1 if kind == "max" else -1), metric
