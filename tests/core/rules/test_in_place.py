"""Traces large enough to be worth it are read and written without copies; their numbers stay the same."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import braintrace_core as bc
from braintrace_core.ops import in_place, sums
from braintrace_core.rules import DRTRL, Rule, RulePlan, drtrl, online_gradient, rolling, step_online_gradient
from tests.core.rules import zoo
from tests.core.rules.test_windows_that_do_not_count import check as check_windows

UNIT_WISE, MIXING = zoo.cases()


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """As on a machine with one device; the tests have several."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)


@pytest.fixture
def in_passes(monkeypatch):
    """Small arrays are treated as large ones are, in passes of two steps and rows."""
    monkeypatch.setattr(in_place, "_LARGE", 0)
    monkeypatch.setattr(in_place, "_IN_ONE_PASS", 2)
    monkeypatch.setattr("braintrace_core.ops.sums._ROWS_AT_ONCE", 2)


@pytest.fixture
def example_by_example(in_passes, monkeypatch):
    """Small arrays are treated as those that no cache holds, a few terms as more than a pass takes."""
    for name in ("_LARGE_IN_TURN", "_MOST_IN_CACHE", "_HALF_FIRST_CACHE"):
        monkeypatch.setattr(in_place, name, 0)


def add_outer(kept, terms):
    """Outer products, term by term."""

    def one(kept, term):
        return kept + term[0][:, :, None] * term[1][:, None]

    return in_place.add_in_place(kept, terms, one, lambda kept, _: 0 * kept)


def outer_terms(count, units):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (4, 64, units), (count, 4, 64), (count, 4, units)
    kept, *terms = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return kept, tuple(terms)


@pytest.mark.parametrize("count", [1, 2, 3, 15, 16, 17, 32])
def test_any_number_of_terms_is_added(count):
    kept, terms = outer_terms(count, 64)
    found = jax.jit(add_outer)(kept, terms)
    np.testing.assert_allclose(found, kept + jnp.einsum("tbi,tbo->bio", *terms), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("units", "at_once"), [(64, 16), (256, 8), (1 << 13, 1)])
def test_a_pass_takes_as_many_terms_as_the_first_cache_holds(monkeypatch, units, at_once):
    monkeypatch.setattr(in_place, "_MOST_IN_CACHE", 0)
    kept, terms = outer_terms(20, units)
    jaxpr = str(jax.make_jaxpr(add_outer)(kept, terms))
    assert {int(found) for found in re.findall(r"f64\[(\d+),4,64\] = dynamic_slice", jaxpr)} == {
        at_once,
        (20 - 1) % at_once + 1,
    }


def test_terms_of_a_pass_do_not_all_wait_for_one_another():
    """Sixteen are four sums of four, and then one; in a row, each would wait until the one before it is done."""
    jaxpr = str(jax.make_jaxpr(add_outer)(*outer_terms(16, 128)))
    depth = {}
    for name, of in re.findall(r"(\w+):f64\[4,64,128\] = add (\w+ \w+)", jaxpr):
        depth[name] = 1 + max(depth.get(operand, 0) for operand in of.split())
    assert len(depth) == 16 + 3
    assert max(depth.values()) == 4 + 3


def test_terms_of_an_example_lie_side_by_side():
    """Left a batch apart, they would be read from the same places of a cache, and several times slower."""
    kept, terms = outer_terms(16, 128)
    text = jax.jit(add_outer).lower(kept, terms).compile().as_text()
    assert "(f64[4,1024]{1,0}, f64[4,2048]{1,0}) conditional" in text


@pytest.mark.parametrize(("size", "count"), [(3, 4), (1 << 14, 17)])
def test_what_is_small_or_added_to_often_is_left_to_the_compiler(size, count):
    kept, terms = jnp.zeros((1, size)), jnp.ones((count, 1, size))
    found = in_place.add_in_place(kept, terms, lambda kept, term: jnp.nan, lambda kept, terms: kept)
    assert not found.any()


@pytest.mark.parametrize(("spare", "in_passes"), [(0, False), (-1, True)])
def test_a_product_of_all_terms_needs_a_cache_for_itself_too(monkeypatch, spare, in_passes):
    kept, terms = jnp.zeros((1, 1 << 14)), jnp.ones((17, 1, 1 << 14))
    monkeypatch.setattr(in_place, "_MOST_IN_CACHE", 2 * kept.nbytes + spare)
    found = in_place.add_in_place(kept, terms, lambda kept, term: kept + term, lambda kept, terms: kept)
    assert bool(found.any()) == in_passes


def test_examples_take_turns():
    arrays = {name: jax.random.normal(jax.random.key(i), (3, 4, 5)) for i, name in enumerate("ab")}
    factors, terms = jnp.arange(3.0), jax.random.normal(jax.random.key(2), (7, 3, 5))

    def turn(arrays, factors, terms):
        new = {"a": arrays["b"] * factors[:, None, None], "b": arrays["a"] + terms.sum(0)[:, None]}
        return new, (arrays["a"] - arrays["b"]).sum(0)

    found = jax.jit(lambda *args: in_place.in_turn(turn, *args))(arrays, factors, terms)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, turn(arrays, factors, terms))


@pytest.mark.parametrize(
    ("count", "megabytes", "terms", "interlocked", "expected"),
    [
        *[(2, 16, 1, True, False), (2, 17, 1, True, True), (1, 33, 1, True, True)],
        *[(2, 17, 8, False, False), (2, 17, 9, False, True), (2, 16, 9, False, False), (1, 33, 9, False, False)],
    ],
)
def test_turns_are_taken_where_the_cache_holds_one_example_but_not_all(count, megabytes, terms, interlocked, expected):
    array = np.broadcast_to(np.float32(0), (4, 128 * megabytes, 512))
    assert in_place.is_worth_turns([array] * count, terms, interlocked) == expected


@pytest.mark.parametrize("signal", [0.0, 1.0])
def test_an_array_is_read_only_if_a_signal_speaks(signal):
    array = jnp.full((128, 128), jnp.nan)
    found = jax.jit(lambda a, s: in_place.unless_silent(lambda a, s: (a * s).sum(0), a, s))(
        array, jnp.full((1, 128), signal)
    )
    assert bool(jnp.isnan(found).all()) == bool(signal)


@pytest.mark.parametrize("signal", [0.0, 2.0])
def test_what_is_read_is_added_to_what_there_is(signal):
    read = lambda a, s: (a * s).sum(0)  # noqa: E731
    add = jax.jit(lambda a, s, onto: in_place.unless_silent(read, a, s, onto=onto))
    array, onto = jnp.ones((128, 128)), jnp.arange(128.0)
    np.testing.assert_array_equal(add(array, jnp.full((1, 128), signal), onto), onto + 128 * signal)


@pytest.mark.parametrize("rows", [3, 8, 9, 40])
def test_any_number_of_rows_is_summed(rows):
    of_weights, of_values = jax.random.split(jax.random.key(0))
    weights, values = jax.random.normal(of_weights, (rows, 1, 64)), jax.random.normal(of_values, (rows, 96, 64))
    found = jax.jit(sums.weighted_sum)(weights, values)
    np.testing.assert_allclose(found, (weights * values).sum(0), rtol=1e-9, atol=1e-12)


def test_what_waits_for_a_result_keeps_its_numbers():
    value = jnp.array([1.0, -0.0, jnp.inf])
    for result in (0.0, jnp.inf, -jnp.inf, jnp.nan):
        found = jax.jit(lambda r, v: in_place.after([r], v))(jnp.full(2, result), value)
        assert found.tobytes() == value.tobytes()


@pytest.mark.parametrize(
    ("steps", "width", "apart"),
    [
        (2, 40, False),  # too small to be worth a branch
        (2, 400, True),  # small enough to stay in the second cache
        (20, 400, False),
        (20, 256, True),  # rows a power of two apart
    ],
)
def test_what_is_transposed_is_joined_before(steps, width, apart):
    pieces = [jax.random.normal(jax.random.key(i), (t, 25, width)) for i, t in enumerate((1, steps))]

    def transposed(pieces):
        return in_place.concatenated(pieces).reshape(-1, width).T

    compiled = jax.jit(transposed).lower(pieces).compile()
    assert ("conditional(" in compiled.as_text()) == apart
    np.testing.assert_array_equal(compiled(pieces), np.concatenate(pieces).reshape(-1, width).T)


@pytest.mark.parametrize(("large", "kept_apart"), [((128, 128), True), ((3, 4), False)])
def test_what_a_large_array_is_made_of_is_made_once(large, kept_apart):
    rows, columns = (jnp.arange(float(size)) for size in large)

    def outer(rows, columns):
        return rows[:, None] * in_place.made_once(jnp.sin(columns), [jnp.zeros(large)])[None]

    compiled = jax.jit(outer).lower(rows, columns).compile()
    np.testing.assert_array_equal(compiled(rows, columns), rows[:, None] * jnp.sin(columns)[None])
    assert ("conditional(" in compiled.as_text()) == kept_apart


@pytest.mark.parametrize("credit", ["window", "step"])
def test_one_step_of_one_example(in_passes, monkeypatch, credit):
    """What signals and decays are made of is computed once, not again for each row of the traces that they meet."""
    case = UNIT_WISE["two_states"]
    carry, inputs = jax.tree.map(lambda a: a[:1], zoo.batch_of(case)[0]), zoo.batch_of(case)[1][:, :1]
    made = []
    monkeypatch.setattr(drtrl, "made_once", lambda value, large: made.append(value) or in_place.made_once(value, large))
    monkeypatch.setattr(zoo, "BATCH", 1)
    found, _ = zoo.online(case, DRTRL(), 1, carry, inputs, credit=credit)
    assert len(made) == 2 + 2 * 3  # signals of two states; for each of two operators, the decays of its traces
    zoo.assert_close(found, zoo.bptt(case, carry, inputs))


SOME = ["indrnn", "complex_lru", "two_states", "fused_gates"]


@pytest.mark.parametrize(
    ("way", "name", "credit"),
    [
        *(("in_passes", name, "window") for name in [*SOME, "sparse", "conv", "embedding"]),
        *(("in_passes", name, "step") for name in ("two_states", "conv")),
        *(("example_by_example", name, "window") for name in SOME),
        ("example_by_example", "two_states", "step"),
    ],
)
def test_drtrl_stays_exact(request, way, name, credit):
    request.getfixturevalue(way)
    case = UNIT_WISE[name]
    carry, inputs = zoo.batch_of(case)
    resets = zoo.some_resets()
    found, _ = zoo.online(case, DRTRL(), 4, carry, inputs, resets, credit=credit)
    zoo.assert_close(found, zoo.bptt(case, carry, inputs, resets))


@dataclass(frozen=True)
class Fading(DRTRL):
    def advance(self, traces, factors):
        return super().advance(traces, replace(factors, D=jax.tree.map(lambda d: 0.5 * d, factors.D)))


class AsDefined(Fading):
    """With none of the ways of its own in which D-RTRL combines reading and advancing."""

    gradient_and_advance = Rule.gradient_and_advance
    step_gradient = Rule.step_gradient
    step_gradient_and_advance = Rule.step_gradient_and_advance


@pytest.mark.parametrize("credit", ["window", "step"])
def test_a_rule_made_of_drtrl_advances_its_own_way(example_by_example, credit):
    assert not Fading().minds_windows  # its advance knows nothing of windows that do not count
    case = UNIT_WISE["two_states"]
    carry, inputs = zoo.batch_of(case)
    found, expected = (zoo.online(case, rule, 4, carry, inputs, credit=credit)[0] for rule in (Fading(), AsDefined()))
    zoo.assert_close(found, expected)


def gated(p, carry, x):
    """An LSTM: one of its two states recurs, and the other has a signal too."""
    h, c = carry
    i, f, g = (jnp.concatenate([x, h]) @ p[gate] for gate in "ifg")
    c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return (jnp.tanh(c), c), jnp.tanh(c)


def leaky(p, h, x):
    h = 0.9 * h + jnp.concatenate([x, jnp.tanh(h)]) @ p
    return h, h


def adaptive(p, carry, x):
    """Each of its two states feeds the other: of two traces, each new one is made of both."""
    v, a = carry
    fired = jax.nn.sigmoid(v - a)
    v = 0.9 * (v - fired) + jnp.concatenate([x, fired]) @ p
    return (v, 0.99 * (a + fired)), v


def driven(p, carry, x):
    """One of its two states feeds the other."""
    g, v = carry
    g = 0.7 * g + jnp.concatenate([x, jnp.tanh(v)]) @ p
    return (g, jnp.tanh(v) + g), v


def swinging(p, carry, x):
    """Each of its two states feeds the other, in the same way at every step."""
    a, b = carry
    return (0.9 * a - 0.4 * b + jnp.concatenate([x, jnp.tanh(a)]) @ p, 0.4 * a + 0.9 * b), jnp.tanh(a - b)


UNITS, INPUTS, BATCH = 96, 32, 4


@pytest.mark.parametrize("run", [online_gradient, step_online_gradient])
@pytest.mark.parametrize("window", [1, 4, 20])
@pytest.mark.parametrize("kind", [gated, leaky, adaptive, driven])
def test_no_trace_is_copied(kind, window, run):
    assert copies_of_traces(kind, window, run, BATCH) == 0


@pytest.mark.parametrize("run", [online_gradient, step_online_gradient])
@pytest.mark.parametrize("window", [1, 4, 20])
@pytest.mark.parametrize("kind", [adaptive, swinging])
def test_no_trace_is_copied_in_turns(example_by_example, kind, window, run):
    assert copies_of_traces(kind, window, run, BATCH) == 0


@pytest.mark.parametrize("first_cache", [0, 1 << 15])
@pytest.mark.parametrize("kind", [gated, leaky, adaptive, driven, swinging])
def test_turns_are_for_two_traces_that_are_interlocked_or_added_to_often(
    example_by_example, monkeypatch, kind, first_cache
):
    taken = []
    monkeypatch.setattr(in_place, "_HALF_FIRST_CACHE", first_cache // 2)
    monkeypatch.setattr(rolling, "in_turn", lambda *args: taken.append(kind) or in_place.in_turn(*args))
    copies_of_traces(kind, 20, online_gradient, BATCH)
    assert bool(taken) == (kind is swinging or (kind in (adaptive, driven) and not first_cache))


def test_a_trace_is_written_before_the_next_is_read(monkeypatch):
    """What is written waits for what was read of it, and the next signal for what was written."""
    waits = []

    def after(results, value):
        waits.append(({result.shape for result in results}, value.shape))
        return in_place.after(results, value)

    monkeypatch.setattr(drtrl, "after", after)
    copies_of_traces(gated, 4, online_gradient, BATCH)
    weight, units = (INPUTS + UNITS, UNITS), (BATCH, UNITS)
    expected = [(set(), units), ({weight}, units)] + 2 * [({(BATCH, *weight)}, units), ({weight}, units)]
    assert waits[: len(expected)] == expected


@pytest.mark.parametrize("run", [online_gradient, step_online_gradient])
@pytest.mark.parametrize(("window", "batch"), [(1, 1), (1, BATCH), (4, BATCH)])
def test_of_two_traces_each_made_of_both_one_is_copied(window, batch, run):
    assert copies_of_traces(swinging, window, run, batch) == 1


def copies_of_traces(kind, window, run, batch):
    """How many traces a window copies, by the program."""
    weight = jnp.ones((INPUTS + UNITS, UNITS), jnp.float32)
    params = {gate: weight for gate in "ifg"} if kind is gated else weight
    state = jnp.zeros(UNITS, jnp.float32)
    carry = state if kind is leaky else (state, state)
    plan = RulePlan.of(bc.compile_step_graph(kind, params, carry, jnp.zeros(INPUTS, jnp.float32)))
    rule, leaves = DRTRL(), jax.tree.leaves(params)

    def many(states, traces, inputs):
        def body(now, inputs):
            loss = lambda found: ((found.outputs[0] ** 2).sum(), None)  # noqa: E731
            found = run(plan, rule, loss, leaves, *now, [inputs])
            return (found.states, found.traces), found.gradients

        return lax.scan(body, (states, traces), inputs)

    states = [jnp.zeros((batch, UNITS), jnp.float32) for _ in jax.tree.leaves(carry)]
    inputs = jnp.ones((3, window, batch, INPUTS), jnp.float32)
    compiled = jax.jit(many, donate_argnums=(0, 1)).lower(states, rule.init(plan, batch), inputs).compile()
    return len(re.findall(rf"= f32\[{batch},{INPUTS + UNITS},{UNITS}\]\S* copy\(", compiled.as_text()))


@pytest.mark.parametrize("credit", ["window", "step"])
@pytest.mark.parametrize("name", ["two_states", "fused_gates"])
def test_windows_that_do_not_count(example_by_example, name, credit):
    check_windows(name, DRTRL(), 4, credit)
