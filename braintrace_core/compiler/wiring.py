"""Wiring: where the parameters of a compiled step act, what stands before and behind, and so how each of them learns.

The passes have decided everything; this only reads their relations and records, and follows the jaxpr from operator to
operator to say what is connected to what. The report and the drawing are two views of it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import brainstate
import jax

from .._compat import Literal, Var
from ..ops import is_boundary, is_etp
from .analysis import operator_result
from .control_flow import CONTROL_FLOW
from .diagnostics import CompilationRecord, DiagnosticKind, Path
from .module_info import ModuleInfo, is_differentiable
from .relations import HiddenParamOpRelation

if TYPE_CHECKING:
    from .graph import ETraceGraph

__all__ = ["Leaf", "Learning", "Node", "ParameterUse", "Wiring", "read_wiring"]


class Learning(enum.Enum):
    """How the gradient of a parameter is formed."""

    ONLINE = "online"
    WINDOW = "within the window only"
    PRESENT = "present output only"
    NOTHING = "not at all"


@dataclass(frozen=True, order=True)
class Leaf:
    """One array of a parameter: the parameter's path and the place among the leaves of its value."""

    path: Path
    index: int


@dataclass(frozen=True, order=True)
class Node:
    """An end of a connection: ``kind`` is input, before (a group's old states), after (its new ones), use or output."""

    kind: str
    index: int


@dataclass(frozen=True, eq=False)
class ParameterUse:
    """One place where parameters act.

    Attributes:
      operator: the name of the operator; of the control flow that hides it; empty for ordinary operations.
      leaves: the operator's key names -> the parameter leaves behind that operand.
      reads, feeds: what is connected to it without another operator between.
      learning: what credit the parameters get for this use.
      mixes: whether it is an operator at which traces are cut, since it mixes units.
      relation: its relation, if there is one.
      record: the compiler's reason, if there is none.
    """

    operator: str
    leaves: Mapping[str, tuple[Leaf, ...]]
    reads: tuple[Node, ...]
    feeds: tuple[Node, ...]
    learning: Learning
    mixes: bool = False
    relation: HiddenParamOpRelation | None = None
    record: CompilationRecord | None = None

    @property
    def all_leaves(self) -> tuple[Leaf, ...]:
        """The leaves of all operands, each once."""
        return tuple(dict.fromkeys(leaf for leaves in self.leaves.values() for leaf in leaves))

    @property
    def paths(self) -> tuple[Path, ...]:
        """The parameters behind all operands, each once."""
        return tuple(dict.fromkeys(leaf.path for leaf in self.all_leaves))

    @property
    def reason(self) -> str:
        """Why the parameters do not learn online here, and the remedy; empty if they do."""
        if self.record is not None:
            return self.record.message
        return "" if self.relation is not None else _WITHOUT_RECORD[self.learning]


@dataclass(frozen=True, eq=False)
class Wiring:
    """All uses of parameters in a step, and the connections between inputs, uses, hidden groups and outputs.

    Attributes:
      uses: where parameters act, in the order of the equations.
      leaves: every array of every parameter, with its shape and dtype.
      names: the name of each leaf inside its parameter's value; empty if the value is an array.
      group_reads: for each hidden group, what feeds it without an operator between.
      output_reads: the same for each output.
      group_order: the groups in the order in which the step computes them.
    """

    uses: tuple[ParameterUse, ...]
    leaves: Mapping[Leaf, Any]
    names: Mapping[Leaf, str]
    group_reads: tuple[tuple[Node, ...], ...]
    output_reads: tuple[tuple[Node, ...], ...]
    group_order: tuple[int, ...]

    def uses_of(self, leaf: Leaf) -> list[ParameterUse]:
        """Where a leaf acts."""
        return self._uses_by_leaf.get(leaf, [])

    def learning(self, leaf: Leaf) -> Learning:
        """How a leaf learns: the best of its uses, online before window before present output."""
        found = {use.learning for use in self.uses_of(leaf)}
        return next((kind for kind in Learning if kind in found), Learning.NOTHING)

    def recurrent_uses(self, group: int) -> list[ParameterUse]:
        """The uses through which the old states of a group act on its new ones."""
        behind = self._reached(Node("before", group), forward=True)
        ahead = self._reached(Node("after", group), forward=False)
        return [use for k, use in enumerate(self.uses) if Node("use", k) in behind & ahead]

    def groups_behind(self, group: int) -> list[int]:
        """The other groups that the new states of a group act on."""
        found = self._reached(Node("after", group), forward=True)
        return [g for g in self.group_order if g != group and Node("after", g) in found]

    @cached_property
    def _uses_by_leaf(self) -> dict[Leaf, list[ParameterUse]]:
        found: dict[Leaf, list[ParameterUse]] = {}
        for use in self.uses:
            for leaf in use.all_leaves:
                found.setdefault(leaf, []).append(use)
        return found

    @cached_property
    def _links(self) -> tuple[dict[Node, list[Node]], dict[Node, list[Node]]]:
        """What each node feeds, and what it reads."""
        forward: dict[Node, list[Node]] = {}
        backward: dict[Node, list[Node]] = {}
        ends = [(Node("use", k), use.reads) for k, use in enumerate(self.uses)]
        ends += [(Node("after", g), sources) for g, sources in enumerate(self.group_reads)]
        for end, sources in ends:
            for source in sources:
                forward.setdefault(source, []).append(end)
                backward.setdefault(end, []).append(source)
        return forward, backward

    def _reached(self, start: Node, *, forward: bool) -> set[Node]:
        links = self._links[0 if forward else 1]
        found, todo = {start}, [start]
        while todo:
            new = [node for node in links.get(todo.pop(), ()) if node not in found]
            found.update(new)
            todo += new
        return found


_WITHOUT_RECORD = {
    Learning.WINDOW: "It acts on hidden states through ordinary operations, which no trace follows. Compile with "
    "`lift=True`, or use an operator.",
    Learning.PRESENT: "It reaches no hidden state: it acts on the present output only, and the gradient within the "
    "window is its whole gradient.",
    Learning.NOTHING: "Nothing that leaves the step depends on it, so it gets no gradient.",
}
_EXCLUSIONS = frozenset(
    {
        DiagnosticKind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT,
        DiagnosticKind.RELATION_EXCLUDED_SHAPE_MISMATCH,
        DiagnosticKind.RELATION_EXCLUDED_NO_PARAMSTATE,
        DiagnosticKind.RELATION_EXCLUDED_NON_TEMPORAL,
    }
)
_UNSEEN = frozenset({DiagnosticKind.PRIMITIVE_INSIDE_CONTROL_FLOW, DiagnosticKind.PARAMETER_WITHOUT_OPERATOR})


def read_wiring(graph: ETraceGraph) -> Wiring:
    """The wiring of a compiled graph."""
    return _Reader(graph).wiring()


class _Reader:
    """Follows, through the jaxpr, the set of nodes that each variable comes from; sets are bits of integers."""

    def __init__(self, graph: ETraceGraph):
        self.graph = graph
        self.minfo = graph.module_info
        self.nodes: list[Node | Leaf] = []
        self.bit_of: dict[Node | Leaf, int] = {}
        self.behind: dict[Var, int] = {}
        self.operators: list[tuple[Any, dict[str, int], int]] = []  # equation, leaves behind each key, what it reads
        self.group_reads = [0] * len(graph.hidden_groups)
        self.group_order: dict[int, None] = {}
        self.avals, self.names = _parameter_leaves(self.minfo)
        about_operators = [r for r in graph.diagnostics if r.kind in _EXCLUSIONS and "y_var" in r.context]
        self.record_about = {r.context["y_var"]: r for r in about_operators}
        self.record_of = {p: r for r in graph.diagnostics if r.kind in _UNSEEN for p in _weight_paths(r)}
        self.relation_of = {relation.y_var: relation for relation in graph.hidden_param_op_relations}
        self.follow()

    def bit(self, node: Node | Leaf) -> int:
        if node not in self.bit_of:
            self.bit_of[node] = 1 << len(self.nodes)
            self.nodes.append(node)
        return self.bit_of[node]

    def members(self, bits: int) -> Iterator[Node | Leaf]:
        while bits:
            lowest = bits & -bits
            yield self.nodes[lowest.bit_length() - 1]
            bits ^= lowest

    def found(self, bits: int) -> tuple[Node, ...]:
        return tuple(sorted(node for node in self.members(bits) if isinstance(node, Node)))

    def loose(self, bits: int) -> list[Leaf]:
        return [node for node in self.members(bits) if isinstance(node, Leaf)]

    def follow(self) -> None:
        for i, var in enumerate(self.minfo.input_invars):
            self.behind[var] = self.bit(Node("input", i))
        for path, variables in self.minfo.weight_path_to_invars.items():
            self.behind.update((var, self.bit(Leaf(path, i))) for i, var in enumerate(variables))
        group_of: dict[Var, int] = {}
        for group in self.graph.hidden_groups:
            self.behind.update((var, self.bit(Node("before", group.index))) for var in group.hidden_invars)
            group_of.update((var, group.index) for var in group.hidden_outvars)
        for eqn in self.minfo.jaxpr.eqns:
            bits = self.union(eqn.invars)
            if is_etp(eqn.primitive):
                bits = self.operator(eqn)
            elif eqn.primitive.name in CONTROL_FLOW and self.found(bits) and self.loose(bits):
                bits = self.closed_control_flow(eqn, bits)
            for var in eqn.outvars:
                self.behind[var] = bits
                if var in group_of:
                    index = group_of[var]
                    new = self.bit(Node("after", index))
                    self.group_reads[index] |= bits & ~new
                    self.group_order[index] = None
                    self.behind[var] = new

    def union(self, atoms: Any) -> int:
        bits = 0
        for atom in atoms:
            if not isinstance(atom, Literal):
                bits |= self.behind.get(atom, 0)
        return bits

    def operator(self, eqn: Any) -> int:
        trainable = eqn.primitive.trainable_operands(eqn.params)
        keys = {}
        read = self.union(v for i, v in enumerate(eqn.invars) if i not in trainable.values())
        for key, index in trainable.items():
            bits = self.union([eqn.invars[index]])
            made_of_data = self.found(bits)
            keys[key] = 0 if made_of_data else bits
            read |= bits if made_of_data else 0
        self.operators.append((eqn, keys, read))
        return self.bit(Node("use", len(self.operators) - 1))

    def closed_control_flow(self, eqn: Any, bits: int) -> int:
        leaves = sum(map(self.bit, self.loose(bits)))
        self.operators.append((eqn, {"": leaves}, bits & ~leaves))
        return self.bit(Node("use", len(self.operators) - 1))

    def wiring(self) -> Wiring:
        outputs = [self.union([v]) for v in self.minfo.jaxpr.outvars[: self.minfo.num_var_out]]
        ends = {Node("after", g): bits for g, bits in enumerate(self.group_reads)}
        ends |= {Node("output", i): bits for i, bits in enumerate(outputs)}
        ends |= {Node("use", k): read for k, (_, _, read) in enumerate(self.operators)}
        plain = self.ordinary_uses(ends)
        self.feeds: dict[Node, list[Node]] = {}
        for end, bits in ends.items():
            for source in self.found(bits):
                self.feeds.setdefault(source, []).append(end)
        uses = [self.use(k, ends) for k in range(len(self.operators))]
        for k, leaves in enumerate(plain, start=len(uses)):
            ahead = tuple(sorted(self.feeds[Node("use", k)]))
            learning = self.reach(ahead)
            record = self.record_on_path(leaves) if learning is Learning.WINDOW else None
            uses.append(ParameterUse("", {"": leaves}, (), ahead, learning, record=record))
        return Wiring(
            tuple(uses),
            self.avals,
            self.names,
            tuple(self.found(ends[Node("after", g)]) for g in range(len(self.group_reads))),
            tuple(self.found(ends[Node("output", i)]) for i in range(len(outputs))),
            tuple(self.group_order),
        )

    def ordinary_uses(self, ends: dict[Node, int]) -> list[tuple[Leaf, ...]]:
        """The leaves that act through ordinary operations, a use for each parameter; ``ends`` will show it."""
        loose = {leaf: None for bits in ends.values() for leaf in self.loose(bits) if self.trains(leaf)}
        by_path: dict[Path, list[Leaf]] = {}
        for leaf in sorted(loose):
            by_path.setdefault(leaf.path, []).append(leaf)
        for k, leaves in enumerate(by_path.values(), start=len(self.operators)):
            use, behind = self.bit(Node("use", k)), sum(map(self.bit, leaves))
            ends.update((end, bits | use) for end, bits in ends.items() if bits & behind)
        return list(map(tuple, by_path.values()))

    def use(self, k: int, ends: Mapping[Node, int]) -> ParameterUse:
        """The use that an operator, or control flow, is."""
        eqn, keys, _ = self.operators[k]
        leaves = {key: tuple(filter(self.trains, self.loose(bits))) for key, bits in keys.items()}
        leaves = {key: found for key, found in leaves.items() if found}
        ahead = tuple(sorted(self.feeds.get(Node("use", k), ())))
        relation, record = None, None
        if is_etp(eqn.primitive):
            y = operator_result(eqn)
            relation, record = self.relation_of.get(y), self.record_about.get(y)
        else:
            record = self.record_on_path([leaf for found in leaves.values() for leaf in found])
        learning = self.reach(ahead)
        if relation is not None:
            learning = Learning.ONLINE
        elif record is not None and record.kind is DiagnosticKind.RELATION_EXCLUDED_NON_TEMPORAL:
            # What it does to hidden states, if anything, has no derivative.
            learning = self.reach(ahead, through_groups=False)
        return ParameterUse(
            eqn.primitive.name,
            leaves,
            self.found(ends[Node("use", k)]),
            ahead,
            learning,
            is_etp(eqn.primitive) and is_boundary(eqn.primitive),
            relation,
            None if relation else record,
        )

    def trains(self, leaf: Leaf) -> bool:
        return is_differentiable(self.avals[leaf])

    def record_on_path(self, leaves: Sequence[Leaf]) -> CompilationRecord | None:
        """The record that says why these parameters act otherwise than through an operator."""
        return next((self.record_of[leaf.path] for leaf in leaves if leaf.path in self.record_of), None)

    def reach(self, ahead: Sequence[Node], through_groups: bool = True) -> Learning:
        """How a value learns that feeds these nodes and has no trace."""
        found, todo = set(ahead), list(ahead)
        while todo:
            node = todo.pop()
            if node.kind == "after" and not through_groups:
                continue
            new = [n for n in self.feeds.get(node, ()) if n not in found]
            found.update(new)
            todo += new
        if through_groups and any(node.kind == "after" for node in found):
            return Learning.WINDOW
        return Learning.PRESENT if any(node.kind == "output" for node in found) else Learning.NOTHING


def _parameter_leaves(minfo: ModuleInfo) -> tuple[dict[Leaf, Any], dict[Leaf, str]]:
    """The arrays of all parameters of the model, touched by the step or not, and their names inside the value."""
    avals: dict[Leaf, Any] = {}
    names: dict[Leaf, str] = {}
    for path, state in minfo.retrieved_model_states.items():
        if isinstance(state, brainstate.ParamState):
            for i, (keys, value) in enumerate(jax.tree_util.tree_leaves_with_path(state.value)):
                leaf = Leaf(tuple(map(str, path)), i)
                avals[leaf] = jax.typeof(value)
                names[leaf] = jax.tree_util.keystr(keys, simple=True, separator="/")
    return avals, names


def _weight_paths(record: CompilationRecord) -> tuple[Path, ...]:
    first = () if record.weight_path is None else (record.weight_path,)
    return record.context.get("weight_paths", first)
