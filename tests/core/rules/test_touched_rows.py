"""D-RTRL with traces of the rows of a table that were looked up: exact while they have room, and honest beyond."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_core import compile_step_graph
from braintrace_core.rules import DRTRL, RulePlan, get_rule
from tests.core.rules import zoo

TABLE, UNITS, PLACES = 40, 4, 5


def case_of(name):
    draw = np.random.default_rng(0)
    table, decay = jnp.asarray(draw.normal(size=(TABLE, UNITS))), jnp.asarray(draw.uniform(0.5, 0.9, size=UNITS))
    if name == "two_states":

        def step(p, carry, x):
            v, a = carry
            v = p["d"] * v - 0.3 * a + jnp.tanh(p["e"][x.astype(int)])
            return (v, 0.9 * a + 0.2 * v), v

        return zoo.Case(step, {"e": table, "d": decay}, (jnp.zeros(UNITS), jnp.zeros(UNITS)))
    if name == "of_many":

        def step(p, h, x):
            h = p["d"][None] * h + jnp.tanh(p["e"][jnp.stack([x, x + 1]).astype(int)])
            return h, h

        return zoo.Case(step, {"e": table, "d": decay}, jnp.zeros((2, UNITS)))

    def step(p, h, x):
        h = p["d"] * h + jnp.tanh(p["e"][x.astype(int)])
        return h, h

    return zoo.Case(step, {"e": table, "d": decay}, jnp.zeros(UNITS))


def tokens(distinct, steps=12, rows=3):
    """Tokens of which each example has a few only, other ones than its neighbour; from the end of the table too."""
    draw = np.random.default_rng(1)
    return jnp.asarray(
        np.stack([draw.choice(np.arange(10 * b, 10 * b + distinct), steps) for b in range(rows)], 1).astype(float)
    )


def carry_of(case, rows=3):
    return jax.tree.map(lambda c: jnp.broadcast_to(c, (rows, *c.shape)), case.carry)


def lost(traces):
    return sum(int(trace.sum()) for name, trace in traces.items() if name.endswith("rows.lost"))


@pytest.mark.parametrize("name", ["plain", "two_states", "of_many"])
@pytest.mark.parametrize("credit", ["window", "step"])
@pytest.mark.parametrize("window", [1, 4])
def test_exact_while_there_is_room(name, credit, window):
    case, inputs = case_of(name), tokens(PLACES)
    carry = carry_of(case)
    found, traces = zoo.online(case, DRTRL(rows=PLACES), window, carry, inputs, credit=credit)
    zoo.assert_close(found, zoo.bptt(case, carry, inputs))
    assert lost(traces) == 0
    assert not any(TABLE in trace.shape for trace in traces.values())
    assert any(name.endswith("rows.0") for name in traces)


def test_room_is_needed_for_one_sequence_at_a_time():
    """Rows of the sequence before a reset give way, also those that are looked up again."""
    case = case_of("plain")
    inputs = jnp.concatenate([tokens(PLACES), tokens(PLACES) + 3])
    reset = jnp.zeros(inputs.shape, bool).at[12].set(True)
    carry = carry_of(case)
    found, traces = zoo.online(case, DRTRL(rows=PLACES), 4, carry, inputs, reset)
    zoo.assert_close(found, zoo.bptt(case, carry, inputs, reset))
    assert lost(traces) == 0


def test_what_is_lost_is_counted_and_the_newest_are_kept():
    case, inputs = case_of("plain"), tokens(9, steps=40)
    carry = carry_of(case)
    all_rows, _ = zoo.online(case, DRTRL(), 4, carry, inputs)
    few, traces = zoo.online(case, DRTRL(rows=PLACES), 4, carry, inputs)
    assert lost(traces) > 0
    name = next(name for name in traces if name.endswith("rows.ids"))
    newest = [set(list(dict.fromkeys(np.asarray(inputs)[::-1, b].astype(int)[1:]))[:PLACES]) for b in range(3)]
    kept = np.asarray(traces[name]).reshape(3, PLACES) - 1
    assert [set(row) for row in kept] == newest
    error = np.abs(np.asarray(few["e"] - all_rows["e"])).max()
    assert 0 < error < 0.5 * np.abs(np.asarray(all_rows["e"])).max()


@pytest.mark.parametrize("window", [1, 3])
def test_a_row_does_not_inherit_the_trace_whose_place_it_takes(window):
    case = case_of("plain")
    inputs = jnp.asarray([[float(min(t, PLACES))] * 3 for t in range(PLACES + 7)])  # the last one takes the first one's
    carry = carry_of(case)
    all_rows, _ = zoo.online(case, DRTRL(), window, carry, inputs)
    few, traces = zoo.online(case, DRTRL(rows=PLACES), window, carry, inputs)
    assert lost(traces) == 3
    np.testing.assert_allclose(few["e"][1:], all_rows["e"][1:], rtol=1e-9, atol=1e-12)
    assert np.abs(np.asarray(few["e"] - all_rows["e"])[0]).max() > 1e-6


@pytest.mark.parametrize("cuts", [1, 2, 6])
def test_windows_may_be_split_anywhere(cuts):
    case, inputs = case_of("two_states"), tokens(PLACES)
    carry = carry_of(case)
    _, whole = zoo.online(case, DRTRL(rows=PLACES), 12, carry, inputs)
    _, parts = zoo.online(case, DRTRL(rows=PLACES), cuts, carry, inputs)
    for key in whole:
        np.testing.assert_allclose(parts[key], whole[key], rtol=1e-9, atol=1e-11, err_msg=key)


def test_memory_is_that_of_the_places():
    case = case_of("plain")
    plan = RulePlan.of(compile_step_graph(case.step, case.params, case.carry, jnp.zeros(())))
    few, all_rows = (rule.bytes(plan, 3) for rule in (DRTRL(rows=PLACES), DRTRL()))
    shared = DRTRL().bytes(plan, 3) - 3 * TABLE * UNITS * 8
    assert few == shared + 3 * PLACES * UNITS * 8 + 2 * 3 * PLACES * 4 + 3 * 4
    assert few < all_rows / 4
    assert DRTRL(rows=TABLE).bytes(plan, 3) == all_rows  # room for all: there is nothing to look up
    short = DRTRL(rows=PLACES).init(plan, 3, jnp.bfloat16)
    assert {str(t.dtype) for n, t in short.items() if n.endswith("rows.0")} == {"bfloat16"}


@pytest.mark.parametrize("rows", [0, -1, 2.0, True])
def test_rows_must_be_a_number(rows):
    with pytest.raises(ValueError, match="`rows` is how many rows to follow"):
        get_rule(DRTRL(rows=rows))
