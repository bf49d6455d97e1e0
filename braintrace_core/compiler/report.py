"""Report: a compiled graph as a table for people, ending with how every parameter of the model learns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING

from .diagnostics import DiagnosticKind, Path, spell
from .hidden_group import HiddenGroup
from .wiring import Leaf, Learning, Wiring, read_wiring

if TYPE_CHECKING:
    from .graph import ETraceGraph

__all__ = ["WIDTH", "approximations", "render_report"]

WIDTH = 110

_MEANING = {
    Learning.ONLINE: "a trace carries its credit through time",
    Learning.WINDOW: "credit ends where the window begins",
    Learning.PRESENT: "it has no memory, so the window holds its whole gradient",
    Learning.NOTHING: "it gets no gradient",
}


def render_report(graph: ETraceGraph) -> str:
    """The report of a graph, at most ``WIDTH`` columns wide.

    >>> import jax.numpy as jnp
    >>> from braintrace_core import compile_step_graph
    >>> def step(params, h, x):
    ...     h = jnp.tanh(x @ params["into"]) + params["decay"] * h
    ...     return h, h @ params["out"]
    >>> params = {"into": jnp.ones((3, 4)), "decay": jnp.ones(4), "out": jnp.ones((4, 2)), "old": jnp.ones(5)}
    >>> print(render_report(compile_step_graph(step, params, jnp.zeros(4), jnp.zeros(3))))
    Hidden groups (1) --------------------------------------------------------------------------------------------
      group  states  shape  states per unit  passes  traces
      0      carry   (4,)   1                1       exact
    <BLANKLINE>
    Relations (2) ------------------------------------------------------------------------------------------------
      parameter     operator      acts on  paths
      params/into   etp_mv        carry    all direct
      params/decay  etp_elemwise  carry    all direct
    <BLANKLINE>
    What learns how (4) ------------------------------------------------------------------------------------------
    <BLANKLINE>
      online: a trace carries its credit through time (2 parameters, 16 numbers)
        params/decay: (4,)
        params/into: (3, 4)
    <BLANKLINE>
      present output only: it has no memory, so the window holds its whole gradient (1 parameter, 8 numbers)
        params/out: (4, 2)
    <BLANKLINE>
      not at all: it gets no gradient (1 parameter, 5 numbers)
        params/old: (5,)
          Nothing that the step computes depends on it. Remove it, or use it in the step.
    """
    wiring = read_wiring(graph)
    sections = [
        *_groups(graph, wiring),
        *_relations(graph),
        *_learning(wiring),
    ]
    return "\n".join(line.rstrip() for line in sections)


def approximations(graph: ETraceGraph, wiring: Wiring, group: HiddenGroup) -> list[str]:
    """What the traces of a group leave to the window, a sentence each; none if they are exact."""
    reasons = []
    recurrent = list(
        dict.fromkeys(path for use in wiring.recurrent_uses(group.index) if use.mixes for path in use.paths)
    )
    if recurrent:
        reasons.append(
            f"Its units also act on one another through {_some(map(spell, recurrent))}; the traces keep each unit's "
            "effect on itself, the window keeps all."
        )
    members = set(group.hidden_paths)
    told = {group.index}
    for record in graph.diagnostics:
        if record.kind is DiagnosticKind.FACTOR_APPROXIMATED and not members.isdisjoint(record.hidden_paths):
            reasons.append(record.message)
        elif record.kind is DiagnosticKind.HIDDEN_COUPLING_DROPPED and record.hidden_paths[0] in members:
            reasons.append(record.message)
            told.update(graph.hid_path_to_group[path].index for path in record.hidden_paths)
    behind = [f"group {g}" for g in wiring.groups_behind(group.index) if g not in told]
    if behind:
        remember = "remembers" if len(behind) == 1 else "remember"
        reasons.append(
            f"{_some(behind, 3).capitalize()} {remember} what it did; the traces do not follow that, the window does."
        )
    return reasons


def _groups(graph: ETraceGraph, wiring: Wiring) -> list[str]:
    rows: list[Sequence[str]] = [("group", "states", "shape", "states per unit", "passes", "traces")]
    reasons: list[list[str]] = [[]]
    for plan in graph.factor_plan.groups:
        group = plan.group
        why = approximations(graph, wiring, group)
        rows.append(
            (
                str(group.index),
                _some(map(spell, group.hidden_paths), 8),
                str(group.varshape),
                str(group.num_state),
                str(plan.diagonals.num_passes),
                "approximate" if why else "exact",
            )
        )
        reasons.append(why)
    return [_title("Hidden groups", len(graph.hidden_groups)), *_table(rows, reasons)]


def _relations(graph: ETraceGraph) -> list[str]:
    rows: list[Sequence[str]] = [("parameter", "operator", "acts on", "paths")]
    notes: list[list[str]] = [[]]
    for relation in graph.hidden_param_op_relations:
        behind = dict.fromkeys(path for chain in relation.trainable_processing_chains.values() for path in chain.paths)
        classes = dict.fromkeys(str(kind).replace("_", " ") for kind in relation.path_classification.values())
        rows.append(
            (
                _some(map(spell, behind), 4),
                relation.primitive.name,
                _some(map(spell, relation.connected_hidden_paths), 4),
                " and ".join(classes),
            )
        )
        chains = {
            key: [primitive.name for primitive in chain]
            for key, chain in relation.trainable_processing_chains.items()
            if chain
        }
        notes.append([f"{key} made by {', '.join(names)}" for key, names in chains.items()])
    return ["", _title("Relations", len(graph.hidden_param_op_relations)), *_table(rows, notes)]


def _learning(wiring: Wiring) -> list[str]:
    by_parameter: dict[Path, list[Leaf]] = {}
    for leaf in wiring.leaves:
        by_parameter.setdefault(leaf.path, []).append(leaf)
    sections: dict[Learning | None, list[list[Leaf]]] = {kind: [] for kind in (*Learning, None)}
    for leaves in by_parameter.values():
        kinds = {wiring.learning(leaf) for leaf in leaves}
        sections[kinds.pop() if len(kinds) == 1 else None].append(leaves)
    lines = ["", _title("What learns how", len(by_parameter))]
    for kind, parameters in sections.items():
        if not parameters:
            continue
        elements = sum(_size(wiring, leaf) for leaves in parameters for leaf in leaves)
        count = f"{len(parameters)} parameter{'s' * (len(parameters) != 1)}, {elements:,} numbers"
        if kind is None:
            lines += ["", f"  each leaf in its own way ({count})"]
            for leaves in parameters:
                lines.append(f"    {spell(leaves[0].path)}")
                for leaf in leaves:
                    learning = wiring.learning(leaf)
                    lines.append(f"      {wiring.names[leaf]} {_shape(wiring, leaf)}: {learning.value}")
                    lines += _wrap(_notes(wiring, [leaf], learning), 8)
        else:
            lines += ["", f"  {kind.value}: {_MEANING[kind]} ({count})"]
            for leaves in parameters:
                shapes = ", ".join(f"{wiring.names[leaf]} {_shape(wiring, leaf)}".strip() for leaf in leaves)
                lines += textwrap.wrap(
                    f"{spell(leaves[0].path)}: {shapes}", WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 6
                )
                lines += _wrap(_notes(wiring, leaves, kind), 6)
    return lines


def _notes(wiring: Wiring, leaves: list[Leaf], learning: Learning) -> list[str]:
    """Why leaves that learn alike do not learn online; of leaves that do, which of their uses do not."""
    uses = list(dict.fromkeys(use for leaf in leaves for use in wiring.uses_of(leaf)))
    if not uses:
        return [_unused(wiring, leaves)]
    if learning is Learning.ONLINE:
        return [f"Another use: {use.reason}" for use in uses if use.learning is Learning.WINDOW]
    if learning is Learning.PRESENT:  # the title says it all, unless hidden states are concerned
        uses = [use for use in uses if use.record is not None and use.record.hidden_paths]
    return list(dict.fromkeys(use.reason for use in uses if use.learning is learning))


def _unused(wiring: Wiring, leaves: list[Leaf]) -> str:
    dtypes = {str(wiring.leaves[leaf].dtype) for leaf in leaves}
    if not any("float" in d or "complex" in d for d in dtypes):
        return (
            f"Its dtype {', '.join(sorted(dtypes))} has no derivative. Keep it in a state that is not a `ParamState`."
        )
    return "Nothing that the step computes depends on it. Remove it, or use it in the step."


def _size(wiring: Wiring, leaf: Leaf) -> int:
    return prod(wiring.leaves[leaf].shape)


def _shape(wiring: Wiring, leaf: Leaf) -> str:
    return str(tuple(wiring.leaves[leaf].shape))


def _title(text: str, count: int) -> str:
    title = f"{text} ({count})"
    return f"{title} {'-' * (WIDTH - len(title) - 1)}"


def _some(names: Iterable[str], limit: int = 6) -> str:
    """The names, or the first of them and how many there are besides."""
    names = list(names)
    if len(names) <= limit:
        return ", ".join(names)
    return f"{', '.join(names[: limit - 1])} and {len(names) - limit + 1} more"


def _wrap(paragraphs: Iterable[str], indent: int) -> list[str]:
    return [
        line
        for text in paragraphs
        for line in textwrap.wrap(
            text,
            WIDTH,
            initial_indent=" " * indent,
            subsequent_indent=" " * (indent + 2),
            max_lines=5,
            placeholder=" ...",
        )
    ]


def _table(rows: Sequence[Sequence[str]], notes: Sequence[Sequence[str]]) -> list[str]:
    """Rows in columns, each followed by its notes; cells that are too long for the width go over several lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = WIDTH - 2 - 2 * (len(widths) - 1)
    while sum(widths) > room:  # the widest column gives way
        widths[widths.index(max(widths))] -= 1
    lines: list[str] = []
    for row, below in zip(rows, notes, strict=True):
        cells = [_cell(text, width) for text, width in zip(row, widths, strict=True)]
        for i in range(max(map(len, cells))):
            parts = [(cell[i] if i < len(cell) else "").ljust(width) for cell, width in zip(cells, widths, strict=True)]
            lines.append("  " + "  ".join(parts))
        lines += _wrap(below, 6)
    return lines


def _cell(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]
