"""TPU chips as their maker publishes them, and topologies by name."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

__all__ = ["CHIPS", "Chip", "PlanError", "chip_of", "size_of", "spell_size"]


class PlanError(ValueError):
    """Something that a plan was asked for is not to be had."""


class Chip(NamedTuple):
    """What one chip has.

    Attributes:
      name: as topologies have it.
      memory: bytes of main memory.
      flops: bfloat16 operations a second, at most.
      bandwidth: bytes a second between main memory and cores.
      links: bytes a second to all its neighbours together, in one direction.
    """

    name: str
    memory: int
    flops: float
    bandwidth: float
    links: float


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 32 * 2**30, 275e12, 1228e9, 300e9),
        Chip("v5e", 16 * 2**30, 197e12, 819e9, 200e9),
        Chip("v5p", 95 * 2**30, 459e12, 2765e9, 600e9),
        Chip("v6e", 32 * 2**30, 918e12, 1640e9, 448e9),
    )
}


def chip_of(topology: str) -> Chip:
    """The chip of a topology, or of a name alone.

    >>> chip_of("v5p:8x8x8").name
    'v5p'
    """
    name = topology.split(":")[0]
    if name not in CHIPS:
        raise PlanError(f"There is no chip {name!r}: {', '.join(CHIPS)} are known.")
    return CHIPS[name]


def size_of(topology: str) -> int:
    """How many chips a topology has.

    >>> size_of("v5p:8x8x8")
    512
    """
    chip_of(topology)
    shape = topology.partition(":")[2]
    if not re.fullmatch(r"\d+(x\d+)*", shape):
        raise PlanError(f"A topology is a chip and a shape, as in v5e:16x16 or v5p:8x8x8; got {topology!r}.")
    return math.prod(map(int, shape.split("x")))


def spell_size(size: float) -> str:
    """Bytes in words.

    >>> spell_size(3 * 2**29)
    '1.50 GiB'
    """
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size / 2**10:.1f} KiB"
