"""Text, character by character."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from .base import check_whole
from .streams import Streams, cut

__all__ = ["Text"]

HELD_OUT = 0.05
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Text(Streams):
    """Which character comes next? Endless streams of a corpus, as tokens.

    The corpus is the reference that Python's own ``help()`` shows, about half a million characters that differ a little
    between versions of Python, or a file of the user's. Its last 5 % are held out. Inputs and targets are ``(length,
    batch)`` int32: places in the vocabulary, and one more number for all characters that are not in it.

    Attributes:
      length: steps of one batch.
      file: a text in UTF-8; None for Python's reference.
      min_count: a character belongs to the vocabulary if the training part has it at least so often.

    >>> task = Text(length=32)
    >>> first, second = task.batch(0, 8), task.batch(1, 8)
    >>> first.inputs.shape, task.num_inputs == task.num_outputs == len(task.vocabulary) + 1
    ((32, 8), True)
    >>> bool((first.targets[-1] == second.inputs[0]).all())  # a stream goes on
    True
    """

    file: str | None = None
    min_count: int = 10

    def __post_init__(self) -> None:
        check_whole("Text", 1, length=self.length, min_count=self.min_count)

    @property
    def num_inputs(self) -> int:
        """Characters of the vocabulary, and the unknown one."""
        return len(self.vocabulary) + 1

    @property
    def num_outputs(self) -> int:
        """The same as inputs."""
        return self.num_inputs

    @property
    def is_tokens(self) -> bool:
        """Inputs are tokens."""
        return True

    @property
    def vocabulary(self) -> str:
        """The characters that have a token of their own, sorted."""
        return "".join(map(chr, self._vocabulary))

    def encode(self, text: str) -> np.ndarray:
        """The tokens of a text."""
        return _tokens(_codes(text), self._vocabulary)

    def decode(self, tokens: np.ndarray) -> str:
        """The text of a row of tokens, with a sign for unknown characters."""
        characters = self.vocabulary + UNKNOWN
        return "".join(characters[int(token)] for token in tokens)

    @cached_property
    def _characters(self) -> tuple[np.ndarray, np.ndarray]:
        return cut(_codes(_python_reference() if self.file is None else _read(self.file)), HELD_OUT)

    @cached_property
    def _vocabulary(self) -> np.ndarray:
        characters, counts = np.unique(self._characters[0], return_counts=True)
        return characters[counts >= self.min_count]

    @cached_property
    def _parts(self) -> tuple[np.ndarray, np.ndarray]:
        train, test = self._characters
        return _tokens(train, self._vocabulary), _tokens(test, self._vocabulary)


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def _tokens(codes: np.ndarray, vocabulary: np.ndarray) -> np.ndarray:
    places = np.searchsorted(vocabulary, codes)
    padded = np.append(vocabulary, 0)  # so that a code behind the last has something to differ from
    known = (places < len(vocabulary)) & (padded[places] == codes)
    return np.where(known, places, len(vocabulary)).astype(np.int32)


def _python_reference() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def _read(file: str) -> str:
    if not Path(file).is_file():
        raise FileNotFoundError(f"Text needs file to be a text file, found none at {file!r}.")
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"Text needs file in UTF-8, but {file!r} has another encoding at byte {error.start}."
        ) from error
