"""The report and the drawing: complete, true, readable, and the same every time."""

import itertools
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from functools import cache

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_core import ControlFlowPolicy, compile_etrace_graph, compile_step_graph, matmul, nn
from braintrace_core.compiler.layout import common_prefix, lay_out
from braintrace_core.compiler.report import WIDTH
from braintrace_core.compiler.svg import shorten, text_width
from braintrace_core.compiler.wiring import Leaf, Learning, Node, read_wiring
from tests.core.compiler.support import compiled, state_values
from tests.core.compiler.zoo import ZOO
from tests.core.nn.zoo import CELLS

SVG = "{http://www.w3.org/2000/svg}"


class Stack(brainstate.nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = list(layers)

    def update(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def stack(name):
    """A model of several layers."""
    key = iter(jax.random.split(jax.random.key(0), 5))
    if name == "2 GRU":
        layers = (nn.GRUCell, 3, 4), (nn.GRUCell, 4, 4), (nn.Linear, 4, 2)
    elif name == "2 LRU":
        layers = (nn.LRUCell, 3, 4), (nn.LRUCell, 3, 4)
    else:
        layers = (nn.LSTMCell, 3, 8), (nn.GRUCell, 8, 6), (nn.LRUCell, 6, 8), (nn.LSTMCell, 6, 6), (nn.Linear, 6, 2)
    return Stack(*(layer(*sizes, key=next(key)) for layer, *sizes in layers))


class AllKinds(brainstate.nn.Module):
    """One parameter whose leaves learn each in another way, and other parameters that do so too."""

    def __init__(self):
        super().__init__()
        numbers = [jnp.asarray(np.random.default_rng(i).normal(size=(4, 4))) for i in range(6)]
        gate, into, out, *others = numbers
        self.mixed = brainstate.ParamState({"gate": gate, "into": into, "out": out, "rest": jnp.ones(3)})
        self.loop, self.tied, self.dead = map(brainstate.ParamState, others)
        self.unread = brainstate.ParamState(jnp.ones(2))
        self.whole = brainstate.ParamState(jnp.arange(3))
        self.h = brainstate.HiddenState(jnp.ones(4))

    def update(self, x, count):
        mixed, tied = self.mixed.value, self.tied.value
        count = count + 0 * self.whole.value[0]
        looped = jax.lax.fori_loop(0, count, lambda _, z: jnp.tanh(z @ self.loop.value), x)
        gate = jax.nn.sigmoid(x @ mixed["gate"])
        self.h.value = 0.9 * self.h.value + (gate * x) @ mixed["into"] + looped + jnp.floor(x @ self.dead.value)
        return self.h.value @ mixed["out"] + tied @ x, jnp.sin(x @ tied)


@cache
def module_graph(name):
    """A compiled brainstate module and the values to run it on."""
    rng = np.random.default_rng(0)
    inputs = (jnp.asarray(rng.normal(size=3)),)
    if name in CELLS:
        model, inputs = CELLS[name].build(), (CELLS[name].input(),)
    elif name == "all kinds":
        model, inputs = AllKinds(), (jnp.asarray(rng.normal(size=4)), jnp.asarray(2))
    else:
        model = stack(name)
    brainstate.nn.init_all_states(model)
    graph = compile_etrace_graph(model, *inputs)
    states = [state.value for state in graph.module_info.compiled_model_states]
    hidden = [isinstance(state, brainstate.HiddenState) for state in graph.module_info.compiled_model_states]
    states = [
        v + jnp.asarray(rng.normal(size=v.shape), v.dtype) if h else v for v, h in zip(states, hidden, strict=True)
    ]
    return graph, inputs, states


MODULES = [*CELLS, "2 GRU", "2 LRU", "4 layers", "all kinds"]


def graph_and_values(name):
    if name not in ZOO:
        return module_graph(name)
    model, graph = ZOO[name], compiled(name)
    return graph, model.inputs, state_values(graph, model.params, model.carry)


over_all = pytest.mark.parametrize("name", [*MODULES, *ZOO])


def parameters(graph):
    states = graph.module_info.retrieved_model_states
    return ["/".join(path) for path, state in states.items() if isinstance(state, brainstate.ParamState)]


# The report


def classified(report):
    """Heading -> lines of the last part."""
    found, heading = {}, None
    for line in report.partition("What learns how")[2].splitlines()[1:]:
        if re.match(r"  \S", line):
            heading = line.strip().partition(":")[0].partition(" (")[0]
        elif line.strip():
            found.setdefault(heading, []).append(line)
    return found


@over_all
def test_every_parameter_appears_once(name):
    graph, *_ = graph_and_values(name)
    headings = classified(graph.report())
    names = [
        line.strip().partition(": ")[0] for lines in headings.values() for line in lines if re.match(r"    \S", line)
    ]
    assert Counter(names) == Counter(parameters(graph))
    assert set(headings) <= {*(kind.value for kind in Learning), "each leaf in its own way"}


@over_all
def test_the_report_fits_a_terminal(name):
    report = graph_and_values(name)[0].report()
    assert max(map(len, report.splitlines())) <= WIDTH == 110
    assert report.isprintable() or set(report) - {"\n"} == {c for c in report if c.isprintable()}
    assert not any(line != line.rstrip() for line in report.splitlines())


def sensitive_leaves(graph, inputs, states):
    """The leaves that new hidden states depend on, and those that outputs depend on, by differentiation."""
    minfo, rng = graph.module_info, np.random.default_rng(1)
    which = [i for i, path in enumerate(minfo.paths) if path in minfo.weight_path_to_invars]
    leaves = [Leaf(minfo.paths[i], j) for i in which for j in range(len(jax.tree.leaves(states[i])))]
    values, tree = jax.tree.flatten([states[i] for i in which])

    def run(*values):
        old = list(states)
        for i, value in zip(which, jax.tree.unflatten(tree, values), strict=True):
            old[i] = value
        outputs, new, *_ = minfo.jaxpr_call(*inputs, old_state_vals=old)
        hidden = [v for path, v in zip(minfo.paths, new, strict=True) if path in minfo.hidden_path_to_outvar]
        return hidden, jax.tree.leaves(outputs)

    def random(shape, dtype):
        part = rng.normal(size=shape) + (1j * rng.normal(size=shape) if np.issubdtype(dtype, np.complexfloating) else 0)
        return jnp.asarray(part, dtype)

    def backward(k):
        results, pull_back = jax.vjp(lambda v: run(*values[:k], v, *values[k + 1 :]), values[k])
        smooth = jax.tree.map(lambda r: jnp.issubdtype(r.dtype, jnp.inexact), results)
        zero = jax.tree.map(lambda r, s: np.zeros(r.shape, r.dtype if s else jax.dtypes.float0), results, smooth)
        some = jax.tree.map(lambda z, s: random(z.shape, z.dtype) if s else z, zero, smooth)
        return [bool(jnp.any(pull_back(weights)[0] != 0)) for weights in ((some[0], zero[1]), (zero[0], some[1]))]

    def forward(k):
        tangent = random(values[k].shape, values[k].dtype)
        _, results = jax.jvp(lambda v: run(*values[:k], v, *values[k + 1 :]), (values[k],), (tangent,))
        return [any(t.dtype != jax.dtypes.float0 and bool(jnp.any(t != 0)) for t in part) for part in results]

    hidden, outputs = set(), set()
    for k, leaf in enumerate(leaves):
        if jnp.issubdtype(jnp.asarray(values[k]).dtype, jnp.inexact):
            # Surrogate gradients are often defined backward only, a loop of unknown length has none.
            loop = any(eqn.primitive.name == "while" for eqn in minfo.jaxpr.eqns)
            on_hidden, on_outputs = forward(k) if loop else backward(k)
            hidden |= {leaf} if on_hidden else set()
            outputs |= {leaf} if on_outputs else set()
    return hidden, outputs


CHOOSES = {"chosen_and_clipped", "learnt_start", "cond_true", "cond_false", "switch"}  # by value what depends on what


@over_all
@pytest.mark.loose_promotion
def test_the_classes_are_true(name):
    graph, inputs, states = graph_and_values(name)
    if any(r.kind.name == "CUSTOM_DERIVATIVE_INLINED" for r in graph.diagnostics):
        pytest.skip("a rule of the model's own decides what its derivative is")
    wiring = read_wiring(graph)
    hidden, outputs = sensitive_leaves(graph, inputs, states)
    classes = {kind: {leaf for leaf in wiring.leaves if wiring.learning(leaf) is kind} for kind in Learning}
    acting = classes[Learning.ONLINE] | classes[Learning.WINDOW]
    assert hidden <= acting
    if name not in CHOOSES:
        assert hidden == acting
    assert classes[Learning.PRESENT] <= outputs - hidden
    assert outputs.isdisjoint(classes[Learning.NOTHING])
    related = {
        Leaf(path, i)
        for relation in graph.hidden_param_op_relations
        for chain in relation.trainable_processing_chains.values()
        for path, i in zip(chain.paths, chain.leaf_indices, strict=True)
    }
    assert related == classes[Learning.ONLINE]


def test_a_gru():
    report = module_graph("GRUCell")[0].report()
    assert "0      h       (4,)   1                1       approximate" in report
    assert "Its units also act on one another through Wz/weight, Wr/weight, Wh/weight" in report
    assert "  Wz/weight  etp_mv    h        all direct\n  Wh/weight  etp_mv    h        all direct\n" in report
    found = classified(report)
    assert found["online"] == ["    Wh/weight: bias (4,), weight (7, 4)", "    Wz/weight: bias (4,), weight (7, 4)"]
    assert " ".join("\n".join(found["within the window only"]).split()) == (
        "Wr/weight: bias (4,), weight (7, 4) 'Wr/weight' reaches h only through the operators of 'Wh/weight', which "
        "mix the units: no trace is kept and it learns within the window. Use a longer window, or `rtrl`."
    )


def test_what_is_exact():
    exact = "exact"
    assert module_graph("LRUCell")[0].report().splitlines()[2].split()[-1] == exact
    first, second = (row for row in module_graph("2 LRU")[0].report().splitlines() if re.match(r"  [01]  ", row))
    assert (first.split()[-1], second.split()[-1]) == ("approximate", exact)
    assert "Group 1 remembers what it did" in module_graph("2 LRU")[0].report()


def test_leaves_that_learn_differently_are_told_apart():
    report = module_graph("all kinds")[0].report()
    found = classified(report)
    [*lines] = [line.strip() for line in found["each leaf in its own way"] if re.match(r" {4,6}\S", line)]
    assert lines == [
        "mixed",
        "gate (4, 4): within the window only",
        "into (4, 4): online",
        "out (4, 4): present output only",
        "rest (3,): not at all",
    ]
    assert [line.strip() for line in found["present output only"]] == ["tied: (4, 4)"]
    assert "inside a `while` that stays closed" in " ".join(found["within the window only"])
    text = " ".join(" ".join(found["not at all"]).split())
    assert "whole: (3,) Its dtype int64 has no derivative" in text
    assert "unread: (2,) Nothing that the step computes depends on it." in text
    assert "dead: (4, 4)" in text


def test_a_parameter_with_two_uses_is_online_and_says_what_is_not():
    def step(params, h, x):
        reset = jax.nn.sigmoid(x @ params["w"])
        return jnp.tanh(x @ params["w"] + (reset * h) @ params["u"]), h

    graph = compile_step_graph(step, {"w": jnp.ones((4, 4)), "u": jnp.ones((4, 4))}, jnp.ones(4), jnp.ones(4))
    online = " ".join(" ".join(classified(graph.report())["online"]).split())
    assert "params/w: (4, 4) Another use: 'params/w' reaches carry only through the operators of 'params/u'" in online


def test_without_lifting():
    def step(params, h, x):
        h = matmul(x, params["marked"]) + h * params["decay"]
        return h, h @ params["out"]

    params = {"marked": jnp.ones((3, 4)), "decay": jnp.ones(4), "out": jnp.ones((4, 2))}
    graph = compile_step_graph(step, params, jnp.ones(4), jnp.ones(3), lift=False)
    found = {kind: lines[0].split(":")[0].strip() for kind, lines in classified(graph.report()).items()}
    assert found == {
        "online": "params/marked",
        "within the window only": "params/decay",
        "present output only": "params/out",
    }
    assert "lift=True" in graph.report()


def test_closed_control_flow():
    def step(params, h, x):
        h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ params["inner"]), None), h, None, length=5)
        return h + x @ params["into"], h

    params = {"inner": jnp.ones((4, 4)), "into": jnp.ones((3, 4))}
    policy = ControlFlowPolicy(scan_unroll_limit=2)
    graph = compile_step_graph(step, params, jnp.ones(4), jnp.ones(3), control_flow=policy)
    [line, *reason] = classified(graph.report())["within the window only"]
    assert line.strip() == "params/inner: (4, 4)"
    assert "scan_unroll_limit=2" in " ".join(reason)
    drawn = [title.text for title in ElementTree.fromstring(graph.draw()).iter(f"{SVG}title")]
    assert any("params/inner" in text and "scan_unroll_limit=2" in text for text in drawn)


def test_long_lists_are_cut():
    def step(params, h, x):
        for name in sorted(params):
            h = jnp.tanh(h @ params[name])
        return h + x, h

    params = {f"a_parameter_with_a_rather_long_name_{i:02}": jnp.ones((4, 4)) for i in range(12)}
    report = compile_step_graph(step, params, jnp.ones(4), jnp.ones(4)).report()
    assert max(map(len, report.splitlines())) <= WIDTH
    assert "and 7 more; the traces keep" in " ".join(report.split())


# The drawing


def rectangles(graph):
    wiring = read_wiring(graph)
    return lay_out(graph, wiring, [use.operator for use in wiring.uses])


@over_all
def test_the_drawing_is_valid_and_complete(name):
    graph, *_ = graph_and_values(name)
    root = ElementTree.fromstring(graph.draw())
    assert root.tag == f"{SVG}svg"
    titles = "\n".join(title.text for title in root.iter(f"{SVG}title"))
    for path in parameters(graph):
        assert path in titles
    for group in graph.hidden_groups:
        for path in group.hidden_paths:
            assert "/".join(path) in titles
    width, height = (float(root.get(side)) for side in ("width", "height"))
    for rect in root.iter(f"{SVG}rect"):
        x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
        assert 0 <= x <= x + float(rect.get("width")) <= width
        assert 0 <= y <= y + float(rect.get("height")) <= height


@over_all
def test_no_two_boxes_overlap(name):
    layout = rectangles(graph_and_values(name)[0])
    for a, b in itertools.combinations(layout.boxes.values(), 2):
        assert a.right <= b.x or b.right <= a.x or a.bottom <= b.y or b.bottom <= a.y


@over_all
def test_no_wire_runs_through_a_box(name):
    layout = rectangles(graph_and_values(name)[0])
    uses = {node: box for node, box in layout.boxes.items() if node.kind == "use"}
    for wire in layout.wires:
        for reader in wire.readers:
            y = layout.rows.get((wire.source, reader), layout.arrivals[wire.source, reader])
            end = layout.boxes[reader].x
            crossed = [n for n, box in uses.items() if n != reader and box.y < y < box.bottom and wire.x < box.x < end]
            assert not crossed
        others = [w for w in layout.wires if w is not wire and w.x == wire.x]
        assert not any(low < high for low, high in (overlap(layout, wire, other) for other in others))


def overlap(layout, one, other):
    """Where two trunks are at the same height; empty if the first number is not less than the second."""
    (a, b), (c, d) = extent(layout, one), extent(layout, other)
    return max(a, c), min(b, d)


def extent(layout, wire):
    ends = [layout.rows.get((wire.source, n), layout.arrivals[wire.source, n]) for n in wire.readers]
    level = layout.boxes[wire.source].middle if wire.source.kind == "input" else wire.level
    return min(level, *ends), max(level, *ends)


@over_all
def test_labels_fit_their_boxes(name):
    graph, *_ = graph_and_values(name)
    root = ElementTree.fromstring(graph.draw())
    boxes = [
        (float(r.get("x", 0)), float(r.get("y", 0)), float(r.get("width")), float(r.get("height")))
        for r in root.iter(f"{SVG}rect")
    ]
    for text in root.iter(f"{SVG}text"):
        x, y, size = (float(text.get(k)) for k in ("x", "y", "font-size"))
        wide = text_width("".join(text.itertext()), size)
        left = {"start": x, "middle": x - wide / 2, "end": x - wide}[text.get("text-anchor", "start")]
        inside = [b for b in boxes if b[0] <= x <= b[0] + b[2] and b[1] <= y <= b[1] + b[3]]
        smallest = min(inside, key=lambda b: b[2] * b[3])
        assert smallest[0] <= left
        assert left + wide <= smallest[0] + smallest[2]


def test_colours_and_reasons_of_a_gru():
    root = ElementTree.fromstring(module_graph("GRUCell")[0].draw())
    lines = {}
    for group in root.iter(f"{SVG}g"):
        for path in group.findall(f"{SVG}path"):
            lines.setdefault(path.get("stroke"), []).append((group.find(f"{SVG}title").text, path))
    green, amber = lines["#16a34a"], lines["#d97706"]
    assert [path.get("stroke-dasharray") for _, path in green] == [None, None]
    [(reason, path)] = amber
    assert path.get("stroke-dasharray") == "6 4"
    assert reason.startswith("'Wr/weight' reaches h only through")
    loops = [path for title, path in lines["#818cf8"] if title.startswith("h\n")]
    assert len(loops) == 1


def test_a_vanilla_network_has_no_loop_and_an_approximated_group_a_dashed_one():
    def loops(graph):
        root = ElementTree.fromstring(graph.draw())
        groups = [g for g in root.iter(f"{SVG}g") if "a step" in g.find(f"{SVG}title").text]
        return [path.get("stroke-dasharray") for g in groups for path in g.findall(f"{SVG}path")]

    def normed(params, h, x):
        h = 0.5 * h + x @ params
        return h - h.mean(), h

    assert loops(module_graph("ValinaRNNCell")[0]) == []
    assert loops(module_graph("LRUCell")[0]) == [None]
    assert loops(compile_step_graph(normed, jnp.ones((3, 4)), jnp.ones(4), jnp.ones(3))) == ["5 3"]


def test_the_readout_is_grey():
    wiring = read_wiring(module_graph("2 GRU")[0])
    readout = next(use for use in wiring.uses if use.paths == (("layers", "2", "weight"),))
    assert readout.learning is Learning.PRESENT
    assert readout.feeds == (Node("output", 0),)
    root = ElementTree.fromstring(module_graph("2 GRU")[0].draw())
    assert any(path.get("stroke") == "#6b7280" for path in root.iter(f"{SVG}path"))


@pytest.mark.parametrize("name", ["GRUCell", "4 layers", "all kinds"])
def test_the_same_model_gives_the_same_bytes(name):
    first = module_graph(name)[0]
    module_graph.cache_clear()
    second = module_graph(name)[0]
    assert first is not second
    assert first.draw() == second.draw()
    assert first.report() == second.report()


def test_the_drawing_is_written(tmp_path):
    graph = module_graph("GRUCell")[0]
    text = graph.draw(tmp_path / "model.svg")
    assert (tmp_path / "model.svg").read_text(encoding="utf-8") == text
    assert graph.draw(str(tmp_path / "again.svg")) == text


def test_names_are_escaped():
    def step(params, h, x):
        return h + x @ params["<a & 'b'>"], h

    graph = compile_step_graph(step, {"<a & 'b'>": jnp.ones((3, 4))}, jnp.ones(4), jnp.ones(3))
    titles = [title.text for title in ElementTree.fromstring(graph.draw()).iter(f"{SVG}title")]
    assert any("params/<a & 'b'>" in title for title in titles)


def test_long_names_lose_their_middle():
    name = "encoder/layers/0/attention/query/kernel"
    for room in (20, 60, 120, 200):
        short = shorten(name, room, 12)
        assert text_width(short, 12) <= room
        assert short[0] == name[0] or short == "…"
        assert short[-1] == name[-1] or short == "…"
    assert shorten(name, 1000, 12) == name


def test_common_prefix():
    assert common_prefix([]) == ()
    assert common_prefix([("a", "b")]) == ("a",)
    assert common_prefix([("a", "b", "c"), ("a", "b")]) == ("a",)
    assert common_prefix([("a",), ("b",)]) == ()
