"""Reading compiled programs: which collectives they have, how often each runs, and how much work there is in all."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Collective", "Program", "Shape"]

_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "f16": 16, "c64": 64, "c128": 128, "token": 0}
_MOVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "collective-broadcast")
_FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "call", "conditional", "after-all")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")


class Shape(NamedTuple):
    """An array in a program.

    Attributes:
      dtype: as the program spells it, ``"f32"``.
      dims: its size on one device.
      in_hbm: whether it lies in the chip's main memory rather than close to its cores.
    """

    dtype: str
    dims: tuple[int, ...]
    in_hbm: bool = True

    @property
    def bytes(self) -> int:
        """Without padding."""
        bits = _BITS.get(self.dtype) or int(re.sub(r"\D", "", self.dtype.split("e")[0]) or 0)
        return math.prod(self.dims) * bits // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


class Collective(NamedTuple):
    """What devices send to one another at one place of a program.

    Attributes:
      kind: ``"all-reduce"``, ``"reduce-scatter"``, ...
      shapes: the arrays on one device; the larger side, where the two differ.
      group: how many devices take part in one exchange.
      times: how often it runs in one call of the program.
      loops: lengths of the loops around it, the outermost first.
    """

    kind: str
    shapes: tuple[Shape, ...]
    group: int
    times: int
    loops: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of its arrays, once."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def sent(self) -> float:
        """Bytes that a device sends in one call of the program, on a ring."""
        rounds = 2.0 if self.kind == "all-reduce" else 1.0
        share = 1.0 if self.kind == "collective-permute" else (self.group - 1) / max(self.group, 1)
        return rounds * share * self.bytes * self.times


@dataclass
class _Part:
    lines: list[_Line] = field(default_factory=list)
    results: dict[str, tuple[Shape, ...]] = field(default_factory=dict)

    def shapes(self, names: tuple[str, ...]) -> list[tuple[Shape, ...]]:
        return [self.results[name] for name in names if name in self.results]


@dataclass(frozen=True, eq=False)
class _Line:
    part: _Part
    name: str
    result: tuple[Shape, ...]
    kind: str
    operands: tuple[str, ...]
    text: str


class Program:
    """A compiled program.

    Args:
      text: what ``compiled.as_text()`` gives.
    """

    def __init__(self, text: str):
        self._parts: dict[str, _Part] = {}
        self._entry = ""
        part: _Part | None = None
        for row in text.splitlines():
            head = re.match(r"(ENTRY )?%?([^\s(]+) \(.*\{$", row)
            if head and not row.startswith(" "):
                part = self._parts[head.group(2)] = _Part()
                self._entry = head.group(2) if head.group(1) else self._entry
            elif row.startswith("}"):
                part = None
            elif part is not None and (line := _read(part, row)) is not None:
                part.lines.append(line)
                part.results[line.name] = line.result

    def collectives(self) -> list[Collective]:
        """Every collective, in the order of the program."""
        found: dict[Any, Collective] = {}
        for line, loops, inside in self._walk(self._entry, (), ""):
            kind = next((kind for kind in _MOVES if line.kind in (kind, f"{kind}-start")), None)
            if kind is None:
                continue
            shapes = line.result
            if kind == "reduce-scatter":
                shapes = tuple(s for each in line.part.shapes(line.operands) for s in each) or shapes
            elif line.kind.endswith("-start"):
                shapes = shapes[len(shapes) // 2 :] if kind == "all-gather" else shapes[:1]
            if kind == "all-reduce" and "scatter" in inside:  # as the TPU compiler writes a reduce-scatter
                kind = "reduce-scatter"
            channel = re.search(r"channel_id=(\d+)", line.text)
            # The parts of an asynchronous one have the same channel and shapes; so may others that stand by themselves.
            key = (loops, kind, channel.group(1) if channel and inside else line.name, tuple(map(str, shapes)))
            if key not in found:
                found[key] = Collective(kind, shapes, _group(line.text), math.prod(loops), loops)
        return list(found.values())

    def flops(self) -> float:
        """Of matrix products, on one device, in one call; a complex or element-wise operation is not counted."""
        return sum(
            self._product(line) * math.prod(loops)
            for line, loops, _ in self._walk(self._entry, (), "")
            if line.kind in ("convolution", "dot")
        )

    def bytes_accessed(self) -> float:
        """Bytes read from and written to main memory on one device in one call.

        Slices of an array count as what they take of it.
        """
        total = 0.0
        for line, loops, inside in self._walk(self._entry, (), ""):
            if not inside and line.kind not in _FREE and not line.kind.endswith("-done"):
                total += self._touched(line) * math.prod(loops)
        return total

    def _walk(self, name: str, loops: tuple[int, ...], inside: str) -> Iterator[tuple[_Line, tuple[int, ...], str]]:
        """Every instruction that runs, the lengths of the loops around it, and the fusion that it is in."""
        for line in self._parts[name].lines:
            yield line, loops, inside
            if line.kind == "while":
                body, condition = (re.search(rf"{key}=%?([^\s,]+)", line.text) for key in ("body", "condition"))
                known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line.text)
                if body and condition:
                    length = int(known.group(1)) if known else self._length(condition.group(1))
                    yield from self._walk(body.group(1), (*loops, length), inside)
            elif line.kind in ("fusion", "call", "async-start", "conditional"):
                for called in _called(line.text):
                    if called in self._parts:
                        yield from self._walk(called, loops, inside if line.kind == "call" else called)

    def _length(self, condition: str) -> int:
        """How often a loop runs: the number that its condition compares with."""
        for line in self._parts[condition].lines:
            if (found := re.search(r"s32\[\]\S* constant\((\d+)\)", line.text)) is not None:
                return int(found.group(1))
        return 1

    def _product(self, line: _Line) -> float:
        operands = line.part.shapes(line.operands)
        if len(operands) < 2:
            return 0.0
        out, kernel = math.prod(line.result[0].dims), operands[1][0].dims
        labels = re.search(r"dim_labels=\w+_(\w+)->", line.text)
        if labels:
            return 2.0 * out * math.prod(kernel) / max(kernel[labels.group(1).index("o")], 1) / _window_waste(line.text)
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line.text)
        taken = [int(axis) for axis in axes.group(1).split(",") if axis] if axes else []
        return 2.0 * out * math.prod(operands[0][0].dims[axis] for axis in taken)

    def _touched(self, line: _Line) -> float:
        made = line.result
        if line.kind.endswith("-start"):  # what it makes stands beside what it was given
            made = made[:1] if line.kind == "copy-start" else made[1:2]
        result = sum(shape.bytes for shape in made if shape.in_hbm)
        operands = line.part.shapes(line.operands)
        called = next((name for name in _called(line.text) if name in self._parts), None)
        if line.kind in ("dynamic-slice", "slice", "slice-start", "gather"):
            return result + sum(shape.bytes for shape in made)
        if line.kind == "dynamic-update-slice":
            return 2.0 * sum(shape.bytes for shape in operands[1])
        if line.kind != "fusion" or called is None:
            return result + sum(shape.bytes for each in operands for shape in each if shape.in_hbm)
        return self._fusion(self._parts[called], line, operands)

    def _fusion(self, part: _Part, line: _Line, operands: list[tuple[Shape, ...]]) -> float:
        total = 0.0
        parameters = {
            int(found.group(1)): each.name
            for each in part.lines
            if each.kind == "parameter" and (found := re.search(r"parameter\((\d+)\)", each.text))
        }
        updated = set()
        for each in part.lines:
            if each.kind == "dynamic-update-slice":
                updated.add(each.operands[0])
                total += sum(s.bytes for s in part.shapes(each.operands[1:2])[0]) if len(each.operands) > 1 else 0
        for place, shapes in enumerate(operands):
            name = parameters.get(place)
            if name in updated:
                continue
            uses = [each for each in part.lines if name in each.operands]
            if uses and all(each.kind in ("dynamic-slice", "slice", "gather") for each in uses):
                total += sum(shape.bytes for each in uses for shape in each.result)
            else:
                total += sum(shape.bytes for shape in shapes if shape.in_hbm)
        if not updated:
            total += sum(shape.bytes for shape in line.result if shape.in_hbm)
        return total


def _read(part: _Part, row: str) -> _Line | None:
    found = re.match(r"\s+(?:ROOT )?%?(\S+) = (.*?) ([a-z][\w-]*)\((.*)", row)
    if found is None:
        return None
    name, result, kind, rest = found.groups()
    operands = tuple(re.findall(r"%([^\s,()]+)", rest.split("), ")[0]))
    return _Line(part, name, tuple(_shapes(result)), kind, operands, row)


def _shapes(text: str) -> Iterator[Shape]:
    for dtype, dims, layout in _SHAPE.findall(text):
        yield Shape(dtype, tuple(int(n) for n in dims.split(",") if n), re.search(r"S\([1-9]\)", layout) is None)


def _called(text: str) -> list[str]:
    found = re.findall(r"(?:calls|to_apply|branch_computations)=\{?([^\s}]+(?:, %[^\s}]+)*)", text)
    return [name.strip().lstrip("%").rstrip(",") for names in found for name in names.split(",") if name.strip()]


def _group(text: str) -> int:
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", text):
        return int(found.group(1))
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return len(found.group(1).split(","))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(.*?\))? \{([^}]*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found.group(1))}
        return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", found.group(2)))
    if found := re.search(r"source_target_pairs=\{\{", text):
        return 2
    return 1


def _window_waste(text: str) -> float:
    """How many times more a product with a window counts than it computes: examples side by side are such windows."""
    window = re.search(r"window=\{([^}]*)\}", text)
    if window is None:
        return 1.0
    parts = dict(part.split("=") for part in window.group(1).split())
    waste = 1.0
    for place, size in enumerate(parts["size"].split("x")):
        padded = any(map(int, parts["pad"].split("x")[place].split("_"))) if "pad" in parts else False
        dilated = int(parts["lhs_dilate"].split("x")[place]) > 1 if "lhs_dilate" in parts else False
        waste *= int(size) if padded or dilated else 1
    return waste
