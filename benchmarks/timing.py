"""Functions that take turns: their times, and the memory that they were compiled for."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp


@dataclass
class Contender:
    """A compiled function `f(carry, *arguments) -> (carry, result)` whose carry is donated, and its times in seconds.

    Attributes:
      steps: time steps that a call takes; times are for one step.
    """

    compiled: Any
    carry: Any
    arguments: tuple[Any, ...]
    steps: int
    times: list[float] = field(default_factory=list)

    @staticmethod
    def of(function: Callable[..., Any], carry: Any, arguments: tuple[Any, ...], steps: int) -> "Contender":
        carry = jax.tree.map(jnp.array, carry)  # the call consumes it
        return Contender(compile_for(function, carry, arguments), carry, arguments, steps)

    def __call__(self) -> Any:
        start = time.perf_counter()
        self.carry, result = jax.block_until_ready(self.compiled(self.carry, *self.arguments))
        self.times.append((time.perf_counter() - start) / self.steps)
        return result

    @property
    def least(self) -> float:
        return min(self.times)

    @property
    def median(self) -> float:
        return median(self.times)


def compile_for(function: Callable[..., Any], carry: Any, arguments: tuple[Any, ...]) -> Any:
    return jax.jit(function, donate_argnums=0).lower(carry, *arguments).compile()


def take_turns(contenders: list[Contender], repeats: int, seconds: float) -> None:
    """Call each in turn, `repeats` times or (but at least twice) until its calls took so many seconds."""
    for contender in contenders:
        contender()
        contender.times.clear()
    gc.collect()
    for repeat in range(repeats):
        for contender in contenders:
            if repeat < 2 or sum(contender.times) * contender.steps < seconds:
                contender()


def memory(compiled: Any) -> dict[str, int]:
    """Bytes: temporaries, arguments, and the arguments whose memory results use again."""
    found = compiled.memory_analysis()
    return {
        "temp": found.temp_size_in_bytes,
        "arguments": found.argument_size_in_bytes,
        "alias": found.alias_size_in_bytes,
    }


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns as wide as needed, the first to the left."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
