"""A plan: what a config needs with each rule and several windows, what fits, and what to change if it does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..runs.config import Config, ConfigError
from .chips import Chip, spell_size
from .estimate import Need, estimate, largest_batch

__all__ = ["USABLE", "Row", "advise", "compare"]

USABLE = 0.98
"""The part of a chip's memory that programs get."""

RULES = ("d_rtrl", "pp_prop", "tbptt")


@dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
      rule, window: as in a config.
      need: bytes on one device.
      largest_batch: that fits, over all devices; 0 if none does.
    """

    rule: str
    window: int
    need: Need
    largest_batch: int


def compare(config: Config, memory: int) -> list[Row]:
    """The config's own rule and some others, with a shorter and a longer window, and BPTT over the whole sequence."""
    rows = []
    names = {config.rule.split(":")[0]: config.rule}
    for rule in (config.rule, *(rule for rule in RULES if rule not in names)):
        for window in _windows(config):
            row = _row(replace(config, rule=rule, window=window), memory)
            rows.extend([row] if row else [])
    row = _row(replace(config, rule="bptt", window=0, credit="window"), memory)
    rows.extend([row] if row else [])
    return rows


def advise(config: Config, chip: Chip, own: Row, rows: list[Row]) -> list[str]:
    """What to do, in sentences."""
    memory, need = int(chip.memory * USABLE), own.need
    found = []
    if need.total <= memory:
        found.append(
            f"It fits: {spell_size(need.total)} of {spell_size(memory)} a device. The largest batch that fits is about "
            f"{own.largest_batch}."
        )
    else:
        found.append(f"It does not fit: {spell_size(need.total)} are needed and {spell_size(memory)} are there.")
        fitting = list(_ways(config, own, rows, memory))
        found += [f"This would fit: {way}." for way in fitting]
        if not fitting:
            found.append("Nothing tried fits: divide the parameters (`sharding`, an fsdp axis), or take more devices.")
    if need.traces > need.total / 2 and config.trace_dtype != "bfloat16":
        saved = need.traces - estimate(replace(config, trace_dtype="bfloat16")).traces
        if saved > 0:
            found.append(f"Traces are most of it: `--trace_dtype bfloat16` saves {spell_size(saved)}.")
    bptt = next((row for row in rows if row.rule == "bptt"), None)
    if bptt is not None and own.rule != "bptt":
        ratio = bptt.need.activations / max(need.activations + need.traces, 1)
        found.append(
            f"BPTT over {config.task.steps} steps keeps {ratio:.1f} times what {own.rule} keeps, and grows with the "
            "sequence."
        )
    return found


def _ways(config: Config, own: Row, rows: list[Row], memory: int) -> Iterator[str]:
    """Changes after which it fits, the smallest first."""
    short = replace(config, trace_dtype="bfloat16")
    if config.trace_dtype != "bfloat16" and estimate(short).total <= memory:
        yield "`--trace_dtype bfloat16`"
    for row in rows:
        if row.need.total <= memory and row.rule == own.rule and row.window != own.window:
            yield f"`--window {row.window}`"
    if own.largest_batch:
        yield f"`--batch_size {own.largest_batch}`"
    for row in rows:
        if row.need.total <= memory and row.rule != own.rule and row.window == own.window and row.rule != "tbptt":
            yield f"`--rule {row.rule}`"


def _row(config: Config, memory: int) -> Row | None:
    try:
        need = estimate(config)
    except ConfigError:
        raise
    except ValueError:  # a rule that cannot learn this network, or not with this credit
        return None
    return Row(config.rule, config.window or config.task.steps, need, largest_batch(config, memory))


def _windows(config: Config) -> list[int]:
    steps = config.task.steps
    own = config.window or steps
    return [window for window in dict.fromkeys((own, own // 4, own * 4)) if window and steps % window == 0]
