"""Draw: a compiled graph as a picture, in SVG, from inputs through operators and hidden groups to outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from xml.sax.saxutils import quoteattr

from . import svg
from .diagnostics import DiagnosticKind, Path, spell
from .layout import (
    CHANNEL,
    COLUMN_GAP,
    MARGIN,
    MAX_STATES,
    STATE_LINE,
    Bundle,
    Layout,
    Wire,
    common_prefix,
    home,
    lay_out,
)
from .report import approximations
from .svg import Box
from .wiring import Leaf, Learning, Node, ParameterUse, Wiring, read_wiring

if TYPE_CHECKING:
    from .graph import ETraceGraph

__all__ = ["render_svg"]

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_INK, _SOFT, _FAINT = "#1e293b", "#64748b", "#94a3b8"
_DATA, _MEMORY = "#a3b1c2", "#818cf8"
_COLOURS = {  # line, fill of a box, dashes
    Learning.ONLINE: ("#16a34a", "#f0fdf4", ""),
    Learning.WINDOW: ("#d97706", "#fffbeb", "6 4"),
    Learning.PRESENT: ("#6b7280", "#f3f4f6", ""),
    Learning.NOTHING: ("#dc2626", "#fef2f2", "2 3"),
}
_HEADS = {kind.name.lower(): colour for kind, (colour, _, _) in _COLOURS.items()} | {"data": _DATA, "memory": _MEMORY}
_LEGEND = {
    Learning.ONLINE: "learns online",
    Learning.WINDOW: "learns within the window only",
    Learning.PRESENT: "acts on the present output only",
    Learning.NOTHING: "does not learn",
}


def render_svg(graph: ETraceGraph) -> str:
    """The drawing of a graph; see :meth:`ETraceGraph.draw`."""
    return _Drawing(graph).render()


class _Drawing:
    def __init__(self, graph: ETraceGraph):
        self.graph = graph
        self.wiring: Wiring = read_wiring(graph)
        self.layout: Layout = lay_out(graph, self.wiring, [_operator(use) for use in self.wiring.uses])

    def render(self) -> str:
        unused, y = self.unused(self.layout.height + 4)
        legend, width = self.legend(y + 6)
        width, height = max(self.layout.width, width), y + 42
        size = f'width="{svg.number(width)}" height="{svg.number(height)}"'
        view = f'viewBox="0 0 {svg.number(width)} {svg.number(height)}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} font-family={quoteattr(_FONT)} role="img">',
            "<title>How the parameters of a model act on its hidden states</title>",
            svg.arrow_heads(_HEADS),
            f'<rect {size} fill="#ffffff"/>',
            *self.header(),
            *self.bands(),
            *map(self.wire, self.layout.wires),
            *self.edges(),
            *self.boxes(),
            *unused,
            *legend,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def header(self) -> Iterator[str]:
        counts = [
            _count(len(self.graph.hidden_groups), "hidden group"),
            _count(len(self.graph.hidden_param_op_relations), "relation"),
            _count(len({leaf.path for leaf in self.wiring.leaves}), "parameter"),
        ]
        yield svg.text(MARGIN, 31, "One step", 16, _INK, weight=600)
        yield svg.text(MARGIN, 49, " · ".join(counts), 12, _SOFT)

    def bands(self) -> Iterator[str]:
        for b, band in enumerate(self.layout.bands, start=1):
            box = Box(self.layout.left, band.y, self.layout.right - self.layout.left, band.height)
            yield svg.rectangle(box, "#f8fafc", "#e2e8f0", radius=12)
            name = "To the output" if band.group is None else f"Layer {b}"
            where = svg.shorten(spell(band.prefix), 300, 12) if band.prefix else ""
            yield svg.text(self.layout.title_x, box.y + 21, name, 12, _SOFT, weight=600, more=where, more_colour=_FAINT)

    # Lines

    def wire(self, wire: Wire) -> str:
        """From the source to the trunk, along the trunk, and by a stub to each reader."""
        layout, x = self.layout, wire.x
        old = wire.source.kind == "before"
        colour, head, dashes = (_MEMORY, "memory", "") if old else (_DATA, "data", "")
        title = "\n".join(map(self.source_name, wire.sources))
        if wire.source.kind == "use":
            learning, why = self.edge_class(wire.source, wire.readers[0])
            (colour, _, dashes), head = _COLOURS[learning], learning.name.lower()
            title = f"{title}\n{why}"
        box = layout.boxes[home(wire.source)]
        level = box.middle if wire.source.kind == "input" else wire.level
        turn = max(layout.boxes[home(n)].right for n in wire.sources) + 9
        if wire.source.kind == "input":
            start = [(box.right, level), (x, level)]
        elif wire.source.kind == "use":
            height = self.departure(wire.source, "wire")
            start = [(box.right, height), (turn, height), (turn, level), (x, level)]
        else:
            leave = box.x + box.width * (0.3 if old else 0.7)
            start = [(leave, box.bottom), (leave, level), (x, level)]
        ends = sorted((layout.rows.get((wire.source, n), layout.arrivals[wire.source, n]), n) for n in wire.readers)
        top, bottom = ends[0][0], ends[-1][0]
        inside = top < level < bottom
        parts = [svg.line(start, colour, 1.4, dashes=dashes), svg.dot(x, level, colour)] if inside else []
        for source in wire.sources[1:]:
            height = self.departure(source, "wire")
            parts.append(svg.line([(layout.boxes[source].right, height), (turn, height)], colour, 1.4, dashes=dashes))
            parts.append(svg.dot(turn, height, colour))
        for y, reader in ends:
            stop, tail = layout.boxes[reader].x, ""
            if reader.kind != "use":  # swing from the row of the wire to the box
                arrive = (stop, layout.arrivals[wire.source, reader])
                stop -= CHANNEL - 12 if reader.kind == "after" else 48
                tail = svg.curve((stop, y), arrive)
            if y in (top, bottom) and inside:
                points = [(x, level), (x, y), (stop, y)]
            elif y == (bottom if level <= top else top):
                points = [*start, (x, y), (stop, y)]
            else:
                points = [(x, y), (stop, y)]
                parts.append(svg.dot(x, y, colour))
            parts.append(svg.line(points, colour, 1.4, dashes=dashes, head=head, tail=tail))
        return svg.titled(title, "".join(parts))

    def source_name(self, node: Node) -> str:
        if node.kind == "use":
            return f"result of {', '.join(map(spell, self.wiring.uses[node.index].paths))}"
        if node.kind == "input":
            return f"input {node.index}"
        states = ", ".join(map(spell, self.graph.hidden_groups[node.index].hidden_paths))
        return f"{states}, after {'the step before' if node.kind == 'before' else 'this step'}"

    def edges(self) -> Iterator[str]:
        for bundle in self.layout.bundles:
            yield from self.bundle(bundle)
        wired = {(source, reader) for wire in self.layout.wires for source in wire.sources for reader in wire.readers}
        for (source, target), y in sorted(self.layout.arrivals.items()):
            if (source, target) in wired or target.kind == "use":
                continue
            begin, end = self.layout.boxes[home(source)], self.layout.boxes[target]
            leave = begin.middle
            if source.kind == "use":
                leave = self.departure(source, "end")
                learning, why = self.edge_class(source, target)
                colour, _, dashes = _COLOURS[learning]
                width, head = 2.0, learning.name.lower()
                room = CHANNEL - 6 if target.kind == "after" else end.x - self.layout.right + 6
                bend = (max(end.x - room, begin.right), leave)
            else:  # the states of a group are an output
                why, dashes, width, bend = self.source_name(source), "", 1.6, (begin.right, leave)
                colour, head = (_MEMORY, "memory") if source.kind == "before" else (_DATA, "data")
            points = [(begin.right, leave), bend]
            tail = svg.curve(bend, (end.x, y))
            yield svg.titled(why, svg.line(points, colour, width, dashes=dashes, head=head, tail=tail))

    def bundle(self, bundle: Bundle) -> Iterator[str]:
        """Lines from operators to operators: each source to the common trunk, from there to each target."""
        boxes, arrivals = self.layout.boxes, self.layout.arrivals
        classes = [self.edge_class(source, bundle.targets[0]) for source in bundle.sources]
        learning = classes[0][0]
        colour, _, dashes = _COLOURS[learning]
        head = learning.name.lower()
        if len(bundle.sources) == len(bundle.targets) == 1:
            source, target = boxes[bundle.sources[0]], boxes[bundle.targets[0]]
            leave = self.departure(bundle.sources[0], "bundle")
            bend = (max(target.x - COLUMN_GAP, source.right), leave)
            end = (target.x, arrivals[bundle.sources[0], bundle.targets[0]])
            yield svg.titled(
                classes[0][1],
                svg.line([(source.right, leave), bend], colour, 2, tail=svg.curve(bend, end), dashes=dashes, head=head),
            )
            return
        x = bundle.x
        starts = [(boxes[n].right, self.departure(n, "bundle")) for n in bundle.sources]
        ends = [(boxes[n].x, arrivals[bundle.sources[0], n]) for n in bundle.targets]
        low, high = min(y for _, y in starts + ends), max(y for _, y in starts + ends)
        middle = (max(y for _, y in starts) + min(y for _, y in ends)) / 2
        for (right, y), (_, why) in zip(starts, classes, strict=True):
            points = [(right, y), (x, y), (x, middle)] if y in (low, high) else [(right, y), (x, y)]
            yield svg.titled(
                why, svg.line(points, colour, 2, dashes=dashes) + ("" if y in (low, high) else svg.dot(x, y, colour))
            )
        reasons = "\n".join(dict.fromkeys(why for _, why in classes))
        for left, y in ends:
            points = [(x, middle), (x, y), (left, y)] if y in (low, high) else [(x, y), (left, y)]
            joint = "" if y in (low, high) else svg.dot(x, y, colour)
            yield svg.titled(reasons, joint + svg.line(points, colour, 2, dashes=dashes, head=head))

    def departure(self, source: Node, by: str) -> float:
        """The height at which lines to groups and outputs ("end"), a wire or a bundle leave a use."""
        there = {
            "end": any(n.kind != "use" for n in self.wiring.uses[source.index].feeds),
            "wire": any(source in wire.sources for wire in self.layout.wires),
            "bundle": any(source in bundle.sources for bundle in self.layout.bundles),
        }
        kinds = [kind for kind, yes in there.items() if yes]
        return self.layout.boxes[source].slots(len(kinds), 8)[kinds.index(by)]

    def edge_class(self, source: Node, target: Node) -> tuple[Learning, str]:
        """How credit comes back along the line from a use, and why."""
        use = self.wiring.uses[source.index]
        if target.kind == "output":
            return Learning.PRESENT, "acts on the present output"
        if use.relation is None:
            return use.learning, use.reason
        if target.kind == "after" and any(g.index == target.index for g in use.relation.hidden_groups):
            states = ", ".join(map(spell, use.relation.connected_hidden_paths))
            classes = sorted({str(c).replace("_", " ") for c in use.relation.path_classification.values()})
            return Learning.ONLINE, f"a trace carries the credit of {states} (paths: {', '.join(classes)})"
        kinds = (DiagnosticKind.RELATION_PARTIAL_PATH, DiagnosticKind.RELATION_EXCLUDED_SHAPE_MISMATCH)
        found = [r.message for kind in kinds for r in self.graph.explain(weight_path=use.relation.path, kind=kind)]
        return Learning.WINDOW, found[0] if found else "no trace follows this path; the window does"

    # Boxes

    def boxes(self) -> Iterator[str]:
        minfo = self.graph.module_info
        for node, box in sorted(self.layout.boxes.items()):
            if node.kind == "use":
                yield self.use_box(node, box)
            elif node.kind == "after":
                yield self.group_box(node, box)
            else:
                variables = minfo.input_invars if node.kind == "input" else minfo.jaxpr.outvars[: minfo.num_var_out]
                name = f"{node.kind} {node.index}" if len(variables) > 1 else node.kind
                yield self.end_box(box, name, str(tuple(variables[node.index].aval.shape)))

    def use_box(self, node: Node, box: Box) -> str:
        use = self.wiring.uses[node.index]
        stroke, fill, dashes = _COLOURS[use.learning]
        operator = _operator(use)
        label = svg.shorten(self.layout.labels[node.index], box.width - svg.text_width(operator, 10) - 32, 12)
        leaves = [f"{self.leaf_name(leaf)} {tuple(self.wiring.leaves[leaf].shape)}" for leaf in use.all_leaves]
        return svg.titled(
            "\n".join(filter(None, [*leaves, use.operator, _LEGEND[use.learning], use.reason])),
            svg.rectangle(box, fill, stroke, radius=7, dashes=dashes)
            + svg.text(box.x + 11, box.middle + 4, label, 12, _INK)
            + svg.text(box.right - 10, box.middle + 3.5, operator, 10, _SOFT, anchor="end"),
        )

    def group_box(self, node: Node, box: Box) -> str:
        group, plan = self.graph.hidden_groups[node.index], self.graph.factor_plan.groups[node.index].diagonals
        parts = []
        if plan.hidden_entries:
            start = (box.right - 50, box.y)
            loop = "c-3 -27 35 -27 31 -1"
            parts.append(svg.line([start], _MEMORY, 2, dashes="" if plan.exact else "5 3", head="memory", tail=loop))
        parts.append(svg.rectangle(box, "#eef2ff", "#6366f1", radius=10, width=1.6))
        names = _state_names(group.hidden_paths)
        if len(names) > MAX_STATES:
            names = [*names[: MAX_STATES - 1], f"and {len(names) - MAX_STATES + 1} more"]
        x, y = box.x + 14, box.middle - (STATE_LINE * len(names) + 36) / 2 + 13
        parts.append(svg.text(x, y, f"group {group.index}", 11, "#4f46e5", weight=600))
        for name in names:
            y += STATE_LINE
            parts.append(svg.text(x, y, svg.shorten(name, box.width - 26, 13.5), 13, _INK, weight=600))
        shape = " × ".join(map(str, group.varshape)) or "1"
        size = f"{shape} {'unit' if shape == '1' else 'units'}, {_count(group.num_state, 'state')}"
        parts.append(svg.text(x, y + 17, svg.shorten(size, box.width - 22, 11), 11, _SOFT))
        reasons = approximations(self.graph, self.wiring, group) or ["The traces of this group are exact."]
        title = [*map(spell, group.hidden_paths), *reasons, f"{_count(plan.num_passes, 'pass')} a step"]
        return svg.titled("\n".join(title), "".join(parts))

    def end_box(self, box: Box, name: str, shape: str) -> str:
        x = box.x + box.width / 2
        return (
            svg.rectangle(box, "#ffffff", "#475569", radius=10)
            + svg.text(x, box.middle - 2, name, 12, _INK, weight=600, anchor="middle")
            + svg.text(x, box.middle + 13, svg.shorten(shape, box.width - 10, 11), 11, _SOFT, anchor="middle")
        )

    def leaf_name(self, leaf: Leaf) -> str:
        return " ".join(filter(None, (spell(leaf.path), self.wiring.names[leaf])))

    # Below

    def unused(self, y: float) -> tuple[list[str], float]:
        """The parameters that nothing depends on, in rows of their own; and where they end."""
        drawn = {leaf for n in self.layout.boxes if n.kind == "use" for leaf in self.wiring.uses[n.index].all_leaves}
        idle = [leaf for leaf in self.wiring.leaves if leaf not in drawn]
        if not idle:
            return [], y
        stroke, fill, dashes = _COLOURS[Learning.NOTHING]
        parts = [svg.text(MARGIN, y + 18, "Not used", 12, _SOFT, weight=600)]
        x = start = MARGIN + 78
        for leaf in idle:
            label = svg.shorten(self.leaf_name(leaf), 220, 12)
            width = svg.text_width(label, 12) + 24
            if x > start and x + width > self.layout.width - MARGIN:
                x, y = start, y + 36
            box = Box(x, y, width, 27)
            content = svg.rectangle(box, fill, stroke, radius=7, dashes=dashes)
            content += svg.text(x + width / 2, box.middle + 4, label, 12, _INK, anchor="middle")
            parts.append(svg.titled(f"{self.leaf_name(leaf)}: {_LEGEND[Learning.NOTHING]}", content))
            x += width + 10
        return parts, y + 44

    def legend(self, y: float) -> tuple[list[str], float]:
        """What the lines mean; and how wide that is."""
        shown = {self.wiring.learning(leaf) for leaf in self.wiring.leaves}
        items = [(_LEGEND[kind], _COLOURS[kind][0], _COLOURS[kind][2], 2.0) for kind in Learning if kind in shown]
        items += [("data", _DATA, "", 1.4), ("state of the step before", _MEMORY, "", 1.4)]
        x, parts = MARGIN, []
        for name, colour, dashes, width in items:
            parts.append(svg.line([(x, y + 10), (x + 28, y + 10)], colour, width, dashes=dashes))
            parts.append(svg.text(x + 36, y + 14, name, 12, _SOFT))
            x += 36 + 1.12 * svg.text_width(name, 12) + 16
        return parts, x + MARGIN


def _operator(use: ParameterUse) -> str:
    return use.operator.removeprefix("etp_") or "ordinary"


def _state_names(paths: list[Path]) -> list[str]:
    """The states of a group without what their paths have in common, unless only numbers would be left."""
    short = [path[len(common_prefix(paths)) :] for path in paths]
    return [spell(path) for path in (paths if any(part[-1].isdigit() for part in short) else short)]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun if number == 1 else noun + ('es' if noun.endswith('s') else 's')}"
