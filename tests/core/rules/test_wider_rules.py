"""Rules that see more than a unit's own recurrence: SnAp, OSTL, DNI, and back-propagation with checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_core as bc
from braintrace_core.rules import BPTT, DNI, DRTRL, OSTL, RulePlan, SnAp, online_gradient
from braintrace_core.rules.sparsity import StepStructure
from tests.core.rules import zoo

UNIT_WISE, MIXING = zoo.cases()
ALL = {**UNIT_WISE, **MIXING}


SATURATED = ["lstm", "gru", "layer_norm", "stack", "complex_dense", "conv", "embedding_of_many", "sparse"]


@pytest.mark.parametrize("name", SATURATED)
def test_snap_saturated_is_exact(name):
    case = ALL[name]
    carry, inputs = zoo.batch_of(case)
    resets = zoo.some_resets()
    found, _ = zoo.online(case, SnAp(2 * zoo.UNITS), 2, carry, inputs, resets)
    zoo.assert_close(found, zoo.bptt(case, carry, inputs, resets))


def test_snap_sees_through_products_one_after_the_other():
    r = np.random.default_rng(3)
    shapes = {"w": (3, zoo.UNITS), "a": (zoo.UNITS, 2), "b": (2, zoo.UNITS)}
    params = {name: jnp.asarray(r.normal(size=shape)) for name, shape in shapes.items()}

    def step(p, h, x):
        h = jnp.tanh(x @ p["w"] + h @ p["a"] @ p["b"])
        return h, h

    case = zoo.Case(step, params, jnp.zeros(zoo.UNITS))
    carry, inputs = zoo.batch_of(case)
    found, _ = zoo.online(case, SnAp(2), 2, carry, inputs)
    zoo.assert_close(found, zoo.bptt(case, carry, inputs))


def ring(params, h, x):
    """Each unit hears its neighbour only: the recurrent weight is masked."""
    mask = jnp.roll(jnp.eye(zoo.UNITS), 1, axis=1)
    h = jnp.tanh(x @ params["w"] + h @ (params["u"] * mask))
    return h, h


def ring_case():
    r = np.random.default_rng(3)
    params = {"w": jnp.asarray(r.normal(size=(3, zoo.UNITS))), "u": jnp.asarray(r.normal(size=(zoo.UNITS, zoo.UNITS)))}
    return zoo.Case(ring, params, jnp.zeros(zoo.UNITS))


def test_snap_profits_from_masked_weights():
    case = ring_case()
    carry, inputs = zoo.batch_of(case)
    graph = bc.compile_step_graph(case.step, case.params, case.carry, inputs[0, 0])
    structure = StepStructure(RulePlan.of(graph))
    np.testing.assert_array_equal(structure.hidden, np.roll(np.eye(zoo.UNITS, dtype=bool), 1, axis=0))
    widths = [next(iter(SnAp(n).init(graph, 1).values())).shape[-1] for n in (1, 2, 3, 9)]
    assert widths == [1, 2, 3, zoo.UNITS]
    layout = SnAp(2)._layout(RulePlan.of(graph))
    assert layout.colours[1] == 1  # one pass reads the whole Jacobian
    truth = zoo.bptt(case, carry, inputs)
    found, _ = zoo.online(case, SnAp(zoo.UNITS), 1, carry, inputs)
    zoo.assert_close(found, truth)
    errors = [float(jnp.abs(zoo.online(case, SnAp(n), 1, carry, inputs)[0]["w"] - truth["w"]).max()) for n in (1, 2, 4)]
    assert errors[0] > errors[1] > errors[2] > 1e-6


def test_the_batch_never_couples():
    case = MIXING["gru"]
    graph = bc.compile_step_graph(case.step, case.params, case.carry, jnp.zeros(3))
    one, many = (SnAp(2).init(graph, batch) for batch in (1, 7))
    for name, trace in one.items():
        assert many[name].shape == (7, *trace.shape[1:])


def test_ostl_sees_the_diagonal_of_recurrent_weights():
    """A recurrent weight that is diagonal makes the unit-by-unit trace exact, if the operator is seen through."""

    def step(params, h, x):
        h = jnp.tanh(x @ params["w"] + h @ params["u"])
        return h, h

    units = zoo.UNITS
    params = {"w": jnp.linspace(-1, 1, 3 * units).reshape(3, units), "u": jnp.diag(jnp.linspace(0.3, 0.9, units))}
    case = zoo.Case(step, params, jnp.zeros(units))
    carry, inputs = zoo.batch_of(case)
    resets = zoo.some_resets()
    truth = zoo.bptt(case, carry, inputs, resets)
    for credit in ("window", "step"):
        found, _ = zoo.online(case, OSTL(), 2, carry, inputs, resets, credit=credit)
        np.testing.assert_allclose(found["w"], truth["w"], rtol=1e-9, atol=1e-12)
    assert float(jnp.abs(zoo.online(case, DRTRL(), 2, carry, inputs, resets)[0]["w"] - truth["w"]).max()) > 1e-3


def test_ostl_is_the_block_diagonal_of_the_whole_jacobian():
    """By definition: eps_t = diag(J_t) eps_{t-1} + d h / d w, for a GRU's update gate."""
    case = MIXING["gru"]
    carry, inputs = zoo.batch_of(case)
    inputs, steps = inputs[:4], 4
    found, _ = zoo.online(case, OSTL(), 1, carry, inputs, credit="step")

    def example(h, xs):
        trace, total = 0.0, 0.0
        for t in range(steps):
            new = lambda h, w, t=t: case.step({**case.params, "wz": w}, h, xs[t])[0]  # noqa: E731
            diagonal = jnp.diagonal(jax.jacrev(new)(h, case.params["wz"]))
            direct = jax.jacrev(new, argnums=1)(h, case.params["wz"])  # (unit, feature, unit)
            own = jnp.diagonal(direct, axis1=0, axis2=2)  # (feature, unit)
            trace = diagonal[None] * trace + own
            h = new(h, case.params["wz"])
            total = total + jnp.cos(h)[None] * trace
        return total

    expected = sum(example(carry[b], inputs[:, b]) for b in range(zoo.BATCH))
    np.testing.assert_allclose(found["wz"], expected, rtol=1e-9, atol=1e-12)


def test_ostl_without_recurrence_keeps_nothing():
    case = UNIT_WISE["indrnn"]
    carry, inputs = zoo.batch_of(case)
    whole, traces = zoo.online(case, OSTL(recurrent=False), 4, carry, inputs, credit="step")
    from_last, last = zoo.online(
        case, OSTL(recurrent=False), 1, _state_after(case, carry, inputs[:-1]), inputs[-1:], credit="step"
    )
    for name in traces:
        if name != "steps":
            np.testing.assert_allclose(traces[name], last[name], rtol=1e-12)
    assert float(jnp.abs(whole["w"] - from_last["w"]).max()) > 1e-3


def _state_after(case, carry, inputs):
    for x in inputs:
        carry, _ = jax.vmap(lambda c, x: case.step(case.params, c, x))(carry, x)
    return carry


@pytest.mark.parametrize("steps", [1, 7, 8])
@pytest.mark.parametrize("name", ["gru", "stack"])
def test_checkpoints_do_not_change_the_gradient(name, steps):
    case = MIXING[name]
    carry, inputs = zoo.batch_of(case)
    inputs, resets = inputs[:steps], zoo.some_resets()[:steps]
    found, _ = zoo.online(case, BPTT(checkpoint="sqrt"), steps, carry, inputs, resets)
    zoo.assert_close(found, zoo.bptt(case, carry, inputs, resets))


def test_checkpoints_save_memory():
    case = MIXING["gru"]
    carry, _ = zoo.batch_of(case)
    inputs = jnp.ones((1024, zoo.BATCH, zoo.FEATURES))
    plan = RulePlan.of(bc.compile_step_graph(case.step, case.params, case.carry, inputs[0, 0]))

    def temporary(rule):
        run = jax.jit(
            lambda p, c, x: online_gradient(plan, rule, lambda w: (zoo.loss_of(w.outputs), None), p, c, {}, [x])
        )
        compiled = run.lower(jax.tree.leaves(case.params), jax.tree.leaves(carry), inputs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(BPTT(checkpoint="sqrt")) < temporary(BPTT()) / 3


def test_a_synthesiser_at_zero_is_drtrl():
    case = MIXING["gru"]
    carry, inputs = zoo.batch_of(case)
    found, _ = zoo.online(case, DNI(learning_rate=0.0), 2, carry, inputs)
    expected, _ = zoo.online(case, DRTRL(), 2, carry, inputs)
    zoo.assert_close(found, expected, 1e-12)


def test_a_perfect_synthesiser_gives_parameters_without_traces_their_whole_gradient():
    """The reset gate of a GRU has no trace; with the true gradient at the window's end it gets all of its credit."""
    case = MIXING["gru"]
    carry, inputs = zoo.batch_of(case)
    middle = _state_after(case, carry, inputs[:4])

    def rest(h):
        total = 0.0
        for x in inputs[4:]:
            h, y = jax.vmap(lambda c, x: case.step(case.params, c, x))(h, x)
            total = total + zoo.loss_of([y])
        return total

    truth = jax.grad(rest)(middle)

    class Known:
        """Says the truth at the middle, and nothing elsewhere."""

        def init(self, size, dtype):
            return {"unused": jnp.zeros((), dtype)}

        def estimate(self, own, hidden):
            return jnp.where(jnp.allclose(hidden, middle), truth, 0.0) + 0 * own["unused"]

    found, _ = zoo.online(case, DNI(synthesiser=Known(), learning_rate=0.0), 4, carry, inputs)
    expected = zoo.bptt(case, carry, inputs)
    zoo.assert_close({k: found[k] for k in ("wr", "ur")}, {k: expected[k] for k in ("wr", "ur")})
    without, _ = zoo.online(case, DRTRL(), 4, carry, inputs)
    assert float(jnp.abs(without["wr"] - expected["wr"]).max()) > 1e-3
    zoo.assert_close({k: found[k] for k in ("wz", "uh")}, {k: without[k] for k in ("wz", "uh")}, 1e-12)


def test_a_synthesiser_learns_to_foresee():
    case = MIXING["gru"]
    carry, inputs = zoo.batch_of(case)
    plan = RulePlan.of(bc.compile_step_graph(case.step, case.params, case.carry, inputs[0, 0]))
    rule, leaves = DNI(learning_rate=0.1), jax.tree.leaves(case.params)
    middle = _state_after(case, carry, inputs[:4])

    def rest(h):
        _, y = jax.vmap(lambda c, x: case.step(case.params, c, x))(h, inputs[4])
        return zoo.loss_of([y])

    truth = jax.grad(rest)(middle)

    @jax.jit
    def step(traces):
        return online_gradient(
            plan, rule, lambda w: (zoo.loss_of(w.outputs), None), leaves, [middle], traces, [inputs[4:5]]
        ).traces

    traces = rule.init(plan, zoo.BATCH)
    error = lambda t: float(jnp.abs(rule.future(t, plan, [middle]) - truth).mean())  # noqa: E731
    before = error(traces)
    for _ in range(30):
        traces = {**step(traces)}
    assert error(traces) < 0.8 * before


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SnAp(0), "whole number n >= 1, got 0"),
        (lambda: BPTT(checkpoint="all"), "checkpoint \"sqrt\" or None, got 'all'"),
    ],
)
def test_bad_arguments_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()
