"""Products inside the loop over time: the inputs' share of one is made for all steps at once, errors go back through a
transposed copy of its weight, and gates share one.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from braintrace_core import compile_step_graph
from braintrace_core.rules import DRTRL, TBPTT, RulePlan, online_gradient, step_online_gradient
from braintrace_core.rules import products as products_module
from braintrace_core.rules.products import loop_products
from tests.core.rules import zoo

WIDE = zoo.FEATURES + zoo.UNITS
ONE = zoo.UNITS * zoo.UNITS  # what a loop has of a weight


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """As on a machine with one device; the tests have several."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def case(join, rows=WIDE, dtype=jnp.float64, bias=True):
    """A gated cell whose products see what ``join`` makes of an input and a state."""
    numbers = jnp.cos(jnp.arange(2.0 * rows * zoo.UNITS)).reshape(2, rows, zoo.UNITS).astype(dtype)
    params = {"gate": numbers[0], "new": numbers[1]} | ({"b": numbers[0, 0]} if bias else {})

    def step(params, h, x):
        gate = jax.nn.sigmoid(join(x, h) @ params["gate"] + params.get("b", numbers[1, 0]))
        new = (1 - gate) * h + gate * jnp.tanh(join(x, gate * h) @ params["new"])
        return new, new

    return zoo.Case(step, params, jnp.zeros(zoo.UNITS, dtype))


def split(case, sizes=(zoo.STEPS, zoo.BATCH), goes_back=True):
    """The places of what is split off, for each operator."""
    x = jnp.zeros((zoo.FEATURES,), case.carry.dtype)
    program = RulePlan.of(compile_step_graph(case.step, case.params, case.carry, x)).program
    schedule, (stage,) = program.schedule, program.schedule.stages
    known = [*program.graph.module_info.input_invars, *stage.ahead.writes]
    products = loop_products(schedule.operators, stage.loop, known, sizes, goes_back).values()
    return [product.ahead for product in products if product.known]


JOINS = {
    "input first": (lambda x, h: jnp.concatenate([x, h]), WIDE, (slice(0, 3),)),
    "state first": (lambda x, h: jnp.concatenate([h, x]), WIDE, (slice(5, 8),)),
    "state between": (lambda x, h: jnp.concatenate([x, h, jnp.sin(x)]), 11, (slice(0, 3), slice(8, 11))),
    "input twice": (lambda x, h: jnp.concatenate([x, h, x]), 11, (slice(0, 3), slice(8, 11))),
    "input between": (lambda x, h: jnp.concatenate([h, x, 2 * h]), 13, (slice(5, 8),)),
}


@pytest.mark.parametrize(("name", "bias"), [*((name, True) for name in JOINS), ("input first", False)])
def test_the_gradient_is_that_of_the_loop(name, bias):
    join, rows, places = JOINS[name]
    net = case(join, rows, bias=bias)
    assert split(net) == [places, places]
    carry, inputs = zoo.batch_of(net)
    reset = zoo.some_resets()
    found, _ = zoo.online(net, TBPTT(), zoo.STEPS, carry, inputs, reset)
    zoo.assert_close(found, zoo.bptt(net, carry, inputs, reset))


def products_of(net, in_loops, **asked):
    """The products inside loops, or outside of them, of a window and its gradient."""
    return equations_of(net, in_loops, ("etp_m", "dot_general"), **asked)


def equations_of(net, in_loops, names, **asked):
    """Some equations inside loops, or outside of them, of a window and its gradient, by how their names begin.

    ``asked``: what gradient; that of all operators and states if nothing is said.
    """
    carry, inputs = zoo.batch_of(net)
    plan = RulePlan.of(compile_step_graph(net.step, net.params, net.carry, inputs[0, 0]))
    program, leaves = plan.program, jax.tree.leaves(net.params)

    def window(carry, inputs):
        loss = lambda window: (zoo.loss_of(window.outputs), None)  # noqa: E731
        *_, gradient = program.value_and_gradient(loss, program.frontier(leaves), [carry], [inputs], **asked)
        return gradient.operators, gradient.present

    found = []

    def walk(jaxpr, inside):
        for eqn in jaxpr.eqns:
            if inside == in_loops and eqn.primitive.name.startswith(names):
                found.append(eqn)
            for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    walk(inner, inside or eqn.primitive.name == "scan")

    walk(jax.make_jaxpr(window)(carry, inputs).jaxpr, False)
    return found


def test_the_loops_see_the_states_share_alone():
    found = [eqn.invars[1].aval.shape for eqn in products_of(case(JOINS["input first"][0]), in_loops=True)]
    assert len(found) >= 4
    assert set(found) == {(zoo.UNITS, zoo.UNITS)}


def test_what_all_gates_see_is_one_product():
    found = [eqn.invars[1].aval.shape for eqn in products_of(case(JOINS["input first"][0]), in_loops=False)]
    assert found == [(zoo.FEATURES, 2 * zoo.UNITS)]


def test_errors_go_back_without_a_transposition_in_the_loop():
    found = products_of(case(JOINS["input first"][0]), in_loops=True)
    back = [eqn.params["dimension_numbers"][0] for eqn in found if eqn.primitive.name == "dot_general"]
    assert len(back) == 2
    assert all(of_weight == (0,) for _, of_weight in back)  # its rows are summed over, as they lie


def test_gradients_can_be_differentiated_once_more():
    """A step of learning is a function of the parameters like any other: its own derivative is not cut off."""
    net = case(JOINS["input first"][0])
    carry, inputs = zoo.batch_of(net)
    plan = RulePlan.of(compile_step_graph(net.step, net.params, net.carry, inputs[0, 0]))
    tree, traces = jax.tree.structure(net.params), zoo.fresh(DRTRL(), plan)

    def ours(params):
        loss = lambda window: (zoo.loss_of(window.outputs), None)  # noqa: E731
        found = online_gradient(plan, DRTRL(), loss, jax.tree.leaves(params), [carry], traces, [inputs])
        return jax.tree.unflatten(tree, found.gradients)

    def learnt(gradient, scale):
        params = jax.tree.map(lambda leaf: leaf * scale, net.params)
        moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient(params))
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(moved))

    by_loop = jax.grad(lambda params: zoo.sequence_loss(net, params, carry, inputs))
    expected = zoo.hurried(jax.grad(partial(learnt, by_loop)))(1.3)
    for derivative in (jax.grad, jax.jacfwd):
        zoo.assert_close(zoo.hurried(derivative(partial(learnt, ours)))(1.3), expected)


def test_a_window_can_be_differentiated_by_its_parameters():
    net = case(JOINS["input first"][0])
    carry, inputs = zoo.batch_of(net)
    program = RulePlan.of(compile_step_graph(net.step, net.params, net.carry, inputs[0, 0])).program

    def value(params):
        window = program.run(program.frontier(jax.tree.leaves(params)), [carry], [inputs])
        return zoo.loss_of(window.outputs)

    zoo.assert_close(zoo.hurried(jax.grad(value))(net.params), zoo.bptt(net, carry, inputs))


def gates(biases, join=JOINS["input first"][0], rows=WIDE, dtypes=(jnp.float64, jnp.float64)):
    """A cell with some gates that see the same, each of its own type; of two, if nothing is said."""
    numbers = jnp.sin(jnp.arange(float(len(dtypes) * rows * zoo.UNITS))).reshape(-1, rows, zoo.UNITS)
    params = {f"w{i}": numbers[i].astype(dtype) for i, dtype in enumerate(dtypes)}
    params |= {f"b{i}": numbers[i, 0].astype(dtypes[i]) for i in biases}

    def step(params, h, x):
        both = join(x, h)
        y = []
        for i, dtype in enumerate(dtypes):
            product = both.astype(dtype) @ params[f"w{i}"]
            y.append((product + params[f"b{i}"] if i in biases else product).astype(h.dtype))
        new = h + jax.nn.sigmoid(y[0]) * (jnp.tanh(y[1]) - h) + x.sum() + sum(jnp.sin(more) for more in y[2:])
        return new, new

    return zoo.Case(step, params, jnp.zeros(zoo.UNITS))


def states_only(x, h):
    return jnp.concatenate([h, 2 * h])


THREE = (jnp.float64,) * 3


@pytest.mark.parametrize(
    ("net", "rows", "together"),
    [
        pytest.param(gates((), dtypes=THREE), zoo.UNITS, 3, id="no bias"),
        pytest.param(gates((0, 1, 2), dtypes=THREE), zoo.UNITS, 3, id="three biases"),
        pytest.param(gates((1,), dtypes=THREE), zoo.UNITS, 3, id="one bias"),  # it is not added in the loop
        pytest.param(gates((0, 1, 2), states_only, 2 * zoo.UNITS, THREE), 2 * zoo.UNITS, 3, id="no input"),
        pytest.param(gates((1,), states_only, 2 * zoo.UNITS, THREE), 2 * zoo.UNITS, 1, id="no input, one bias"),
        pytest.param(gates(()), zoo.UNITS, 1, id="two gates"),
    ],
)
def test_gates_of_one_input_share_a_product_in_the_loop(monkeypatch, net, rows, together):
    monkeypatch.setattr(products_module, "_MOST_ON_ONE_CORE", rows * zoo.UNITS)
    monkeypatch.setattr(products_module, "_WORTH_SEVERAL_CORES", 0)
    count = sum(name.startswith("w") for name in net.params) // together
    found = products_of(net, in_loops=True)
    shape = rows, together * zoo.UNITS
    assert [eqn.invars[1].aval.shape for eqn in found] == [shape] * count + [shape[::-1]] * count
    carry, inputs = zoo.batch_of(net)
    reset = zoo.some_resets()
    gradient, _ = zoo.online(net, TBPTT(), zoo.STEPS, carry, inputs, reset)
    zoo.assert_close(gradient, zoo.bptt(net, carry, inputs, reset))


@pytest.mark.parametrize(
    ("most_on_one_core", "worth_several", "dtypes"),
    [
        pytest.param(ONE - 1, 0, THREE, id="each for several cores"),
        pytest.param(3 * ONE, 0, THREE, id="together for one core"),
        pytest.param(ONE, 3 * ONE * zoo.BATCH + 1, THREE, id="few examples"),
        pytest.param(ONE, 0, (jnp.float64, jnp.float32, jnp.float64), id="other types"),
    ],
)
def test_other_gates_have_products_of_their_own(monkeypatch, most_on_one_core, worth_several, dtypes):
    monkeypatch.setattr(products_module, "_MOST_ON_ONE_CORE", most_on_one_core)
    monkeypatch.setattr(products_module, "_WORTH_SEVERAL_CORES", worth_several)
    assert len(products_of(gates((), dtypes=dtypes), in_loops=True)) == 6


def test_errors_of_gates_meet_before_they_go_back_to_their_input():
    """The states' share of the input is cut out once, and what goes back to it is put in its place once."""
    assert len(equations_of(gates(()), True, ("pad",))) == 1


@pytest.mark.parametrize(
    "net",
    [
        pytest.param(case(lambda x, h: jnp.concatenate([h, 2 * h]), 2 * zoo.UNITS), id="no input"),
        pytest.param(case(JOINS["input first"][0], dtype=jnp.bfloat16), id="short type"),
        pytest.param(case(lambda x, h: jnp.roll(jnp.concatenate([x, h]), 1)), id="moved after joining"),
    ],
)
def test_other_products_stay_whole(net):
    assert not split(net)


ALONE = zoo.Case(
    lambda weight, h, x: 2 * (jnp.tanh(jnp.concatenate([x, h]) @ weight),),
    jnp.cos(jnp.arange(1.0 * WIDE * zoo.UNITS)).reshape(WIDE, zoo.UNITS),
    jnp.zeros(zoo.UNITS),
)


@pytest.mark.parametrize(
    ("net", "sizes", "goes_back", "cut"),
    [
        pytest.param(ALONE, (8, 16), False, 0, id="few steps"),
        pytest.param(ALONE, (9, 1), False, 1, id="more steps"),
        pytest.param(ALONE, (8, 17), False, 1, id="more examples"),
        pytest.param(ALONE, (2, 1), True, 1, id="errors go back"),
        pytest.param(gates(()), (2, 1), False, 2, id="gates of one input"),
        pytest.param(case(JOINS["input first"][0]), (2, 1), False, 2, id="one input beside different states"),
    ],
)
def test_few_steps_do_not_cut_a_weight(net, sizes, goes_back, cut):
    assert len(split(net, sizes, goes_back)) == cut


@pytest.mark.parametrize("goes_back", [False, True])
@pytest.mark.parametrize(
    ("net", "most_on_one_core", "worth_several", "cut"),
    [
        pytest.param(ALONE, ONE, ONE, 0, id="several cores for the whole alone"),
        pytest.param(ALONE, ONE - 1, ONE, 1, id="several cores for what is left too"),
        pytest.param(ALONE, WIDE * zoo.UNITS, ONE, 1, id="one core for the whole too"),
        pytest.param(ALONE, ONE, 17 * WIDE * zoo.UNITS + 1, 1, id="few examples"),
        pytest.param(gates(()), ONE, ONE, 2, id="gates of one input"),
        pytest.param(case(JOINS["input first"][0]), ONE, ONE, 2, id="one input beside different states"),
    ],
)
def test_a_weight_is_not_cut_down_to_what_one_core_takes(
    monkeypatch, net, most_on_one_core, worth_several, cut, goes_back
):
    monkeypatch.setattr(products_module, "_MOST_ON_ONE_CORE", most_on_one_core)
    monkeypatch.setattr(products_module, "_WORTH_SEVERAL_CORES", worth_several)
    assert len(split(net, (16, 17), goes_back)) == cut


def gained(params, h, x):
    h = params["gain"] * ALONE.step(params["weight"], h, x)[0]
    return h, h


GAINED = zoo.Case(gained, {"gain": jnp.ones(zoo.UNITS), "weight": ALONE.params}, ALONE.carry)


@pytest.mark.parametrize(
    ("net", "operators", "rows"),
    [
        pytest.param(ALONE, (), WIDE, id="nothing"),
        pytest.param(ALONE, (0,), zoo.UNITS, id="a product"),
        pytest.param(GAINED, (1,), zoo.UNITS, id="what all steps share"),
    ],
)
def test_a_weight_is_cut_where_errors_go_back_through_the_loop(net, operators, rows):
    asked = {"operators": operators, "want_states": False, "want_present": True}
    found = products_of(net, in_loops=True, **asked)
    assert found[0].invars[1].aval.shape == (rows, zoo.UNITS)
    assert len(found) == 1 + len(operators)


def test_products_stay_whole_on_several_devices(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert not split(case(JOINS["input first"][0]))


def test_one_step_joins_an_input_and_a_state_once():
    """Once for the step itself and its factors, though the latter are those of a window."""

    def step(weight, h, x):
        h = jnp.tanh(jnp.concatenate([x, h]) @ weight)
        return h, h

    net = zoo.Case(step, jnp.ones((WIDE, zoo.UNITS)), jnp.zeros(zoo.UNITS))
    state, inputs = zoo.batch_of(net)
    plan = RulePlan.of(compile_step_graph(net.step, net.params, net.carry, inputs[0, 0]))

    def loss(window):
        return jnp.sum(window.outputs[0]), None

    def run(weight, state, traces, x):
        found = step_online_gradient(plan, DRTRL(), loss, [weight], [state], traces, [x])
        return found.gradients, found.traces, found.states

    traces = DRTRL().init(plan, zoo.BATCH)
    text = jax.jit(run).lower(net.params, state, traces, inputs[:1]).compile().as_text()
    assert len(re.findall(rf" = f64\[(1,)?{zoo.BATCH},{WIDE}\]\S* concatenate\(", text)) == 1
