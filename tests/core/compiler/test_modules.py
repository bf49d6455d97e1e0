"""brainstate modules: our cells, brainstate's own, stacks of them, group states."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_core import DiagnosticKind, compile_etrace_graph, nn
from tests.core.compiler.oracle import at_home, diagonal, factors_from_jaxpr, homes
from tests.core.compiler.support import all_values, gradient_from_factors
from tests.core.compiler.test_factors import close, loss_of
from tests.core.nn.zoo import CELLS

KINDS = DiagnosticKind
BOTH = ("weight", "bias")

# Cell -> hidden groups, parameters with a relation, parameters without, passes.
FOUND = {
    "ValinaRNNCell": (["h"], ["W"], [], 1),
    "GRUCell": (["h"], ["Wz", "Wh"], ["Wr"], 1),
    "MGUCell": (["h"], ["Wf", "Wh"], [], 1),
    "CFNCell": (["h"], ["Wf", "Wi", "Wh"], [], 1),
    "LSTMCell": (["c h"], ["Wi", "Wg", "Wf", "Wo"], [], 2),
    "URLSTMCell": (["c h"], ["bias", "Wf", "Wr", "Wu", "Wo"], [], 2),
    "MinimalRNNCell": (["h"], ["phi", "W_u"], [], 1),
    "MiniGRU": (["h"], ["W_z", "W_x"], [], 1),
    "MiniGRU recurrent": (["h"], ["W_z", "W_x"], [], 1),
    "MiniLSTM": (["h"], ["W_f", "W_i", "W_x"], [], 1),
    "MiniLSTM recurrent": (["h"], ["W_f", "W_i", "W_x"], [], 1),
    "LRUCell": (["h_re h_im"], ["nu_log", "theta_log", "gamma_log", "B_re", "B_im"], ["C_re", "C_im", "D"], 2),
    "LeakyRateReadout": (["r"], ["W"], [], 1),
    "LIF delta": (["V"], ["W"], [], 1),
    "LIF delta feedforward": (["V"], ["W"], [], 1),
    "LIF delta hard": (["V"], ["W"], [], 1),
    "LIF Expon CUBA": (["V g"], ["W"], [], 2),
    "LIF Expon COBA": (["V g"], ["W"], [], 2),
    "LIF DualExpon CUBA": (["V g_rise g_decay"], ["W"], [], 3),
    "LIF DualExpon COBA": (["V g_rise g_decay"], ["W"], [], 3),
    "ALIF delta": (["V a"], ["W"], [], 2),
    "ALIF Expon CUBA": (["V a g"], ["W"], [], 3),
    "ALIF Expon COBA": (["V a g"], ["W"], [], 3),
    "GroupALIF delta": (["state"], ["W"], [], 2),
    "GroupALIF Expon CUBA": (["state g"], ["W"], [], 3),
    "GIF delta": (["V theta I1 I2"], ["W"], [], 4),
    "GIF Expon CUBA": (["V theta I1 I2 g"], ["W"], [], 5),
}


def after_some_steps(name):
    """A cell of the zoo in the middle of a sequence, the next input, and whether anything spiked on the way."""
    example = CELLS[name]
    cell = example.build(key=jax.random.key(2))
    brainstate.nn.init_all_states(cell)
    *before, x = example.inputs(8, seed=3)
    outputs = [cell(each) for each in before]
    return cell, x, any(np.any(out) for out in outputs)


def check_module(graph, x):
    """Factors against Jacobians of the graph's own jaxpr, at the states' present values."""
    old = [state.value for state in graph.module_info.compiled_model_states]
    _, _, factors = graph.step_with_factors(x)
    for group in graph.hidden_groups:
        dense = factors_from_jaxpr(graph, group.index, (x,), old)
        width = len(group.components)
        between = graph.factor_plan.dense_D(factors, group.index).reshape(-1, width, width)
        close(between, diagonal(dense.D), 1e-12)
        for r in graph.factor_plan.groups[group.index].relations:
            place = [g.index for g in graph.hidden_param_op_relations[r].hidden_groups].index(group.index)
            found = graph.factor_plan.dense_df(factors, r, place).reshape(-1, width)
            close(found, at_home(dense.df[r], homes(dense.df[r])), 1e-12)


def test_the_table_has_every_cell():
    assert FOUND.keys() == CELLS.keys()


@pytest.mark.parametrize("name", FOUND)
def test_a_cell(name):
    cell, x, spiked = after_some_steps(name)
    graph = compile_etrace_graph(cell, x)
    groups, related, excluded, passes = FOUND[name]
    assert [" ".join(path[-1] for path in group.hidden_paths) for group in graph.hidden_groups] == groups
    assert [relation.path[0] for relation in graph.hidden_param_op_relations] == related
    rejected = [r for r in graph.diagnostics if r.kind.name.startswith("RELATION_EXCLUDED")]
    assert [record.weight_path[0] for record in rejected] == excluded
    assert graph.factor_plan.num_passes == passes
    assert spiked or not CELLS[name].spiking
    check_module(graph, x)


@pytest.mark.parametrize("name", ["LSTMCell", "URLSTMCell", "ALIF Expon COBA", "GroupALIF Expon CUBA", "GIF delta"])
def test_one_step_gradient_of_a_cell(name):
    """States that feed one another inside the step are counted once (rules, trap 1), group states too."""
    cell, x, _ = after_some_steps(name)
    graph = compile_etrace_graph(cell, x)
    minfo = graph.module_info
    old = [state.value for state in minfo.compiled_model_states]
    weights = minfo.weight_path_to_invars

    def hidden(states):
        return [v for p, v in zip(minfo.paths, states, strict=True) if p in minfo.hidden_path_to_invar]

    def perturbed(terms):
        out, new = graph.call_hidden_perturb((x,), terms)
        return loss_of(out, hidden(new))

    def plain(params):
        states = [params.get(path, value) for path, value in zip(minfo.paths, old, strict=True)]
        out, new = minfo.jaxpr_call(x, old_state_vals=states)
        return loss_of(out, hidden(new))

    _, _, factors = graph.step_with_factors(x)
    signals = jax.grad(perturbed)(graph.hidden_perturb.init_perturb_data())
    found = gradient_from_factors(graph, factors, signals, all_values(graph, (x,), old))
    expected = jax.grad(plain)({p: v for p, v in zip(minfo.paths, old, strict=True) if p in weights})
    leaves = {(path, i): leaf for path, tree in expected.items() for i, leaf in enumerate(jax.tree.leaves(tree))}
    assert found.keys() == leaves.keys()
    for key, gradient in found.items():
        close(gradient, leaves[key], 1e-12)


def test_the_gru_of_the_contract():
    """One group, two relations; the reset gate is excluded, with the reason."""
    cell = nn.GRUCell(3, 4)
    brainstate.nn.init_all_states(cell)
    graph = compile_etrace_graph(cell, jnp.zeros(3))
    assert len(graph.hidden_groups) == 1
    assert [r.trainable_paths for r in graph.hidden_param_op_relations] == [
        {"weight": ("Wz", "weight"), "bias": ("Wz", "weight")},
        {"weight": ("Wh", "weight"), "bias": ("Wh", "weight")},
    ]
    (record,) = graph.explain(kind=KINDS.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT)
    assert record.weight_path == ("Wr", "weight")
    assert record.hidden_paths == (("h",),)
    assert record.context["blocking_primitives"] == ("etp_mv",)
    assert record.context["blocking_weight_paths"] == (("Wh", "weight"),)
    assert "'Wr/weight' reaches h only through the operators of 'Wh/weight', which mix the units" in record.message


# brainstate's own cells, which hold no operators of ours

# Cell -> ours, and for each of their layers ours with the columns that they are, in order.
FUSED = {
    "ValinaRNNCell": (nn.ValinaRNNCell, {"W": ["W"]}),
    "GRUCell": (nn.GRUCell, {"Wrz": ["Wr", "Wz"], "Wh": ["Wh"]}),
    "MGUCell": (nn.MGUCell, {"Wf": ["Wf"], "Wh": ["Wh"]}),
    "LSTMCell": (nn.LSTMCell, {"W": ["Wi", "Wg", "Wf", "Wo"]}),
    "URLSTMCell": (nn.URLSTMCell, {"W": ["Wf", "Wr", "Wu", "Wo"], "bias": ["bias"]}),
}


def slices(value, count):
    """The parts of a layer's parameter that stand side by side."""
    return [jax.tree.map(lambda leaf: jnp.split(leaf, count, axis=-1)[k], value) for k in range(count)]  # noqa: B023


@pytest.mark.loose_promotion
@pytest.mark.parametrize("name", FUSED)
def test_lifting_finds_what_was_written_by_hand(name, rng):
    make, parts = FUSED[name]
    theirs, ours = getattr(brainstate.nn, name)(3, 4), make(3, 4)
    for cell in (theirs, ours):
        brainstate.nn.init_all_states(cell)
    for path, state in theirs.states(brainstate.ParamState).items():
        state.value = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), state.value)
        layers = parts[path[0]]
        for layer, value in zip(layers, slices(state.value, len(layers)), strict=True):
            target = getattr(ours, layer)
            (target.weight if hasattr(target, "weight") else target).value = value
    for path, state in theirs.states(brainstate.HiddenState).items():
        state.value = jnp.asarray(rng.normal(size=4))
        getattr(ours, path[0]).value = state.value
    x = jnp.asarray(rng.normal(size=3))
    lifted, by_hand = compile_etrace_graph(theirs, x), compile_etrace_graph(ours, x)
    a, b = lifted.step_with_factors(x), by_hand.step_with_factors(x)
    close(a[0], b[0], 1e-12)

    def by_path(graph):
        (group,) = graph.hidden_groups
        return {path[0]: k for k, path in enumerate(group.hidden_paths)}

    assert by_path(lifted).keys() == by_path(by_hand).keys()
    order = [by_path(by_hand)[key] for key in by_path(lifted)]  # brainstate lists h before c
    found = {r.path[0]: i for i, r in enumerate(lifted.hidden_param_op_relations)}
    expected = {r.path[0]: i for i, r in enumerate(by_hand.hidden_param_op_relations)}
    assert found.keys() == parts.keys()
    assert expected.keys() <= {layer for layers in parts.values() for layer in layers}
    close(
        lifted.factor_plan.dense_D(a[2], 0),
        np.asarray(by_hand.factor_plan.dense_D(b[2], 0))[..., order, :][..., order],
        1e-12,
    )
    for layer, i in found.items():
        df = lifted.factor_plan.dense_df(a[2], i)
        assert (lifted.hidden_param_op_relations[i].x_var is None) == (layer == "bias")
        for part, columns in zip(parts[layer], jnp.split(df, len(parts[layer])), strict=True):
            if part in expected:
                close(columns, by_hand.factor_plan.dense_df(b[2], expected[part])[:, np.array(order)], 1e-12)
            else:
                assert not columns.any()  # the reset gate, fused with the update gate, has no trace


# Stacks, group states, other states


class Stack(brainstate.nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = layers

    def update(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def compile_stack(*layers, inputs=3, **options):
    model = Stack(*layers)
    brainstate.nn.init_all_states(model)
    x = jnp.asarray(np.random.default_rng(0).normal(size=inputs))
    return compile_etrace_graph(model, x, **options), x


def test_layers_of_a_stack_are_groups_of_their_own():
    """Equal names and equal widths merge nothing (rules, trap 7)."""
    graph, x = compile_stack(nn.GRUCell(3, 4), nn.GRUCell(4, 4, key=jax.random.key(1)), nn.Linear(4, 2))
    assert [g.hidden_paths for g in graph.hidden_groups] == [[("layers", "0", "h")], [("layers", "1", "h")]]
    related = [(r.path[1:3], [g.index for g in r.hidden_groups]) for r in graph.hidden_param_op_relations]
    assert related == [(("0", "Wz"), [0]), (("0", "Wh"), [0]), (("1", "Wz"), [1]), (("1", "Wh"), [1])]
    (readout,) = graph.explain(kind=KINDS.RELATION_EXCLUDED_NON_TEMPORAL)
    assert readout.weight_path == ("layers", "2", "weight")
    check_module(graph, x)


def test_an_operator_belongs_to_the_layer_that_it_feeds():
    """Also where the next layer is reached without an operator in between, but not unit by unit."""

    class Pooled(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.MiniGRU(3, 4)

        def init_state(self):
            self.pool = brainstate.HiddenState(jnp.zeros(2))

        def update(self, x):
            self.pool.value = 0.9 * self.pool.value + self.cell(x).reshape(2, 2).sum(axis=1)
            return self.pool.value

    model = Pooled()
    brainstate.nn.init_all_states(model)
    graph = compile_etrace_graph(model, jnp.ones(3))
    assert [r.connected_hidden_paths for r in graph.hidden_param_op_relations] == [[("cell", "h")]] * 2
    (record,) = graph.explain(kind=KINDS.HIDDEN_COUPLING_DROPPED)
    assert record.hidden_paths == (("cell", "h"), ("pool",))
    assert "'pool' depends on 'cell/h' other than unit by unit" in record.message


class Grouped(brainstate.nn.Module):
    """Two states in one array, written in the three ways that come to mind."""

    def __init__(self, way, state=brainstate.HiddenGroupState):
        super().__init__()
        self.way, self.kind = way, state
        self.w = brainstate.ParamState(jnp.asarray(np.random.default_rng(1).normal(size=(3, 4))))

    def init_state(self):
        self.s = self.kind(jnp.asarray(np.random.default_rng(2).normal(size=(4, 2))))

    def update(self, x):
        s, y = self.s.value, x @ self.w.value
        v, a = jnp.tanh(s[..., 0] - s[..., 1]) + y, 0.9 * s[..., 1] + s[..., 0] ** 2
        if self.way == "stack":
            self.s.value = jnp.stack([v, a], axis=-1)
        elif self.way == "concatenate":
            self.s.value = jnp.concatenate([v[:, None], a[:, None]], axis=-1)
        else:
            self.s.value = s.at[..., 0].set(v).at[..., 1].set(0.0).at[..., 1].add(a)
        return v


@pytest.mark.parametrize("way", ["stack", "concatenate", "set"])
def test_group_states(way):
    model = Grouped(way)
    model.init_state()
    x = jnp.asarray([0.3, -0.2, 0.7])
    graph = compile_etrace_graph(model, x)
    (group,) = graph.hidden_groups
    assert (group.varshape, group.num_state, graph.factor_plan.num_passes) == ((4,), 2, 2)
    assert not [r for r in graph.diagnostics if r.level.name == "WARNING"]
    check_module(graph, x)
    _, _, factors = graph.step_with_factors(x)
    assert sorted(factors.D[0]) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert sorted(factors.df[0][0]) == [0]


def test_a_tree_state():
    class Tree(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(jnp.ones((3, 4)))

        def init_state(self):
            self.s = brainstate.HiddenTreeState({"v": jnp.full(4, 0.3), "a": jnp.full(4, 0.1)})

        def update(self, x):
            v, a = self.s.get_value("v"), self.s.get_value("a")
            self.s.set_value({"v": jnp.tanh(v - a) + x @ self.w.value, "a": 0.9 * a + 0.1 * v})
            return v

    model = Tree()
    model.init_state()
    graph = compile_etrace_graph(model, jnp.ones(3))
    (group,) = graph.hidden_groups
    assert (group.varshape, group.num_state, graph.factor_plan.num_passes) == ((4,), 2, 2)
    check_module(graph, jnp.ones(3))


def test_a_group_state_next_to_a_plain_one():
    graph, x = compile_stack(
        nn.SpikingLayer(3, nn.GroupALIF(4, tau=8.0), nn.Expon(4), key=jax.random.key(3)), nn.LeakyRateReadout(4, 2)
    )
    assert [(g.varshape, g.num_state) for g in graph.hidden_groups] == [((4,), 3), ((2,), 1)]
    check_module(graph, x)


def test_noise_from_a_random_state_outside_the_model():
    class Noisy(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.ValinaRNNCell(3, 4)

        def update(self, x):
            return self.cell(x + 0.1 * brainstate.random.normal(size=3).astype(x.dtype))

    model = Noisy()
    brainstate.nn.init_all_states(model)
    graph = compile_etrace_graph(model, jnp.ones(3))
    assert ("outside", "0") in graph.module_info.paths
    assert [r.path for r in graph.hidden_param_op_relations] == [("cell", "W", "weight")]
    weights, hidden, others = graph.module_info.split_state_outvars()
    assert (list(weights), list(hidden), list(others)) == (
        [("cell", "W", "weight")],
        [("cell", "h")],
        [("outside", "0")],
    )


def test_keyword_inputs():
    class Gated(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.ValinaRNNCell(3, 4, activation=jnp.tanh)

        def update(self, x, *, gate, shift=0.0):
            return self.cell(x["a"] * gate + x["b"] + shift)

    model = Gated()
    brainstate.nn.init_all_states(model)
    x = {"b": jnp.arange(3.0), "a": jnp.ones(3)}
    graph = compile_etrace_graph(model, x, gate=jnp.full(3, 0.5))
    out, _, factors = graph.step_with_factors(x, gate=jnp.full(3, 0.5))
    close(out, model(x, gate=jnp.full(3, 0.5)), 1e-12)
    close(factors.x[0][:3], jnp.asarray([0.5, 1.5, 2.5]), 1e-12)
    perturbed, _ = graph.call_hidden_perturb((x,), graph.hidden_perturb.init_perturb_data(), gate=jnp.full(3, 0.5))
    assert perturbed.shape == (4,)


def test_weights_shared_between_layers():
    class Tied(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.Linear(4, 4)

        def init_state(self):
            self.a, self.b = brainstate.HiddenState(jnp.ones(4)), brainstate.HiddenState(jnp.ones(4))

        def update(self, x):
            self.a.value = jnp.tanh(self.shared(self.a.value) + x)
            self.b.value = jnp.tanh(self.shared(self.a.value) + 0.5 * self.b.value)
            return self.b.value

    model = Tied()
    model.init_state()
    graph = compile_etrace_graph(model, jnp.ones(4))
    assert [(r.path, r.connected_hidden_paths) for r in graph.hidden_param_op_relations] == [
        (("shared", "weight"), [("a",)]),
        (("shared", "weight"), [("b",)]),
    ]
    check_module(graph, jnp.ones(4))


def test_a_batch_inside_the_model():
    cell = nn.LSTMCell(3, 4)
    brainstate.nn.init_all_states(cell, batch_size=2)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3)))
    graph = compile_etrace_graph(cell, x)
    assert graph.hidden_groups[0].varshape == (2, 4)
    assert {r.primitive.name for r in graph.hidden_param_op_relations} == {"etp_mm"}
    assert graph.factor_plan.num_passes == 2
    check_module(graph, x)


@pytest.mark.parametrize("name", FOUND)
def test_without_lifting_operators_written_by_hand_are_all_there_are(name):
    cell, x, _ = after_some_steps(name)

    def found(graph):
        return [
            (r.primitive.name, r.trainable_paths, r.connected_hidden_paths) for r in graph.hidden_param_op_relations
        ]

    assert found(compile_etrace_graph(cell, x, lift=False)) == found(compile_etrace_graph(cell, x))
