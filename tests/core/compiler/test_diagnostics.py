"""Every kind of record, what it says, and how records are found again."""

import subprocess
import sys
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_core import (
    ControlFlowPolicy,
    DiagnosticKind,
    DiagnosticLevel,
    PathClassification,
    compile_etrace_graph,
    compile_step_graph,
    matmul,
    nn,
    register_primitive,
)
from tests.core.compiler.support import compiled
from tests.core.compiler.zoo import IN, ZOO, N, Numbers, both

KINDS, LEVELS = DiagnosticKind, DiagnosticLevel

two_results_p = register_primitive(
    "etp_test_two_results",
    lambda x, weight: (jnp.tanh(x), x @ weight),
    trainable={"weight": 1},
    y_index=1,
    multiple_results=True,
)


def compile_step(function, **options):
    """The graph of a model whose new state is ``function(params, h, x)``."""
    r = Numbers()
    params = {"w": r(IN, N), "u": r(N, N), "b": r(N), "d": r(N)}
    return compile_step_graph(lambda p, h, x: both(function(p, h, x)), params, r(N), r(IN), **options)


class Leaves(brainstate.nn.Module):
    """A parameter of two leaves, both behind one operand."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState({"direction": jnp.ones((IN, N)), "gain": jnp.ones((1, N))})
        self.spare = brainstate.ParamState(jnp.ones(2))

    def init_state(self):
        self.h = brainstate.HiddenState(jnp.zeros(N))

    def update(self, x):
        w = self.w.value
        self.h.value = 0.5 * self.h.value + matmul(x, w["direction"] * jnp.broadcast_to(w["gain"], (IN, N)))
        return self.h.value


def leaves():
    model = Leaves()
    model.init_state()
    return compile_etrace_graph(model, jnp.ones(IN))


# Kind -> a model that has it, the level, the parameter concerned, a part of the message.
EXAMPLES = {
    KINDS.RELATION_INCLUDED: (
        lambda: compile_step(lambda p, h, x: jnp.tanh(x @ p["w"])),
        LEVELS.INFO,
        "w",
        "'params/w' acts on carry through `etp_mv`",
    ),
    KINDS.RELATION_PARTIAL_PATH: (
        lambda: compile_step(lambda p, h, x: (lambda y: 0.5 * y + y @ p["u"])(x @ p["w"])),
        LEVELS.WARNING,
        "w",
        "'params/w' also reaches carry through other operators; the trace holds the direct path",
    ),
    KINDS.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT: (
        lambda: compile_step(lambda p, h, x: jnp.tanh(x @ p["w"]) @ p["u"]),
        LEVELS.WARNING,
        "w",
        "'params/w' reaches carry only through the operators of 'params/u', which mix the units",
    ),
    KINDS.RELATION_EXCLUDED_NON_TEMPORAL: (
        lambda: compile_step_graph(
            lambda p, h, x: (0.5 * h + x @ p["w"], h @ p["u"]),
            {"w": jnp.ones((IN, N)), "u": jnp.ones((N, 2))},
            jnp.ones(N),
            jnp.ones(IN),
        ),
        LEVELS.INFO,
        "u",
        "'params/u' reaches no hidden state: it acts on the present output only",
    ),
    KINDS.RELATION_EXCLUDED_NO_PARAMSTATE: (
        lambda: compile_step(lambda p, h, x: matmul(x, jnp.outer(x, h)) + x @ p["w"]),
        LEVELS.WARNING,
        None,
        "The weight of `etp_mv` is not made of parameters alone",
    ),
    KINDS.RELATION_EXCLUDED_SHAPE_MISMATCH: (
        lambda: compile_step(lambda p, h, x: 0.5 * h + h @ p["u"] + (x @ p["w"][:, :2]) @ np.ones((2, N))),
        LEVELS.WARNING,
        "w",
        "'params/w' acts on {'carry': (5,)} through a result of shape (2,) whose elements do not belong to single",
    ),
    KINDS.TRAINABLE_INVAR_NOT_PARAMSTATE: (
        lambda: compile_step(lambda p, h, x: 0.5 * h + matmul(x, p["w"], bias=h)),
        LEVELS.WARNING,
        None,
        "The bias of `etp_mv` is not made of parameters alone",
    ),
    KINDS.PYTREE_WEIGHT_LEAF_AMBIGUOUS: (
        leaves,
        LEVELS.INFO,
        None,
        "The weight of `etp_mv` is made of several leaves of 'w'; `trainable_leaf_indices` names the first",
    ),
    KINDS.MULTI_OUTPUT_PRIMITIVE_DETECTED: (
        lambda: compile_step(lambda p, h, x: 0.5 * h + two_results_p.bind(x, p["w"])[1]),
        LEVELS.INFO,
        None,
        "`etp_test_two_results` has 2 results; number 1 is its y",
    ),
    KINDS.PRIMITIVE_INSIDE_CONTROL_FLOW: (
        lambda: compile_step(
            lambda p, h, x: 0.5 * h + x @ p["w"] + jax.lax.cond(x[0] > 0, lambda: h @ p["u"], lambda: h),
            control_flow=ControlFlowPolicy(cond_to_select=False),
        ),
        LEVELS.WARNING,
        "u",
        "'params/u' acts inside a `cond` that stays closed",
    ),
    KINDS.PRIMITIVE_INSIDE_NESTED_JIT: (
        lambda: compile_step(lambda p, h, x: 0.5 * h + jax.jit(matmul)(x, p["w"])),
        LEVELS.INFO,
        "w",
        "`etp_mv` on 'params/w' stands inside a nested jit",
    ),
    KINDS.CONTROL_FLOW_UNROLLED: (
        lambda: compile_step(lambda p, h, x: jax.lax.cond(x[0] > 0, lambda: x @ p["w"], lambda: h)),
        LEVELS.INFO,
        "w",
        "A `cond` around 'params/w' became straight-line code",
    ),
    KINDS.CUSTOM_DERIVATIVE_INLINED: (
        lambda: compile_step(lambda p, h, x: custom_product(x, p["w"]) + 0.5 * h),
        LEVELS.WARNING,
        "w",
        "A `custom_jvp_call` around 'params/w' was opened to reach the operator inside",
    ),
    KINDS.OPERATOR_LIFTED: (
        lambda: compile_step(lambda p, h, x: 0.5 * h + (x @ p["w"] + p["b"])),
        LEVELS.INFO,
        "b",
        "`dot_general` with 'params/w', 'params/b' became `etp_mv`",
    ),
    KINDS.HIDDEN_GROUP_MERGED: (lambda: compiled("lstm_fused"), LEVELS.INFO, None, "feed one another unit by unit"),
    KINDS.HIDDEN_COUPLING_DROPPED: (
        lambda: compiled("states_coupled_by_a_mean"),
        LEVELS.WARNING,
        None,
        "'carry/0' depends on 'carry/1' other than unit by unit",
    ),
    KINDS.FACTOR_APPROXIMATED: (
        lambda: compiled("layer_norm"),
        LEVELS.WARNING,
        "w",
        "Elements of the result of 'params/w' act on several units of carry",
    ),
    KINDS.FACTOR_COLOURED: (lambda: compiled("layer_norm"), LEVELS.INFO, None, "Factors of carry take 5 passes a step"),
    KINDS.PARAMETER_UNUSED: (
        lambda: compile_step(lambda p, h, x: 0.5 * h + x @ p["w"]),
        LEVELS.WARNING,
        "u",
        "The step does not use 'params/u'",
    ),
    KINDS.PARAMETER_WITHOUT_OPERATOR: (
        lambda: compile_step(lambda p, h, x: p["d"] * h + matmul(x, p["w"]), lift=False),
        LEVELS.WARNING,
        "d",
        "'params/d' meets no input or state in an operator",
    ),
}


@jax.custom_jvp
def custom_product(x, w):
    return x @ w


custom_product.defjvp(lambda primals, tangents: jax.jvp(jnp.matmul, primals, tangents))


def test_every_kind_has_an_example():
    assert EXAMPLES.keys() == set(KINDS)


@pytest.mark.loose_promotion
@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.name)
def test_a_kind(kind):
    make, level, weight, message = EXAMPLES[kind]
    graph = make()
    records = graph.explain(kind=kind)
    if weight is not None:
        records = [record for record in records if record.concerns(("params", weight))]
    assert records
    assert {record.level for record in records} == {level}
    assert message is None or any(message in record.message for record in records)
    assert all(record.kind is kind for record in records)


def test_a_pytree_weight_leaf():
    (record,) = leaves().explain(kind=KINDS.PYTREE_WEIGHT_LEAF_AMBIGUOUS)
    assert record.weight_path == ("w",)
    assert record.context["leaf_indices"] == (0, 1)


def test_a_parameter_that_the_module_never_reads():
    (record,) = leaves().explain(kind=KINDS.PARAMETER_UNUSED)
    assert record.weight_path == ("spare",)


def test_the_key_of_an_operand_that_does_not_train():
    graph = EXAMPLES[KINDS.TRAINABLE_INVAR_NOT_PARAMSTATE][0]()
    (record,) = graph.explain(kind=KINDS.TRAINABLE_INVAR_NOT_PARAMSTATE)
    assert (record.primitive, record.context["key"]) == ("etp_mv", "bias")
    (relation,) = graph.hidden_param_op_relations
    assert list(relation.trainable_paths) == ["weight"]


def test_partial_paths_are_classified():
    graph = EXAMPLES[KINDS.RELATION_PARTIAL_PATH][0]()
    relations = {r.path[-1]: r.path_classification[("carry",)] for r in graph.hidden_param_op_relations}
    assert relations == {"w": PathClassification.MIXED, "u": PathClassification.ALL_DIRECT}
    gru = compiled("gru_reset_before")
    (record,) = gru.explain(kind=KINDS.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT)
    assert record.context["path_classification"] == {("carry",): PathClassification.ALL_THROUGH_OTHER_ETP}
    cell = nn.MGUCell(3, 4)
    brainstate.nn.init_all_states(cell)
    graph = compile_etrace_graph(cell, jnp.zeros(3))
    (record,) = graph.explain(kind=KINDS.RELATION_PARTIAL_PATH)
    assert record.weight_path == ("Wf", "weight")
    assert record.context["path_classification"] == {("h",): PathClassification.MIXED}
    assert graph.hidden_param_op_relations[0].path_classification == {("h",): PathClassification.MIXED}


@pytest.mark.loose_promotion
def test_a_misfit_is_reported_and_dropped():
    graph = EXAMPLES[KINDS.RELATION_EXCLUDED_SHAPE_MISMATCH][0]()
    (record,) = graph.explain(kind=KINDS.RELATION_EXCLUDED_SHAPE_MISMATCH)
    assert record.hidden_paths == (("carry",),)
    assert [r.path for r in graph.hidden_param_op_relations] == [("params", "u")]


@pytest.mark.loose_promotion
def test_only_the_state_that_does_not_fit_is_dropped():
    def step(p, carry, x):
        y = x @ p
        return (0.5 * carry[0] + y, 0.5 * carry[1] + y @ np.ones((N, 2))), y

    graph = compile_step_graph(step, Numbers()(IN, N), (jnp.zeros(N), jnp.zeros(2)), jnp.ones(IN))
    (relation,) = graph.hidden_param_op_relations
    assert relation.connected_hidden_paths == [("carry", "0")]
    (record,) = graph.explain(kind=KINDS.RELATION_EXCLUDED_SHAPE_MISMATCH)
    assert record.hidden_paths == (("carry", "1"),)


def test_a_parameter_without_a_derivative():
    graph = compile_step(lambda p, h, x: 0.5 * h + x @ p["w"] + jnp.floor(h @ p["u"]) + (h > p["b"]).astype(h.dtype))
    records = graph.explain(kind=KINDS.RELATION_EXCLUDED_NON_TEMPORAL)
    assert [record.weight_path[-1] for record in records] == ["u", "b"]
    assert all("only through operations without a derivative" in record.message for record in records)


def test_explain():
    graph = compiled("lstm_split")
    assert tuple(graph.explain()) == graph.diagnostics
    about = graph.explain(weight_path=("params", "bf"))  # behind the first parameter of its operator
    assert [r.kind for r in about] == [KINDS.OPERATOR_LIFTED, KINDS.RELATION_INCLUDED]
    assert all(r.weight_path == ("params", "f") for r in about)
    hidden = graph.explain(hidden_path=("carry", "1"))
    assert [r.weight_path[-1] for r in hidden if r.kind is KINDS.RELATION_INCLUDED] == ["i", "f", "g"]
    both_ = graph.explain(weight_path=("params", "i"), hidden_path=("carry", "1"), kind=KINDS.RELATION_INCLUDED)
    assert len(both_) == 1
    assert graph.explain(weight_path=("params", "x")) == []
    assert graph.explain(kind=KINDS.PARAMETER_UNUSED) == []


@pytest.mark.parametrize("name", ZOO)
def test_every_parameter_has_a_record(name):
    graph = compiled(name)
    for path in graph.module_info.weight_path_to_invars:
        assert any(record.kind is not KINDS.OPERATOR_LIFTED for record in graph.explain(weight_path=path))


def test_records_belong_to_their_compilation():
    first, second = compile_step(lambda p, h, x: 0.5 * h + x @ p["w"]), compile_step(lambda p, h, x: x @ p["w"])
    assert len(first.diagnostics) == len(second.diagnostics)
    with pytest.raises(AttributeError):
        first.diagnostics[0].message = "other"
    with pytest.raises(TypeError):
        first.diagnostics[0].context["key"] = 1


# The same model gives the same graph, in every process

SIGNATURE = """
import jax
import brainstate
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp
from braintrace_core import compile_etrace_graph, nn
from tests.core.compiler.support import compiled

def signature(graph):
    plan = graph.factor_plan
    print([(g.hidden_paths, str(g.transition_jaxpr), [v.aval.str_short() for v in g.transition_jaxpr_constvars])
           for g in graph.hidden_groups])
    for r in graph.hidden_param_op_relations:
        chains = {k: (c.paths, c.leaf_indices, str(c.jaxpr)) for k, c in r.trainable_processing_chains.items()}
        print(repr(r), r.path_classification, chains, [str(j) for j in r.y_to_hidden_group_jaxprs])
    print(graph.module_info.paths, [str(p.tail) for p in plan.groups], [v.aval.str_short() for v in plan.variables])
    print([(p.diagonals.hidden_entries, p.diagonals.operator_entries) for p in plan.groups])
    print([[c.tolist() for c, _ in p.diagonals.colours] for p in plan.groups])
    print([(str(r), r.weight_path, r.hidden_paths) for r in graph.diagnostics])
    print(graph.module_info.jaxpr)

for name in "gru_reset_before weight_norm low_rank_correction lstm_with_normed_gates scan_over_layers switch".split():
    signature(compiled(name))
model = brainstate.nn.Sequential(nn.GRUCell(3, 4), nn.LSTMCell(4, 4), nn.Linear(4, 2))
brainstate.nn.init_all_states(model)
signature(compile_etrace_graph(model, jnp.zeros(3)))
"""


def test_the_same_in_every_process():
    """A pod depends on it: every host compiles for itself."""
    root = Path(__file__).parents[3]

    def run(seed):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
        command = [sys.executable, "-W", "ignore", "-c", SIGNATURE]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=root).stdout

    first, second = run("1"), run("4242")
    assert len(first.splitlines()) > 40
    assert first == second


def test_the_same_twice_in_one_process():
    for name in ("gru_reset_before", "lstm_split", "weight_norm"):
        model = ZOO[name]
        one, two = (compile_step_graph(model.function, model.params, model.carry, *model.inputs) for _ in range(2))
        assert str(one.module_info.jaxpr) == str(two.module_info.jaxpr)
        assert repr(one) == repr(two)
        assert list(map(str, one.diagnostics)) == list(map(str, two.diagnostics))
