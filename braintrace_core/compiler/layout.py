"""Layout: where the boxes and lines of a drawing go.

A hidden group and the operators in front of it make a band. Bands lie below one another in the order in which the step
runs; operators that feed no group form a last band. In a band every operator has a row of its own, so that a horizontal
line at its height meets no other box. What operators read comes by wire: one vertical trunk for each source, in the
gutter left of the bands, with a stub to each reader. Operators that feed the same operators share a bundle. All lengths
are pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .diagnostics import Path, spell
from .svg import Box, text_width
from .wiring import Node, Wiring

if TYPE_CHECKING:
    from .graph import ETraceGraph

__all__ = ["Band", "Bundle", "Layout", "Wire", "common_prefix", "home", "lay_out"]

MARGIN, HEADER = 28.0, 66.0
ROW, OPERATOR_HEIGHT = 38.0, 27.0
OPERATOR_WIDTHS = (132.0, 240.0)
COLUMN_GAP, CHANNEL, LANE = 52.0, 92.0, 13.0
BAND_TITLE, BAND_FOOT, BAND_GAP = 34.0, 12.0, 18.0
LOOP = 24.0
GROUP_WIDTH, STATE_LINE, MAX_STATES = 172.0, 16.0, 6
END_WIDTH, END_HEIGHT, END_GAP = 104.0, 40.0, 62.0


@dataclass
class Band:
    """A hidden group and the operators in front of it.

    Attributes:
      group: index of the group; None for the last band, whose operators feed outputs.
      uses: the uses in the band, one row each.
      column: for each use, how many columns of operators stand between it and the end of the band.
      through: (source, reader) where a group or an output reads a wire without an operator; one row each.
      prefix: what the paths of the band's parameters have in common.
      y, height: the band's background.
    """

    group: int | None
    uses: list[int] = field(default_factory=list)
    column: dict[int, int] = field(default_factory=dict)
    through: list[tuple[Node, Node]] = field(default_factory=list)
    prefix: Path = ()
    y: float = 0.0
    height: float = 0.0


@dataclass
class Wire:
    """The way from a source to its readers.

    Attributes:
      sources, readers: what is read, and by whom; several sources are uses of one band that have the same readers.
      level: the height at which it reaches the trunk.
      lane: the trunk's place in the gutter, counted from the operators.
      x: the same in pixels.
    """

    sources: list[Node]
    readers: list[Node]
    level: float = 0.0
    lane: int = 0
    x: float = 0.0

    @property
    def source(self) -> Node:
        """The first source."""
        return self.sources[0]


@dataclass
class Bundle:
    """Operators that feed the same operators of their band, and the trunk at ``x`` that their lines share."""

    sources: list[Node]
    targets: list[Node]
    x: float = 0.0


@dataclass
class Layout:
    """A finished layout.

    Attributes:
      bands, wires, bundles: see there.
      boxes: inputs, uses, groups (as ``after``) and outputs.
      labels: the text in the box of each use.
      arrivals: (source, target) -> the height at which the line between them arrives.
      rows: (source, target) -> the height of the row on which a wire passes a band without an operator.
      left, right: the edges of the bands.
      title_x: where the titles of the bands begin, clear of the trunks.
      width, height: of the whole.
    """

    bands: list[Band]
    wires: list[Wire]
    bundles: list[Bundle]
    boxes: dict[Node, Box] = field(default_factory=dict)
    labels: dict[int, str] = field(default_factory=dict)
    arrivals: dict[tuple[Node, Node], float] = field(default_factory=dict)
    rows: dict[tuple[Node, Node], float] = field(default_factory=dict)
    left: float = 0.0
    right: float = 0.0
    title_x: float = 0.0
    width: float = 0.0
    height: float = 0.0


def lay_out(graph: ETraceGraph, wiring: Wiring, operator_names: list[str]) -> Layout:
    """Place everything; ``operator_names`` are what the boxes of the uses say besides the parameters."""
    bands = _bands(graph, wiring)
    layout = Layout(bands, _wires(wiring, bands), _bundles(wiring, bands))
    layout.labels = {k: _label(wiring, k, band.prefix) for band in bands for k in band.uses}
    wanted = [text_width(text, 12) + text_width(operator_names[k], 10) + 40 for k, text in layout.labels.items()]
    width = min(max([OPERATOR_WIDTHS[0], *wanted]), OPERATOR_WIDTHS[1])
    placed = _place_rows(graph, wiring, layout)
    _assign_lanes(layout, placed)
    _place_columns(layout, placed, width)
    _place_arrivals_at_uses(wiring, layout)
    _place_ends(wiring, layout, len(graph.module_info.input_invars))
    _place_arrivals_at_ends(wiring, layout)
    return layout


def home(node: Node) -> Node:
    """The node in whose box a source is: old and new states of a group share one."""
    return Node("after", node.index) if node.kind == "before" else node


def common_prefix(paths: list[Path]) -> Path:
    """The longest common beginning of paths that leaves something of each.

    >>> common_prefix([("cell", "0", "Wz"), ("cell", "0", "bias", "b")])
    ('cell', '0')
    """
    length = min(map(len, paths), default=1) - 1
    while length > 0 and len({path[:length] for path in paths}) > 1:
        length -= 1
    return paths[0][:length] if paths else ()


# What stands where


def _bands(graph: ETraceGraph, wiring: Wiring) -> list[Band]:
    bands = [*(Band(g) for g in wiring.group_order), Band(None)]
    place = {g: b for b, g in enumerate(wiring.group_order)}
    band_of: dict[int, int] = {}
    column: dict[int, int] = {}
    for k in _consumers_first(wiring):
        ahead = wiring.uses[k].feeds
        groups = [place[n.index] for n in ahead if n.kind == "after"]
        later = [n.index for n in ahead if n.kind == "use" and n.index in band_of]
        band_of[k] = min(groups or [len(bands) - 1, *(band_of[j] for j in later)])
        column[k] = 1 + max((column[j] for j in later if band_of[j] == band_of[k]), default=-1)
    for k in sorted(band_of, key=lambda k: (bool(wiring.uses[k].operator), k)):
        bands[band_of[k]].uses.append(k)
        bands[band_of[k]].column[k] = column[k]
    for g, reads in enumerate(wiring.group_reads):
        direct = [n for n in reads if n.kind != "use" and n != Node("before", g)]
        bands[place[g]].through += [(source, Node("after", g)) for source in direct]
    for i, reads in enumerate(wiring.output_reads):
        bands[-1].through += [(source, Node("output", i)) for source in reads if source.kind == "input"]
    for band in bands:
        paths = [path for k in band.uses for path in wiring.uses[k].paths]
        states = graph.hidden_groups[band.group].hidden_paths if band.group is not None else []
        band.prefix = common_prefix([*paths, *states]) or common_prefix(paths)
    return bands if bands[-1].uses or bands[-1].through else bands[:-1]


def _consumers_first(wiring: Wiring) -> list[int]:
    """The uses that feed something, each after all uses that it feeds."""
    order: dict[int, None] = {}
    for first in range(len(wiring.uses)):
        todo = [first]
        while todo:
            k = todo[-1]
            waiting = [n.index for n in wiring.uses[k].feeds if n.kind == "use" and n.index not in order]
            if waiting:
                todo += waiting
            else:
                order[todo.pop()] = None
    return [k for k in order if wiring.uses[k].feeds]


def _wires(wiring: Wiring, bands: list[Band]) -> list[Wire]:
    band_of = {k: b for b, band in enumerate(bands) for k in band.uses}
    readers: dict[Node, list[Node]] = {}
    for k, b in band_of.items():
        for source in wiring.uses[k].reads:
            if source.kind != "use" or band_of.get(source.index) != b:
                readers.setdefault(source, []).append(Node("use", k))
    for source, reader in (pair for band in bands for pair in band.through):
        readers.setdefault(source, []).append(reader)
    wires: dict[object, Wire] = {}
    for source, found in sorted(readers.items()):
        key = (band_of[source.index], *found) if source.kind == "use" else source
        wires.setdefault(key, Wire([], found)).sources.append(source)
    return list(wires.values())


def _bundles(wiring: Wiring, bands: list[Band]) -> list[Bundle]:
    found: dict[tuple[int, ...], Bundle] = {}
    for band in bands:
        for k in band.uses:
            targets = [n for n in wiring.uses[k].feeds if n.kind == "use" and n.index in band.column]
            if targets:
                key = tuple(n.index for n in targets)
                found.setdefault(key, Bundle([], targets)).sources.append(Node("use", k))
    return list(found.values())


# Heights


def _place_rows(graph: ETraceGraph, wiring: Wiring, layout: Layout) -> dict[Node, tuple[float, float]]:
    """Top and height of the boxes of uses and groups; sets bands, levels of wires, and the height of the whole."""
    placed: dict[Node, tuple[float, float]] = {}
    y = HEADER
    for band in layout.bands:
        group_height = 0.0
        if band.group is not None:
            states = min(len(graph.hidden_groups[band.group].hidden_paths), MAX_STATES)
            group_height = max(48 + STATE_LINE * states, 14.0 * len(wiring.group_reads[band.group]))
        rows = len(band.uses) + len(band.through)
        inner = max(ROW * rows, group_height + LOOP if band.group is not None else 0)
        top = y + BAND_TITLE
        above = (
            LOOP if band.group is not None and inner - ROW * rows >= LOOP else 0
        )  # level with the group if there is room
        middles = [top + (inner + above - ROW * rows) / 2 + ROW * (i + 0.5) for i in range(rows)]
        for k, middle in zip(band.uses, middles, strict=False):
            placed[Node("use", k)] = (middle - OPERATOR_HEIGHT / 2, OPERATOR_HEIGHT)
        layout.rows.update(zip(band.through, middles[len(band.uses) :], strict=True))
        old, new = _leaving(layout.wires, band)
        if band.group is not None:
            feeding = [n for n in wiring.group_reads[band.group] if n in placed]
            levels = [placed[n][0] + OPERATOR_HEIGHT / 2 for n in feeding if n.index in band.column]
            levels = levels or [top + (inner + LOOP) / 2]
            wanted = (min(levels) + max(levels) - group_height) / 2
            placed[Node("after", band.group)] = (min(max(wanted, top + LOOP), top + inner - group_height), group_height)
        band.y, band.height = y, BAND_TITLE + inner + BAND_FOOT + LANE * len(old)
        for wire in old:
            wire.level = band.y + band.height - BAND_FOOT
        y = band.y + band.height + BAND_GAP
        for i, wire in enumerate(new):
            wire.level = y - BAND_GAP / 2 + LANE * i
        y += LANE * max(len(new) - 1, 0)
    layout.height = y
    return placed


def _leaving(wires: list[Wire], band: Band) -> tuple[list[Wire], list[Wire]]:
    """The wires that start from a band: the one of the old states, which runs inside, and those that run below."""
    old = [w for w in wires if band.group is not None and w.source == Node("before", band.group)]
    new = [
        w
        for w in wires
        if (w.source.kind == "after" and w.source.index == band.group)
        or (w.source.kind == "use" and w.source.index in band.column)
    ]
    return old, new


def _assign_lanes(layout: Layout, placed: dict[Node, tuple[float, float]]) -> None:
    """Give each wire a lane in which its trunk meets no other; short trunks are next to the operators."""
    extents = {}
    for wire in layout.wires:
        ends = [layout.rows.get((wire.source, n), sum(placed.get(n, ())) - OPERATOR_HEIGHT / 2) for n in wire.readers]
        if wire.source.kind == "input":
            wire.level = sorted(ends)[0] if len(ends) < 3 else sum(sorted(ends)[:2]) / 2
        reach = OPERATOR_HEIGHT / 2
        extents[wire.source] = (min(wire.level, *ends) - reach, max(wire.level, *ends) + reach)
    taken: list[list[tuple[float, float]]] = []
    for wire in sorted(layout.wires, key=lambda w: (w.source.kind == "input", _length(extents[w.source]))):
        low, high = extents[wire.source]
        free = (i for i, lane in enumerate(taken) if all(high < a or b < low for a, b in lane))
        wire.lane = next(free, len(taken))
        if wire.lane == len(taken):
            taken.append([])
        taken[wire.lane].append((low, high))


def _length(extent: tuple[float, float]) -> float:
    return extent[1] - extent[0]


# Widths


def _place_columns(layout: Layout, placed: dict[Node, tuple[float, float]], operator_width: float) -> None:
    lanes = 1 + max((wire.lane for wire in layout.wires), default=0)
    columns = 1 + max((c for band in layout.bands for c in band.column.values()), default=0)
    layout.left = MARGIN + END_WIDTH + 30
    trunks = layout.left + 16 + LANE * (lanes - 1)
    layout.title_x = trunks + 14
    last = trunks + 26 + (columns - 1) * (operator_width + COLUMN_GAP)
    group_x = last + operator_width + CHANNEL
    layout.right = group_x + GROUP_WIDTH + 22
    layout.width = layout.right + END_GAP + END_WIDTH + MARGIN
    for wire in layout.wires:
        wire.x = trunks - LANE * wire.lane
    for band in layout.bands:
        for k in band.uses:
            y, height = placed[Node("use", k)]
            x = last - band.column[k] * (operator_width + COLUMN_GAP)
            layout.boxes[Node("use", k)] = Box(x, y, operator_width, height)
        if band.group is not None:
            y, height = placed[Node("after", band.group)]
            layout.boxes[Node("after", band.group)] = Box(group_x, y, GROUP_WIDTH, height)
    in_channel: dict[float, int] = {}
    for bundle in layout.bundles:
        right = min(layout.boxes[n].x for n in bundle.targets)
        lane = in_channel[right] = in_channel.get(right, -1) + 1
        bundle.x = right - 24 + (0, -6, 6, -12, 12)[lane % 5]


def _place_ends(wiring: Wiring, layout: Layout, num_inputs: int) -> None:
    """Inputs at the left and outputs at the right, each at the height of what it is connected to."""
    levels = {wire.source: wire.level for wire in layout.wires}
    for wire in layout.wires:
        if wire.source.kind == "input" and len(wire.readers) == 1:
            pair = (wire.source, wire.readers[0])
            levels[wire.source] = layout.rows.get(pair, layout.arrivals.get(pair, wire.level))
    _stack(layout, [(levels.get(n, layout.height), n) for n in (Node("input", i) for i in range(num_inputs))], MARGIN)
    wanted = []
    for i, reads in enumerate(wiring.output_reads):
        node = Node("output", i)
        found = [layout.boxes[home(n)].middle for n in reads if n.kind != "input" and home(n) in layout.boxes]
        found += [layout.rows[n, node] for n in reads if (n, node) in layout.rows]
        wanted.append((sum(found) / len(found) if found else layout.height, node))
    _stack(layout, wanted, layout.right + END_GAP)
    layout.height = max([layout.height, *(box.bottom + BAND_GAP for box in layout.boxes.values())])


def _stack(layout: Layout, wanted: list[tuple[float, Node]], x: float) -> None:
    free = HEADER
    for middle, node in sorted(wanted):
        y = max(middle - END_HEIGHT / 2, free)
        layout.boxes[node] = Box(x, y, END_WIDTH, END_HEIGHT)
        free = y + END_HEIGHT + 12


# Where lines arrive


def _place_arrivals_at_uses(wiring: Wiring, layout: Layout) -> None:
    for node in [n for n in layout.boxes if n.kind == "use"]:
        wires = sorted((w for w in layout.wires if node in w.readers), key=lambda w: (w.x, w.source))
        groups = [w.sources for w in wires] + [b.sources for b in layout.bundles if node in b.targets]
        for sources, y in zip(groups, layout.boxes[node].slots(len(groups), 8), strict=True):
            layout.arrivals.update(((source, node), y) for source in sources)


def _place_arrivals_at_ends(wiring: Wiring, layout: Layout) -> None:
    ends = [(Node("after", g), reads) for g, reads in enumerate(wiring.group_reads)]
    ends += [(Node("output", i), reads) for i, reads in enumerate(wiring.output_reads)]
    for node, reads in ends:
        found = [n for n in reads if home(n) in layout.boxes and home(n) != node]
        found.sort(key=lambda n: layout.rows.get((n, node), layout.boxes[home(n)].middle))
        for source, y in zip(found, layout.boxes[node].slots(len(found), 14), strict=True):
            layout.arrivals[source, node] = y


def _label(wiring: Wiring, use: int, prefix: Path) -> str:
    """The parameters of a use in few words: those in one place share its name, of some only a few leaves are meant."""
    leaves = wiring.uses[use].all_leaves
    names: list[Path] = []
    for path in wiring.uses[use].paths:
        own = [leaf for leaf in leaves if leaf.path == path]
        whole = len(own) == sum(leaf.path == path for leaf in wiring.leaves)
        names += [path] if whole else [(*path, wiring.names[leaf]) for leaf in own]
    places: dict[Path, list[str]] = {}
    for name in names:
        places.setdefault(name[len(prefix) : -1], []).append(name[-1])
    return ", ".join(spell((*place, ", ".join(last))) for place, last in places.items()) or "no parameter"
