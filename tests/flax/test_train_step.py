"""``train_step``: one jitted, donated function, and the same numbers as a loop of one's own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import export

import braintrace_flax as braintrace
from braintrace_core.rules import BPTT, EProp
from tests.flax import small

LAST_BITS = 1e-14  # of float64: what two programs of the same operations may differ in

pytestmark = pytest.mark.loose_promotion  # Optax relies on it


def make(window=2, after=None, rule="d_rtrl", credit="window", loss=small.loss, model=None, **options):
    model = model or small.model()
    after = optax.sgd(0.1) if after is None else after
    tx = optax.chain(braintrace.online_grad(model, rule=rule, credit=credit), after)
    return braintrace.train_step(model, tx, window=window, **options)(loss)


class Counted:
    """A loss that knows how often it was traced."""

    def __init__(self):
        self.times = 0

    def __call__(self, outputs, targets):
        self.times += 1
        return small.loss(outputs, targets)


def start(step):
    return step.init(jax.random.key(0))


@pytest.fixture(scope="module")
def adam():
    """A step with Adam, windows of two; five time steps make three windows, the last one short."""
    return make(loss=Counted(), after=optax.adam(0.05))


@pytest.fixture(scope="module")
def still():
    """A step that does not move the parameters."""
    return make(after=optax.set_to_zero(), donate=False)


def test_one_compilation_one_donated_state_one_update_a_window(adam):
    state, data = start(adam), small.data(5)
    before = jax.tree.map(np.array, state.params)
    for calls in (1, 2, 3):
        old, traced = state, adam.loss.times
        state, metrics = adam(old, *data)
        assert calls == 1 or adam.loss.times == traced
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old._replace(key=None)))
        assert state.key is old.key  # the user's
        assert int(state.step) == 3 * calls
        assert metrics["loss"].shape == metrics["skipped"].shape == (3,)
    assert float(metrics["loss"].sum()) < float(adam(start(adam), *data)[1]["loss"].sum())
    assert small.differs(state.params, before)


def by_loop(step, steps, window):
    """The same as a loop of one's own."""
    tx = step.tx
    found = braintrace.value_and_grad(step.model, small.loss, reduction="mean")

    @jax.jit
    def one(params, carry, opt_state, inputs, targets):
        (value, carry), grads, window = found(params, carry, inputs, targets)
        updates, opt_state = tx.update(grads, opt_state, params, online=window)
        return optax.apply_updates(params, updates), carry, opt_state, value

    state, (inputs, targets), values = start(step), small.data(steps), []
    params, carry, opt_state = state.params, state.carry, state.opt_state
    for now in small.windows(steps, window):
        params, carry, opt_state, value = one(params, carry, opt_state, inputs[now], targets[now])
        values.append(float(value))
    return params, carry, opt_state, values


def test_it_is_the_loop_that_one_would_write_bit_for_bit(adam):
    state, _ = adam(start(adam), *small.data(6))
    params, carry, opt_state, _ = by_loop(adam, 6, 2)
    for mine, theirs in zip(
        jax.tree.leaves((state.params, state.carry, state.opt_state)),
        jax.tree.leaves((params, carry, opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, theirs)


def test_it_is_the_loop_that_one_would_write_with_a_shorter_last_window(adam):
    state, metrics = adam(start(adam), *small.data(5))
    params, carry, opt_state, values = by_loop(adam, 5, 2)
    np.testing.assert_allclose(metrics["loss"], values, rtol=LAST_BITS)
    small.assert_same((state.params, state.carry, state.opt_state), (params, carry, opt_state), rtol=LAST_BITS)


class Leaky(nnx.Module):
    """The small model as a module."""

    def __init__(self):
        self.a, self.r, self.w = (nnx.Param(value) for value in small.params_of().values())

    def __call__(self, carry, x):
        return small.step({"a": self.a[...], "r": self.r[...], "w": self.w[...]}, carry, x)

    def initialize_carry(self, input_shape, rngs):
        return jnp.zeros((*input_shape[:-1], small.UNITS))


def test_it_is_the_loop_with_nnx_optimizer(adam):
    state, _ = adam(start(adam), *small.data(6))
    module = Leaky()
    model = braintrace.compile(module, jnp.zeros((small.BATCH, small.FEATURES)))
    tx = optax.chain(braintrace.online_grad(model), optax.adam(0.05))
    optimizer = nnx.Optimizer(module, tx, wrt=nnx.Param)
    found = braintrace.value_and_grad(model, small.loss, reduction="mean")

    @nnx.jit
    def one(module, optimizer, carry, inputs, targets):
        (_, carry), grads, window = found(nnx.state(module, nnx.Param), carry, inputs, targets)
        optimizer.update(module, grads, online=window)
        return carry

    carry, (inputs, targets) = model.initial_carry(), small.data(6)
    for now in small.windows(6, 2):
        carry = one(module, optimizer, carry, inputs[now], targets[now])
    for name, value in state.params.items():
        np.testing.assert_array_equal(getattr(module, name)[...], value)
    np.testing.assert_array_equal(carry, state.carry)


def test_it_can_be_lowered_exported_and_asked_for_shapes(adam):
    shapes = jax.eval_shape(adam.init, jax.random.key(0))
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, start(adam))
    lowered = adam.lower(shapes, *small.data(5)).as_text()
    assert lowered.count("tf.aliasing_output") == len(jax.tree.leaves(shapes))
    exported = export.export(adam.jitted, platforms=["tpu"])(shapes, *small.data(5))
    assert exported.platforms == ("tpu",)
    assert len(exported.out_avals) == len(jax.tree.leaves(shapes)) + 2


def test_windows_of_one_step_can_be_streamed():
    step = make(window=1, donate=False)
    inputs, targets = small.data(3)
    state, metrics = step(start(step), inputs, targets)
    one_by_one, losses = start(step), []
    for t in range(3):
        one_by_one, last = step(one_by_one, inputs[t : t + 1], targets[t : t + 1])
        losses.append(float(last["loss"][0]))
    small.assert_same(one_by_one[:4], state[:4])
    np.testing.assert_allclose(losses, metrics["loss"], rtol=1e-12)
    assert small.differs(state.params, start(step).params)


@pytest.fixture(scope="module")
def next_gradient():
    """The online gradient of one row's loss in a window that follows."""
    found = jax.jit(braintrace.value_and_grad(small.model(), small.loss))
    params, data = small.params_of(), small.data(2, seed=5)

    def of_row(state, row):
        _, grads, window = found(params, state.carry, *data, mask=jnp.zeros((2, small.BATCH)).at[:, row].set(1))
        return small.online().update(grads, state.opt_state[0], params, online=window)[0]

    return of_row


def test_a_reset_starts_one_row_anew(still, next_gradient):
    inputs, targets = small.data(5)
    reset = jnp.zeros((5, small.BATCH), bool).at[1, 0].set(True).at[4, 1].set(True)
    found, _ = still(start(still), inputs, targets, reset)
    whole, _ = still(start(still), inputs, targets)
    for row, first in ((0, 1), (1, 4)):
        fresh, _ = still(start(still), inputs[first:], targets[first:])
        small.assert_same(found.carry[row], fresh.carry[row])
        small.assert_same(next_gradient(found, row), next_gradient(fresh, row))
        assert small.differs(next_gradient(found, row), next_gradient(whole, row))


def test_a_reset_cuts_the_gradient_too():
    """Two short sequences in one row give the sum of their gradients."""
    model = small.model()
    found = jax.jit(braintrace.value_and_grad(model, small.loss))
    (inputs, targets), params, carry = small.data(4), small.params_of(), model.initial_carry()
    reset = jnp.zeros((4, small.BATCH), bool).at[2].set(True)
    _, together, _ = found(params, carry, inputs, targets, reset)
    parts = [found(params, carry, inputs[now], targets[now])[1] for now in small.windows(4, 2)]
    small.assert_same(together, jax.tree.map(jnp.add, *parts))
    assert small.differs(together, found(params, carry, inputs, targets)[1])


def masked_loss(params, inputs, targets, mask):
    """What is left of the loss: the mean over the steps, or steps and examples, that the mask keeps."""
    carry, total = jnp.zeros((small.BATCH, small.UNITS)), 0.0
    for t in range(len(inputs)):
        carry, out = jax.vmap(lambda c, x: small.step(params, c, x))(carry, inputs[t])
        if mask.ndim == 1:
            total += small.loss(out, targets[t]) if mask[t] else 0.0
        else:
            total += sum(small.loss(out[b], targets[t, b]) for b in range(small.BATCH) if mask[t, b])
    return total / mask.sum()


MASKS = {
    "of steps": np.array([True, False, True, False]),
    "of steps and examples": np.array([[True, True], [True, False], [False, False], [True, False]]),
}


@pytest.mark.parametrize("name", MASKS)
def test_masked_steps_neither_train_nor_count(name):
    mask, (inputs, targets), params = MASKS[name], small.data(4), small.params_of()
    value, gradient = jax.value_and_grad(masked_loss)(params, inputs, targets, mask)
    left_out = jnp.asarray(~mask).reshape(*mask.shape, *(1,) * (3 - mask.ndim))

    def loss(outputs, targets):
        worst = jnp.max(jnp.abs(outputs - targets))
        return small.loss(outputs, targets), {"far": worst > 1.0, "seen": jnp.ones((), jnp.int32)}

    model = braintrace.compile(
        lambda params, carry, x: _step_with_offset(params, carry, x),
        (jnp.zeros((small.BATCH, small.FEATURES)), jnp.zeros((small.BATCH, 1))),
        params=params,
        carry=jnp.zeros(small.UNITS),
    )
    found = jax.jit(braintrace.value_and_grad(model, loss, reduction="mean"))
    offset = jnp.where(left_out, jnp.nan, 0.0) * jnp.ones((4, small.BATCH, 1))
    ((mine, metrics), _), grads, _ = found(
        params, model.initial_carry(), (inputs, offset), jnp.where(left_out, jnp.nan, targets), mask=mask
    )
    np.testing.assert_allclose(mine, value, rtol=1e-12)
    small.assert_same(grads, gradient)
    assert float(metrics["seen"]) == 1.0
    assert 0.0 < float(metrics["far"]) <= 1.0


def _step_with_offset(params, carry, x):
    """The small model with something added to its outputs."""
    carry, out = small.step(params, carry, x[0])
    return carry, out + x[1]


def test_sequences_of_different_lengths():
    """What stands behind a sequence's end does not matter, and windows without an example left give no loss."""
    step = make(donate=False)
    inputs, targets = small.data(6)
    mask = jnp.arange(6)[:, None] < jnp.array([4, 1])[None]
    state, metrics = step(start(step), inputs, targets, mask=mask)
    noise = jnp.where(mask[:, :, None], 0.0, 3.0)
    other, other_metrics = step(start(step), inputs + noise, targets - noise, mask=mask)
    small.assert_same(state.params, other.params)
    np.testing.assert_allclose(metrics["loss"], other_metrics["loss"], rtol=1e-12)
    assert float(metrics["loss"][2]) == 0.0 < float(metrics["loss"][1])
    assert small.differs(state.params, start(step).params)


def test_gradients_can_be_accumulated_over_windows():
    step = make(after=optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(), donate=False)
    inputs, targets = small.data(4)
    first = start(step)
    half, _ = step(first, inputs[:2], targets[:2])
    whole, _ = step(half, inputs[2:], targets[2:])
    small.assert_same(half.params, first.params)
    assert small.differs(whole.params, first.params)
    assert small.differs(whole.opt_state[0].traces, half.opt_state[0].traces)
    # Parameters stood still, so the model being exact, both windows together give the gradient of the sequence.
    truth = jax.grad(masked_loss)(first.params, inputs, targets, np.ones(4))
    small.assert_same(whole.params, jax.tree.map(lambda p, g: p - 0.1 * g, first.params, truth), rtol=1e-7)


def test_a_learning_rate_can_change_between_calls():
    model = small.model()
    tx = optax.inject_hyperparams(lambda rate: optax.chain(braintrace.online_grad(model), optax.sgd(rate)))(rate=0.1)
    step = braintrace.train_step(model, tx, window=2, donate=False)(Counted())
    data, first = small.data(2), start(step)
    state, _ = step(first, *data)
    traced = step.loss.times
    state, _ = step(state, *data)
    assert small.differs(state.params, first.params)
    still = first._replace(opt_state=optax.tree.set(first.opt_state, rate=jnp.zeros(())))
    state, _ = step(still, *data)
    small.assert_same(state.params, first.params)
    assert step.loss.times == traced


def test_step_credit_is_exact_where_traces_are():
    step = make(window=None, credit="step", donate=False)
    first, (inputs, targets) = start(step), small.data(4)
    state, _ = step(first, inputs, targets)
    truth = jax.grad(masked_loss)(first.params, inputs, targets, np.ones(4))
    small.assert_same(state.params, jax.tree.map(lambda p, g: p - 0.1 * g, first.params, truth))


def test_back_propagation_with_checkpoints():
    step = make(window=None, rule=BPTT(checkpoint="sqrt"), donate=False)
    first, (inputs, targets) = start(step), small.data(4)
    state, _ = step(first, inputs, targets)
    truth = jax.grad(masked_loss)(first.params, inputs, targets, np.ones(4))
    small.assert_same(state.params, jax.tree.map(lambda p, g: p - 0.1 * g, first.params, truth))


def change(step, *arguments, **named):
    first = start(step)
    state, _ = step(first, *arguments, **named)
    return jax.tree.map(jnp.subtract, state.params, first.params)


def test_a_modulator_is_the_third_factor():
    step = make(rule="three_factor", credit="step", donate=False, window=None)
    inputs, targets = small.data(4)
    modulator = inputs[..., 0]
    one, two, none = (change(step, inputs, targets, modulator=scale * modulator) for scale in (1.0, 2.0, 0.0))
    for name in ("a", "w"):
        np.testing.assert_allclose(two[name], 2 * one[name], rtol=1e-9)
        assert bool(one[name].any())
        assert not bool(none[name].any())
    assert bool(none["r"].any())  # the readout has no trace: it learns from the loss


def test_random_feedback_reaches_the_recurrent_part_alone():
    data = small.data(4)
    symmetric, random = (
        change(make(rule=EProp(feedback=feedback), credit="step", window=None, donate=False), *data)
        for feedback in ("symmetric", "random")
    )
    np.testing.assert_allclose(random["r"], symmetric["r"], rtol=1e-12)
    assert all(small.differs(random[name], symmetric[name]) for name in ("a", "w"))


@pytest.mark.parametrize("rule", ["d_rtrl", "tbptt"])
def test_the_meter_reads_when_due(rule):
    meter = braintrace.rules.QualityMeter(every=2, windows=2)
    step = make(after=optax.set_to_zero(), rule=rule, meter=meter, donate=False)
    data = small.data(8)
    _, metrics = step(step.init(jax.random.key(0), example=data), *data)
    cosine = np.asarray(metrics["gradient_cosine"])
    assert np.isnan(cosine).tolist() == [True, False, True, False]
    if rule == "d_rtrl":  # the ring holds all that there was, and the model is exact
        np.testing.assert_allclose((cosine[1], metrics["gradient_norm_ratio"][1]), 1.0, rtol=1e-9)
    else:
        assert (cosine[[1, 3]] < 1 - 1e-4).all()


def test_the_meter_wants_windows_of_one_length():
    step = make(meter=braintrace.rules.QualityMeter(every=2, windows=2))
    with pytest.raises(ValueError, match=r"`step.init\(key, example=\(inputs, targets\)\)`"):
        start(step)
    state = jax.eval_shape(lambda key: step.init(key, example=small.data(4)), jax.random.key(0))
    with pytest.raises(ValueError, match="5 time steps are no multiple of `window=2`"):
        step.lower(state, *small.data(5))


def test_the_distance_to_back_propagation():
    model, (inputs, targets) = small.model(), small.data(4)
    where = (model, small.params_of(), model.initial_carry())
    table = braintrace.check_against_bptt(*where, inputs, targets, window=1)
    assert [row.name for row in table.rows] == ["a", "r", "w", "all"]
    assert all(row.relative_error < 1e-9 for row in table.rows)
    assert "DRTRL(rows=None), window credit, window of 1, 4 steps, against BPTT" in str(table)
    mask = jnp.asarray(np.random.default_rng(0).random((4, small.BATCH)) < 0.5)
    masked = braintrace.check_against_bptt(*where, inputs, targets, window=1, mask=mask)
    assert all(row.relative_error < 1e-9 for row in masked.rows)
    with pytest.raises(ValueError, match="Nothing to compare: the gradients of a, r, w are zero"):
        braintrace.check_against_bptt(*where, jnp.zeros_like(inputs), targets, window=2)


def test_the_distance_to_back_propagation_of_a_gru():
    cell = nn.GRUCell(3, dtype=jnp.float64, param_dtype=jnp.float64)
    model = braintrace.compile(cell, jnp.zeros((small.BATCH, small.FEATURES)))
    inputs, _ = small.data(4)
    targets = jnp.ones((4, small.BATCH, 3))
    where = (model, model.init(jax.random.key(0)), model.initial_carry(), inputs, targets)
    assert braintrace.check_against_bptt(*where, rule="tbptt", window=1).overall.cosine < 1 - 1e-3
    for credit in ("window", "step"):
        table = braintrace.check_against_bptt(*where, rule="rtrl", window=2, credit=credit)
        assert all(row.relative_error < 1e-9 for row in table.rows), table


def test_what_comes_out_before_a_step_is_learnt_from():
    model = braintrace.compile(
        lambda p, h, x: (0.8 * h + x @ p["w"], jnp.tanh(h) @ p["r"]),
        jnp.zeros((small.BATCH, small.FEATURES)),
        params={"w": jnp.ones((small.FEATURES, 3)), "r": jnp.ones((3, small.FEATURES))},
        carry=jnp.zeros((small.BATCH, 3)),
    )
    inputs, targets = small.data(4)
    where = (model, model.init(jax.random.key(0)), model.initial_carry(), inputs, targets)
    table = braintrace.check_against_bptt(*where, window=2, credit="step")
    assert all(row.relative_error < 1e-9 for row in table.rows), table


def test_a_single_stream_has_no_batch():
    stream, batch = make(model=small.model(None), donate=False), make(model=small.model(1), donate=False)
    inputs, targets = small.data(4, batch=1)
    reset = jnp.zeros((4, 1), bool).at[3].set(True)
    expected, _ = batch(start(batch), inputs, targets, reset)
    found, _ = stream(start(stream), inputs[:, 0], targets[:, 0], reset[:, 0])
    small.assert_same(found.params, expected.params)
    small.assert_same(found.carry, expected.carry[0])
    assert small.differs(found.params, start(stream).params)


@pytest.mark.parametrize("length", [1, 13, 150])
def test_buckets_are_few_lengths_that_add_up(length):
    pieces = braintrace.buckets(length, largest=40)
    assert sum(pieces) == length
    assert set(pieces) <= {32, 16, 8, 4, 2, 1}
    with pytest.raises(ValueError, match="length >= 0 and largest >= 1, got -1 and 4"):
        braintrace.buckets(-1, 4)


def test_weak_types_of_parameters_do_not_compile_twice():
    def leaky(p, h, x):
        h = p["decay"] * h + jnp.tanh(x @ p["w"])
        return h, h @ p["r"]

    weights = lambda key: {**small.params_of(), "decay": jnp.full(small.UNITS, 0.8)}  # noqa: E731
    given = {"decay": jnp.full(small.UNITS, 0.5), **{name: small.params_of()[name] for name in "rw"}}
    model = braintrace.compile(
        leaky,
        jnp.zeros((small.BATCH, small.FEATURES)),
        params=lambda key: {name: value for name, value in weights(key).items() if name != "a"},
        carry=jnp.zeros(small.UNITS),
    )
    step = braintrace.train_step(model, optax.chain(braintrace.online_grad(model), optax.adam(0.1)), window=2)(
        small.loss
    )
    for params in (None, given):
        state = step.init(jax.random.key(0), params)
        for _ in range(2):
            state, _ = step(state, *small.data(4))
    assert step.jitted._cache_size() == 1


def test_arrays_of_the_optimizer_are_not_given_away():
    """A noise's key belongs to the optimizer: each state has a copy."""
    key = jax.random.key(3)
    tx = optax.chain(braintrace.online_grad(small.model()), optax.add_noise(0.01, 0.5, key), optax.sgd(0.1))
    step = braintrace.train_step(small.model(), tx, window=2)(small.loss)
    found = [step(step.init(jax.random.key(0)), *small.data(4))[0].params for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert not key.is_deleted()
