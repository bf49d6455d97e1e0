"""Tasks to train on: real data that comes with declared packages, and generators. NumPy alone, no hidden state.

A task is a frozen dataclass whose fields can be written to JSON. ``task.batch(position, batch_size)`` is a pure
function: what a checkpoint has to remember of the data is one whole number.
"""

from .base import Batch, Task
from .digits import Digits
from .series import Series
from .synthetic import Adding, Copy, DelayedMatch, EvidenceAccumulation, MemoryChain
from .text import Text

__all__ = [
    "Adding",
    "Batch",
    "Copy",
    "DelayedMatch",
    "Digits",
    "EvidenceAccumulation",
    "MemoryChain",
    "Series",
    "Task",
    "Text",
]
