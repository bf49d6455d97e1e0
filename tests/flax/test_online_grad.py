"""``online_grad`` is an ordinary Optax transformation: it keeps every promise that one makes, wherever it can stand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import braintrace_flax as braintrace
from tests.flax import small

pytestmark = [pytest.mark.loose_promotion, pytest.mark.several_devices]  # Optax relies on the first


def test_it_chains_and_ignores_what_is_not_its_own():
    tx = optax.chain(small.online(), optax.sgd(0.1))
    assert isinstance(braintrace.online_grad(small.model()), optax.GradientTransformationExtraArgs)
    params, (grads, window) = small.params_of(), small.seen()[0]
    plain, _ = tx.update(grads, tx.init(params), params, online=window)
    more, _ = tx.update(grads, tx.init(params), params, online=window, value=1.0, unknown=None)
    small.assert_same(plain, more)


def test_one_argument_goes_by_those_who_know_it_not():
    """Links that take arguments of their own let ``online`` pass."""
    tx = optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau())
    tx = optax.chain(small.online(), optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update)))
    params, (grads, window) = small.params_of(), small.seen()[0]
    updates, _ = tx.update(grads, tx.init(params), params, online=window, value=jnp.asarray(1.0))
    by_hand = optax.adam(0.1)
    small.assert_same(updates, by_hand.update(grads, by_hand.init(params), params)[0])  # no past yet


def test_carry_gradient_inputs_and_resets_are_all_it_needs():
    """What else a window brings only saves time."""
    inputs, targets = small.data(2, seed=3)
    reset = jnp.zeros((2, small.BATCH), bool).at[1, 0].set(True)
    params, state, carry = small.params_of(), small.updates_of(small.online())[1], small.seen()[-1][1].next_carry
    run = jax.jit(braintrace.value_and_grad(small.model(), small.loss))
    _, grads, window = run(params, carry, inputs, targets, reset)
    bare = braintrace.Window(window.carry, window.carry_grad, inputs, reset)
    expected, found = (small.online().update(grads, state, params, online=online) for online in (window, bare))
    small.assert_same(found, expected)
    assert small.differs(found[0], grads)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"online": 1}, r"needs the parameters: call `tx.update\(grads, opt_state, params, online=window\)`"),
        (
            {"params": 1},
            "needs the window \\(`online=`\\): call `tx.update\\(grads, opt_state, params, online=window\\)`",
        ),
    ],
)
def test_what_is_missing_is_named(arguments, text):
    tx, (grads, window) = optax.chain(small.online(), optax.sgd(0.1)), small.seen()[0]
    known = {"params": small.params_of(), "online": window}
    given = {name: known[name] for name in arguments}
    with pytest.raises(ValueError, match=text):
        tx.update(grads, tx.init(known["params"]), **given)


def test_init_needs_no_values():
    tx, params = optax.chain(braintrace.online_grad(small.model()), optax.adam(0.1)), small.params_of()
    made = tx.init(params)
    kinds = [jax.tree.map(lambda a: (a.shape, a.dtype), made)]
    kinds.append(jax.tree.map(lambda a: (a.shape, a.dtype), jax.jit(tx.init)(params)))
    kinds.append(jax.tree.map(lambda a: (a.shape, a.dtype), jax.eval_shape(tx.init, params)))
    shapes = jax.eval_shape(lambda: params)
    kinds.append(jax.tree.map(lambda a: (a.shape, a.dtype), jax.eval_shape(tx.init, shapes)))
    assert all(kind == kinds[0] for kind in kinds)
    online = braintrace.online_grad(small.model())
    assert jax.tree.map(jnp.shape, online.init(shapes)) == jax.tree.map(jnp.shape, made[0])
    doubled = optax.tree.map_params(tx, lambda p: p + 2, made, transform_non_params=lambda p: p + 1)
    assert all(bool((trace == 1).all()) for trace in doubled[0].traces.values())  # none is taken for a parameter
    assert all(bool((m == 2).all()) for m in jax.tree.leaves(doubled[1][0].mu))


def test_traces_are_a_flat_dict_named_by_parameter_and_relation():
    traces = braintrace.online_grad(small.model()).init({}).traces
    assert {"params/w@1.weight.0", "params/a@0.weight.0"} <= set(traces)
    assert all(isinstance(trace, jax.Array) and trace.shape[0] == small.BATCH for trace in traces.values())


def test_state_is_found_by_name_and_changed_by_name():
    tx = optax.chain(small.online(), optax.adam(0.1))
    _, state = small.updates_of(tx)
    found = optax.tree.get(state, "OnlineGradState")
    assert isinstance(found, braintrace.OnlineGradState)
    traces = optax.tree.get(state, "traces")
    assert traces is found.traces
    assert any(bool(trace.any()) for trace in traces.values())
    assert int(optax.tree.get(state, "count")) == 3  # Adam's
    twice = optax.tree.set(state, traces={name: 2 * trace for name, trace in traces.items()})
    small.assert_same(twice[0].traces["params/w@1.weight.0"], 2 * traces["params/w@1.weight.0"])


def test_reset_traces_clears_the_past_and_nothing_else():
    tx = optax.chain(small.online(), optax.adam(0.1))
    _, state = small.updates_of(tx)
    cleared = braintrace.reset_traces(state)
    assert not any(bool(trace.any()) for trace in cleared[0].traces.values())
    small.assert_same(cleared[1], state[1])
    params, (grads, window) = small.params_of(), small.seen()[2]
    without_past, _ = small.online().update(grads, cleared[0], params, online=window)
    small.assert_same(without_past, grads)
    assert small.differs(small.online().update(grads, state[0], params, online=window)[0], grads)


def test_its_repr_can_be_read():
    state = braintrace.online_grad(small.model(), rule="pp_prop", trace_dtype=jnp.bfloat16).init({})
    lines = repr(state).splitlines()
    assert lines[0] == "OnlineGradState(PPProp(decay=0.9), credit='window', 4 traces, 0.00 MiB"
    assert any(line.strip() == "params/w@1.x: bfloat16[2, 2]" for line in lines)
    assert repr(jax.tree.map(lambda a: "here", state)).startswith("OnlineGradState(traces={")


def test_state_keeps_its_types_in_jit_scan_and_cond():
    tx = optax.chain(braintrace.online_grad(small.model()), optax.sgd(0.1))
    params = small.params_of()
    over = jax.tree.map(lambda *a: jnp.stack(a), *small.seen())
    traced = []

    @jax.jit
    def update(grads, state, window):
        traced.append(1)
        return tx.update(grads, state, params, online=window)

    state = tx.init(params)
    for grads, window in small.seen():
        updates, new = update(grads, state, window)
        assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
        state = new
    assert len(traced) == 1

    def scanned(state, now):
        used = lambda: tx.update(now[0], state, params, online=now[1])  # noqa: E731
        unused = lambda: (jax.tree.map(jnp.zeros_like, now[0]), state)  # noqa: E731
        updates, state = jax.lax.cond(now[0]["a"][0] < 1e9, used, unused)
        return state, updates

    last, all_updates = jax.jit(lambda state: jax.lax.scan(scanned, state, over))(tx.init(params))
    small.assert_same(last, state)
    small.assert_same(jax.tree.map(lambda a: a[-1], all_updates), updates)


def test_updates_have_the_dtype_of_parameters_and_traces_their_own():
    model = braintrace.compile(
        small.step,
        jnp.zeros((2, small.FEATURES), jnp.bfloat16),
        params=small.params_of(dtype=jnp.bfloat16),
        carry=jnp.zeros(small.UNITS, jnp.bfloat16),
    )
    tx = braintrace.online_grad(model, trace_dtype=jnp.float32)
    params, (inputs, targets) = model.init(jax.random.key(0)), small.data(2)
    inputs, targets = inputs.astype(jnp.bfloat16), targets.astype(jnp.bfloat16)

    @jax.jit
    def update(carry, state):
        (_, carry), grads, window = braintrace.value_and_grad(model, small.loss)(params, carry, inputs, targets)
        wider = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return carry, *tx.update(wider, state, params, online=window)

    carry, updates, state = update(model.initial_carry(), tx.init(params))
    carry, updates, state = update(carry, state)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
    assert state.traces["params/w@1.weight.0"].dtype == jnp.float32
    assert all(bool(leaf.any()) for leaf in jax.tree.leaves(updates))


def labels(params):
    return {name: "slow" if name == "a" else "fast" for name in params}


def every_other(count):
    return jnp.where(count % 2 == 0, 0.1, 0.3)


AFTER = {
    "clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(0.1)),
    "masked": lambda: optax.masked(optax.scale(3.0), {"a": True, "r": False, "w": True}),
    "partition": lambda: optax.partition({"slow": optax.sgd(0.01), "fast": optax.adam(0.1)}, labels),
    "MultiSteps": lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "a schedule": lambda: optax.sgd(every_other),
    "adamw with a mask": lambda: optax.adamw(0.1, weight_decay=0.5, mask={"a": False, "r": True, "w": True}),
}


@pytest.mark.parametrize("name", AFTER)
def test_what_stands_after_it_gets_online_gradients(name):
    after = optax.with_extra_args_support(AFTER[name]())
    after = optax.GradientTransformationExtraArgs(after.init, jax.jit(after.update))
    found, state = small.updates_of(optax.chain(small.online(), after))
    expected, by_hand = small.updates_of(after, by_hand=True)
    small.assert_same(found, expected)
    small.assert_same(state[1], by_hand)
    assert any(bool(leaf.any()) for leaf in jax.tree.leaves(found))
    without, _ = small.updates_of(after)  # the window's own gradients, without the past
    assert small.differs(found, without)


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: optax.masked(tx, {"a": True, "r": False, "w": True}),
        lambda tx: optax.partition({"slow": optax.sgd(0.1), "fast": tx}, labels),
    ],
    ids=["masked", "partition"],
)
def test_masks_around_it_are_refused(around):
    tx = around(optax.chain(braintrace.online_grad(small.model()), optax.sgd(0.1)))
    with pytest.raises(ValueError, match=r"Put it first: `optax.chain\(online_grad\(model\), optax.masked\(...\)\)`"):
        small.updates_of(tx)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda tx: optax.MultiSteps(tx, 2), "inside `optax.MultiSteps`"),
        (lambda tx: optax.apply_if_finite(tx, 2), "inside `optax.apply_if_finite`"),
        (lambda tx: optax.masked(tx, {"a": True, "r": True, "w": True}), "inside `optax.masked`"),
        (lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx), "not the first link of the chain"),
        (lambda tx: optax.chain(optax.adam(0.1), tx), "not the first link of the chain"),
    ],
    ids=["MultiSteps", "apply_if_finite", "masked", "clip before", "adam before"],
)
def test_train_step_refuses_what_stands_before_or_around_it(make, text):
    tx = make(optax.chain(braintrace.online_grad(small.model()), optax.sgd(0.1)))
    with pytest.raises(ValueError, match=text):
        braintrace.train_step(small.model(), tx)


def test_state_can_be_donated_whole():
    tx = optax.chain(braintrace.online_grad(small.model()), optax.sgd(0.1, momentum=0.9))
    params, (grads, window) = small.params_of(), small.seen()[0]
    state = tx.init(params)
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((params, state))]
    assert len(set(places)) == len(places)
    update = jax.jit(lambda state: tx.update(grads, state, params, online=window), donate_argnums=0)
    _, new = update(state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(new)]
    assert len(set(places)) == len(places)


def test_shardings_survive_an_update():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    tx, params = small.online(), small.params_of()

    def place(a):
        split = a.ndim > 0 and a.shape[0] == small.BATCH
        return NamedSharding(mesh, PartitionSpec("data") if split else PartitionSpec())

    state = tx.init(params)
    placed = jax.device_put(state, jax.tree.map(place, state))
    wanted = jax.tree.map(lambda a: a.sharding, placed)
    for grads, window in small.seen():
        arguments = jax.device_put((grads, params), NamedSharding(mesh, PartitionSpec()))
        updates, placed = tx.update(arguments[0], placed, arguments[1], online=window)
        alone, state = tx.update(grads, state, params, online=window)
    small.assert_same(updates, alone)
    for name, trace in placed.traces.items():
        assert trace.sharding.is_equivalent_to(wanted.traces[name], trace.ndim), name


def test_hyperparameters_may_be_injected_around_it():
    @optax.inject_hyperparams
    def optimizer(learning_rate, decay):
        return optax.chain(small.online(), optax.add_decayed_weights(decay), optax.sgd(learning_rate))

    found, state = small.updates_of(optimizer(learning_rate=every_other, decay=0.2))
    expected, _ = small.updates_of(optax.chain(optax.add_decayed_weights(0.2), optax.sgd(every_other)), by_hand=True)
    small.assert_same(found, expected, rtol=1e-6)
    assert float(optax.tree.get(state, "decay")) == pytest.approx(0.2)


def test_a_window_that_is_not_finite_is_left_out_and_counted():
    tx, params, (grads, window) = small.online(), small.params_of(), small.seen()[1]
    _, state = tx.update(*small.seen()[0][:1], tx.init(params), params, online=small.seen()[0][1])
    broken = {**grads, "w": grads["w"].at[0, 0].set(jnp.nan)}
    updates, after = tx.update(broken, state, params, online=window)
    assert int(after.skipped) == 1
    assert not any(bool(leaf.any()) for leaf in jax.tree.leaves(updates))
    small.assert_same(after.traces, state.traces)
    updates, after = tx.update(grads, after, params, online=window)
    small.assert_same(updates, tx.update(grads, state, params, online=window)[0])
    assert int(after.skipped) == 1


def test_traces_that_are_broken_start_anew():
    tx, params, (grads, window) = small.online(), small.params_of(), small.seen()[1]
    state = tx.init(params)
    state = state._replace(traces=jax.tree.map(lambda trace: jnp.full_like(trace, jnp.inf), state.traces))
    _, after = tx.update(grads, state, params, online=window)
    assert int(after.skipped) == 1
    small.assert_same(tx.update(grads, after, params, online=window)[0], grads)


def test_parameters_go_by_the_same_names_in_linen_and_nnx():
    """``nnx.Optimizer`` spells a parameter in two ways: with its wrapper in ``init``, without it in ``update``."""

    class Leaky(nnx.Module):
        def __init__(self):
            self.w, self.a = nnx.Param(small.params_of()["w"]), nnx.Param(small.params_of()["a"])
            self.r = nnx.Param(small.params_of()["r"])

        def __call__(self, carry, x):
            return small.step({"w": self.w[...], "a": self.a[...], "r": self.r[...]}, carry, x)

        def initialize_carry(self, input_shape, rngs):
            return jnp.zeros((*input_shape[:-1], small.UNITS))

    module = Leaky()
    model = braintrace.compile(module, jnp.zeros((2, small.FEATURES)))
    online = braintrace.online_grad(model)
    assert set(online.init({}).traces) == set(small.online().init({}).traces)
    tx = optax.chain(optax.GradientTransformationExtraArgs(online.init, jax.jit(online.update)), optax.sgd(0.1))
    optimizer = nnx.Optimizer(module, tx, wrt=nnx.Param)
    inputs, targets = small.data(4)
    carry, found = model.initial_carry(), jax.jit(braintrace.value_and_grad(model, small.loss))
    for now in small.windows(4, 2):
        params = nnx.state(module, nnx.Param)
        (_, carry), grads, window = found(params, carry, inputs[now], targets[now])
        optimizer.update(module, grads, online=window)
    assert int(optimizer.step[...]) == 2

    plain, params, state = small.online(), small.params_of(), small.online().init({})
    carry, found = small.model().initial_carry(), jax.jit(braintrace.value_and_grad(small.model(), small.loss))
    for now in small.windows(4, 2):
        (_, carry), grads, window = found(params, carry, inputs[now], targets[now])
        updates, state = plain.update(grads, state, params, online=window)
        params = jax.tree.map(lambda p, u: p - 0.1 * u, params, updates)
    for name, value in params.items():
        np.testing.assert_allclose(getattr(module, name)[...], value, rtol=1e-12)


def test_a_module_with_examples_is_compiled_on_the_way():
    example = jnp.zeros((2, 3), jnp.float32)
    found = braintrace.online_grad(nn.SimpleCell(4), example).init({}).traces
    expected = braintrace.online_grad(braintrace.compile(nn.SimpleCell(4), example)).init({}).traces
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, expected)
    tx = optax.chain(braintrace.online_grad(nn.SimpleCell(4), example), optax.sgd(0.1))
    step = braintrace.train_step(nn.SimpleCell(4), tx)(small.loss)  # an equal module is the same
    assert step.model.batch_size == 2
