"""Calls are transparent: inside jit, remat, a custom derivative or control flow a step has the same factors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from braintrace_core import (
    CompilationError,
    ControlFlowPolicy,
    DiagnosticKind,
    DiagnosticLevel,
    NotSupportedError,
    compile_step_graph,
    matmul,
)
from braintrace_core._compat import CALLS, CUSTOM_CALLS
from tests.core.compiler.oracle import diagonal, factors_from_jaxpr
from tests.core.compiler.support import compile_model, relations_by_name, state_values
from tests.core.compiler.test_factors import check_factors
from tests.core.compiler.zoo import IN, ZOO, Model, N, Numbers, both, spike_vjp

KINDS = DiagnosticKind


def in_jit(step):
    return jax.jit(step)


def in_nested_jit(step):
    inner = jax.jit(step)
    return jax.jit(lambda params, carry, *inputs: jax.jit(inner)(params, carry, *inputs))


def in_remat(step):
    return jax.checkpoint(step)


def in_custom_vjp(step):
    wrapped = jax.custom_vjp(step)
    wrapped.defvjp(lambda *args: jax.vjp(step, *args), lambda pull_back, gradient: pull_back(gradient))
    return wrapped


def in_custom_jvp(step):
    wrapped = jax.custom_jvp(step)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(step, primals, tangents))
    return wrapped


def in_cond(step):
    def run(params, carry, *inputs):
        results = jax.eval_shape(step, params, carry, *inputs)
        always = jnp.sum(jnp.abs(inputs[0])) < 1000000
        zeros = jax.tree.map(lambda r: jnp.zeros(r.shape, r.dtype), results)
        return lax.cond(always, lambda: step(params, carry, *inputs), lambda: zeros)

    return run


def in_scan(step):
    def run(params, carry, *inputs):
        carry, outs = lax.scan(lambda carry, _: step(params, carry, *inputs), carry, None, length=1)
        return carry, jax.tree.map(lambda out: out[0], outs)

    return run


def in_everything(step):
    return in_jit(in_remat(in_scan(in_cond(in_custom_jvp(in_jit(step))))))


WRAPPERS = {
    in_jit: set(),
    in_nested_jit: set(),
    in_remat: set(),
    in_custom_vjp: {KINDS.CUSTOM_DERIVATIVE_INLINED},
    in_custom_jvp: {KINDS.CUSTOM_DERIVATIVE_INLINED},
    in_cond: {KINDS.CONTROL_FLOW_UNROLLED},
    in_scan: {KINDS.CONTROL_FLOW_UNROLLED},
    in_everything: {KINDS.CUSTOM_DERIVATIVE_INLINED, KINDS.CONTROL_FLOW_UNROLLED},
}
MODELS = ["lstm_fused", "layer_norm", "permuted", "complex_lru", "spikes_custom_vjp", "sum_of_weights"]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("name", MODELS)
def test_a_call_changes_nothing(name, wrap):
    model = ZOO[name]
    graph = compile_model(model, wrap(model.function))
    old = state_values(graph, model.params, model.carry)
    check_factors(model, graph, graph.step_with_factors(*model.inputs, old_state_vals=old)[2])
    kinds = {record.kind for record in graph.diagnostics}
    assert kinds & {KINDS.CUSTOM_DERIVATIVE_INLINED, KINDS.CONTROL_FLOW_UNROLLED} == WRAPPERS[wrap]


TRANSPARENT = [in_jit, in_nested_jit, in_remat, in_custom_vjp, in_custom_jvp]
OPENED = [in_cond, in_scan, in_everything]


@pytest.mark.parametrize("name", ZOO)
def test_every_model_reads_the_same_inside_a_call(name):
    model = ZOO[name]
    plain = compile_model(model)
    custom = {KINDS.CUSTOM_DERIVATIVE_INLINED}
    for wrap in TRANSPARENT:
        graph = compile_model(model, wrap(model.function), include_hidden_perturb=False)
        # A custom rule without a mixing operator inside stays, with its rule.
        if WRAPPERS[wrap] != custom or graph.explain(kind=KINDS.CUSTOM_DERIVATIVE_INLINED):
            assert str(graph.module_info.jaxpr) == str(plain.module_info.jaxpr)
    if any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(model.carry)):
        return  # there is no such thing as a key of zeros, which these would need
    for wrap in OPENED:
        graph = compile_model(model, wrap(model.function), include_hidden_perturb=False)
        relations_by_name(graph, model.operators)
        assert graph.factor_plan.num_passes == model.passes


def step_of(function):
    """A model whose new state is ``function(params, h, x)``."""
    r = Numbers()
    return Model(
        lambda p, h, x: both(function(p, h, x)), {"w": r(IN, N), "u": r(N, N), "d": r(N)}, r(N), (Numbers(8)(IN),), {}
    )


def compile_step(function, **options):
    model = step_of(function)
    return compile_model(model, model.step, **options)


def factors_of(graph, model):
    old = state_values(graph, model.params, model.carry)
    return graph.step_with_factors(*model.inputs, old_state_vals=old)[2]


def check_D(graph, model):
    """``D`` of the only group against the Jacobian of its own jaxpr."""
    old = state_values(graph, model.params, model.carry)
    dense = factors_from_jaxpr(graph, 0, model.inputs, old)
    np.testing.assert_allclose(
        graph.factor_plan.dense_D(factors_of(graph, model), 0), diagonal(dense.D), rtol=1e-12, atol=1e-12
    )


def test_a_surrogate_gradient_inside_an_opened_rule_is_kept():
    model = ZOO["spikes_custom_vjp"]
    graph = compile_model(model, in_custom_jvp(model.function))
    names = [eqn.primitive.name for eqn in graph.module_info.jaxpr.eqns]
    assert names.count("custom_vjp_call") == 2
    assert "custom_jvp_call" not in names


def test_a_custom_rule_without_an_operator_is_kept_even_around_a_parameter():
    @jax.custom_vjp
    def scaled(h, d):
        return h * d

    scaled.defvjp(lambda h, d: (h * d, (h, d)), lambda res, g: (7 * g, res[0] * g))
    model = step_of(lambda p, h, x: scaled(h, p["d"]) + x @ p["w"])
    graph = compile_model(model, model.step)
    factors = factors_of(graph, model)
    np.testing.assert_allclose(factors.D[0][0, 0], 7.0)
    (d,) = [i for i, r in enumerate(graph.hidden_param_op_relations) if r.path == ("params", "d")]
    np.testing.assert_allclose(factors.df[d][0][0], model.carry)
    assert not graph.explain(kind=KINDS.CUSTOM_DERIVATIVE_INLINED)


def test_a_custom_rule_around_data_stays_closed_inside_a_scan_with_parameters():
    """What is data and what a parameter is known value by value inside control flow."""

    @jax.custom_vjp
    def mixed(z):
        return jnp.dot(z, z) * z

    mixed.defvjp(lambda z: (mixed(z), z), lambda z, g: (g * 3,))

    def function(p, h, x):
        return lax.scan(lambda h, _: (0.1 * mixed(h) + x @ p["w"], None), h, None, length=2)[0]

    graph = compile_step(function)
    assert not graph.explain(kind=KINDS.CUSTOM_DERIVATIVE_INLINED)
    assert [eqn.primitive.name for eqn in graph.module_info.jaxpr.eqns].count("custom_vjp_call") == 2


def test_calls_leave_no_call_behind():
    graph = compile_step(lambda p, h, x: jax.jit(jax.checkpoint(lambda h: jnp.tanh(x @ p["w"] + h)))(h))
    assert not {eqn.primitive.name for eqn in graph.module_info.jaxpr.eqns} & (CALLS | CUSTOM_CALLS)


def test_an_operator_inside_a_nested_jit_is_recorded():
    graph = compile_step(lambda p, h, x: jax.jit(lambda h: matmul(x, p["w"]) + 0.5 * h)(h))
    (record,) = graph.explain(kind=KINDS.PRIMITIVE_INSIDE_NESTED_JIT)
    assert (record.weight_path, record.primitive) == (("params", "w"), "etp_mv")


# Control flow that stays closed


def loop(p, h, x):
    def body(carry):
        k, h = carry
        return k + 1, jnp.tanh(h @ p["u"])

    return lax.while_loop(lambda carry: carry[0] < 3 + x[0].astype(int), body, (0, h))[1] + x @ p["w"]


def test_a_parameter_inside_a_while_loop_is_named():
    graph = compile_step(lambda p, h, x: lax.stop_gradient(loop(p, h, x)) + 0.5 * h + x @ p["w"])
    (record,) = graph.explain(kind=KINDS.PRIMITIVE_INSIDE_CONTROL_FLOW)
    assert record.level is DiagnosticLevel.WARNING
    assert (
        "'params/u' acts inside a `while` that stays closed: its number of iterations depends on data" in record.message
    )
    model = step_of(None)
    factors = factors_of(graph, model)
    np.testing.assert_array_equal(factors.D[0][0, 0], 0.5)
    assert record in graph.explain(weight_path=("params", "u"))
    assert [r.path for r in graph.hidden_param_op_relations] == [("params", "w")]


def test_a_while_loop_on_the_way_of_credit():
    with pytest.raises(
        NotSupportedError, match=r"JAX cannot differentiate the step with respect to carry.*Reverse-mode"
    ):
        compile_step(loop)


SCAN = ControlFlowPolicy(scan_unroll_limit=2)
COND = ControlFlowPolicy(cond_to_select=False)


@pytest.mark.parametrize(
    ("function", "policy", "reason"),
    [
        (
            lambda p, h, x: lax.scan(lambda h, _: (jnp.tanh(h @ p["u"] + x), None), h, None, length=3)[0],
            SCAN,
            "its 3 steps are more than `scan_unroll_limit=2`; raise the limit in `ControlFlowPolicy` to unroll it",
        ),
        (
            lambda p, h, x: lax.cond(x[0] < 100, lambda: jnp.tanh(h @ p["u"]), lambda: h),
            COND,
            "`cond_to_select` is off in `ControlFlowPolicy`",
        ),
        (
            lambda p, h, x: lax.platform_dependent(h, p["u"], cpu=jnp.matmul, default=lambda h, u: 2 * h @ u),
            None,
            "each of its branches is for another kind of device",
        ),
        (
            lambda p, h, x: lax.custom_linear_solve(
                lambda v: v + p["d"] * v, h @ p["u"], lambda _, b: b / (1 + p["d"]), symmetric=True
            ),
            None,
            None,
        ),
    ],
    ids=["scan", "cond", "platform", "solve"],
)
def test_closed_control_flow_is_differentiated_as_it_is(function, policy, reason):
    """Operators inside are not cut, so ``D`` is the diagonal of a Jacobian that mixes all units."""
    model = step_of(lambda p, h, x: function(p, h, jnp.zeros(N) + x[0]) + 0.5 * h + x @ p["w"])
    graph = compile_model(model, model.step, control_flow=policy)
    check_D(graph, model)
    records = graph.explain(kind=KINDS.PRIMITIVE_INSIDE_CONTROL_FLOW)
    assert [reason in record.message for record in records] == ([True] if reason else [])


@pytest.mark.parametrize("policy", [SCAN, COND, None], ids=["scan", "cond", "opened"])
def test_operators_written_by_hand_inside_closed_control_flow(policy):
    def function(p, h, x):
        inner = lax.scan(lambda h, _: (jnp.tanh(matmul(h, p["u"])), None), h, None, length=3)[0]
        inner = lax.cond(x[0] < 100, lambda: matmul(inner, p["u"]) + 0.2 * h, lambda: h)
        return inner + 0.5 * h + x @ p["w"]

    model = step_of(function)
    graph = compile_model(model, model.step, control_flow=policy)
    check_D(graph, model)
    closed = {record.primitive for record in graph.explain(kind=KINDS.PRIMITIVE_INSIDE_CONTROL_FLOW)}
    assert closed == {SCAN: {"scan"}, COND: {"cond"}, None: set()}[policy]


def test_control_flow_on_data_or_on_parameters_alone_is_left_as_it_is():
    def function(p, h, x):
        powers = lax.scan(lambda w, _: (w @ p["u"], None), p["u"], None, length=2)[0]
        h = lax.cond(x[0] > 0, lambda: h, lambda: 2 * h)
        h = lax.scan(lambda h, _: (jnp.tanh(h), h), h, None, length=3)[0]
        return 0.5 * h + h @ powers

    model = step_of(function)
    graph = compile_model(model, model.step)
    names = [eqn.primitive.name for eqn in graph.module_info.jaxpr.eqns]
    assert names.count("cond") == 1
    assert names.count("scan") == 2
    assert graph.factor_plan.num_passes == 1
    check_D(graph, model)
    (relation,) = graph.hidden_param_op_relations
    assert [primitive.name for primitive in relation.trainable_processing_chains["weight"]] == ["scan"]


def test_a_scan_without_steps():
    graph = compile_step(lambda p, h, x: lax.scan(lambda h, _: (h @ p["u"], h), h, None, length=0)[0] + x @ p["w"])
    assert [r.path for r in graph.hidden_param_op_relations] == [("params", "w")]
    assert graph.explain(weight_path=("params", "u"))


def test_a_model_whose_only_operator_is_out_of_reach():
    with pytest.raises(CompilationError, match="'params' acts inside a `while` that stays closed"):
        compile_step_graph(
            lambda p, h, x: both(loop({"u": p, "w": jnp.zeros((IN, N))}, h, x)),
            Numbers()(N, N),
            jnp.zeros(N),
            jnp.ones(IN),
        )


def test_a_vmapped_step_is_a_batch():
    """A model compiled with its batch inside: operators keep their relations, units of one example act on no other."""
    r = Numbers()
    params, carry, x = {"w": r(IN, N), "d": r(N)}, r(4, N), r(4, IN)

    def step(p, h, x):
        z = x @ p["w"] + p["d"] * h
        return both(jnp.tanh(z - z.mean()) + 0.1 * spike_vjp(h))

    graph = compile_step_graph(jax.vmap(step, (None, 0, 0)), params, carry, x)
    single = compile_step_graph(step, params, carry[0], x[0])
    assert [rel.primitive.name for rel in graph.hidden_param_op_relations] == ["etp_mm", "etp_elemwise"]
    batched = graph.factor_plan.dense_D(
        graph.step_with_factors(x, old_state_vals=state_values(graph, params, carry))[2], 0
    )
    for b in range(4):
        old = state_values(single, params, carry[b])
        alone = single.factor_plan.dense_D(single.step_with_factors(x[b], old_state_vals=old)[2], 0)
        np.testing.assert_allclose(batched[b], alone, rtol=1e-12)


def test_an_equation_without_results_is_left_alone():
    def step(w, h, x):
        jax.debug.print("here {}", x.sum())
        h = jnp.tanh(x @ w + 0.5 * h)
        return h, h

    graph = compile_step_graph(step, jnp.ones((3, 4)), jnp.zeros(4), jnp.zeros(3))
    assert len(graph.hidden_param_op_relations) == 1
