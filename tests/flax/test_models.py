"""Kinds of models other than stock cells: where hidden state lives, what else is carried, what stands around a cell."""

from __future__ import annotations

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import lax

import braintrace_flax as braintrace
from tests.flax import zoo
from tests.flax.zoo import BATCH, DOUBLE, FEATURES, TOKENS, UNITS

STEPS = 4
EXAMPLE = jax.ShapeDtypeStruct((BATCH, FEATURES), jnp.float64)
CARRY = jnp.zeros((BATCH, UNITS))


def check(model, unroll, tolerance=1e-10):
    """A whole sequence gives the gradient of ``unroll(params, inputs)``; steps come closer than without traces."""
    sets = zoo.data(model, 0, STEPS)
    truth = zoo.bptt(unroll)(*sets)
    zoo.assert_same(zoo.online(model, "d_rtrl", STEPS)(*sets)[0], truth, tolerance)
    found, truncated = zoo.online(model, "d_rtrl", 1)(*sets)
    assert all(np.abs(leaf).max() > 0 for leaf in zoo.leaves(found))
    assert zoo.distance(found, truth) < zoo.distance(truncated, truth)
    return sets, found, truth


def with_memory(module, memory):
    """A Linen module's own loop, with what it keeps from step to step in collections."""

    def unroll(params, inputs):
        def at(memory, x):
            out, memory = module.apply({"params": params, **memory}, x, mutable=list(memory))
            return memory, out

        return lax.scan(at, memory, inputs)[1]

    return unroll


class Remembers(linen.Module):
    """Hidden state in a collection; it starts from a half."""

    @linen.compact
    def __call__(self, x):
        h = self.variable("memory", "h", lambda: jnp.full((*x.shape[:-1], UNITS), 0.5))
        h.value = jnp.tanh(linen.Dense(UNITS, **DOUBLE)(x) + linen.Dense(UNITS, **DOUBLE)(h.value))
        return h.value


def test_hidden_state_in_a_collection():
    model = braintrace.compile(Remembers(), EXAMPLE)
    first = {"memory": {"h": jnp.full((BATCH, UNITS), 0.5)}}
    zoo.assert_same(model.initial_carry(), first)
    check(model, with_memory(Remembers(), first))


def test_hidden_state_of_a_module_inside():
    class Outer(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(2, **DOUBLE)(Remembers(name="inner")(x))

    model = braintrace.compile(Outer(), EXAMPLE)
    zoo.assert_same(model.initial_carry(), {"memory": {"inner": {"h": jnp.full((BATCH, UNITS), 0.5)}}})


class HiddenVariable(nnx.Module):
    """Units that leak, each by itself; they start from a half."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(FEATURES, UNITS, rngs=rngs, **DOUBLE)
        self.decay = nnx.Param(jnp.full(UNITS, 0.8))
        self.h = braintrace.Hidden(jnp.full(UNITS, 0.5))

    def __call__(self, x):
        self.h[...] = jnp.tanh(self.decay[...]) * self.h[...] + self.dense(x)
        return jnp.tanh(self.h[...])


def test_hidden_state_in_a_variable_is_exact_where_units_do_not_mix():
    module = HiddenVariable(nnx.Rngs(0))
    graph, _ = nnx.split(module)
    start = jnp.full(UNITS, 0.5)

    def unroll(params, inputs):
        def at(h, x):
            copy = nnx.merge(graph, params, nnx.State({"h": braintrace.Hidden(h)}))
            out = copy(x)
            return copy.h[...], out

        return jax.vmap(lambda x: lax.scan(at, start, x)[1], in_axes=1, out_axes=1)(inputs)

    model = braintrace.compile(module, EXAMPLE)
    _, found, truth = check(model, unroll)
    zoo.assert_same(found, truth)
    zoo.assert_same(nnx.state(module, braintrace.Hidden), nnx.State({"h": braintrace.Hidden(start)}))


class Speaker(linen.Module):
    """Tokens in, logits out: tied embedding, a residual stack of two kinds of cells, norms, remat."""

    @linen.compact
    def __call__(self, carry, token):
        embed = linen.Embed(TOKENS, UNITS, **DOUBLE)
        x = embed(token)
        lower, h = linen.remat(linen.GRUCell)(UNITS, **DOUBLE)(carry["lower"], x)
        x = linen.LayerNorm(**DOUBLE)(x + h)
        drive = linen.RMSNorm(**DOUBLE)(linen.Dense(UNITS, **DOUBLE)(x) + linen.Dense(UNITS, **DOUBLE)(carry["upper"]))
        upper = 0.7 * carry["upper"] + jnp.tanh(drive)
        return {"lower": lower, "upper": upper}, embed.attend(x + upper)


@pytest.mark.loose_promotion  # LayerNorm asks which of float32 and float64 is wider
def test_a_residual_stack_between_tied_embeddings():
    carry = {"lower": CARRY, "upper": CARRY}
    model = braintrace.compile(Speaker(), jax.ShapeDtypeStruct((BATCH,), jnp.int32), carry=carry)
    check(model, zoo.linen_loop(Speaker(), carry))


class NnxSpeaker(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(TOKENS, UNITS, rngs=rngs, **DOUBLE)
        self.cell = nnx.SimpleCell(UNITS, UNITS, rngs=rngs, **DOUBLE)

    def __call__(self, carry, token):
        carry, h = nnx.remat(lambda cell, carry, x: cell(carry, x))(self.cell, carry, self.embed(token))
        return carry, self.embed.attend(h)


def test_tied_embeddings_and_remat_in_nnx():
    module = NnxSpeaker(nnx.Rngs(0))
    graph = nnx.graphdef(module)

    def unroll(params, inputs):
        return lax.scan(lambda c, x: nnx.merge(graph, params, copy=True)(c, x), CARRY, inputs)[1]

    check(braintrace.compile(module, jax.ShapeDtypeStruct((BATCH,), jnp.int32), carry=CARRY), unroll)


class Seer(linen.Module):
    """Images in, through a convolution."""

    @linen.compact
    def __call__(self, carry, x):
        x = jnp.tanh(linen.Conv(2, (2, 2), padding="VALID", **DOUBLE)(x))
        carry, h = linen.SimpleCell(UNITS, **DOUBLE)(carry, x.reshape(*x.shape[:-3], -1))
        return carry, linen.Dense(2, **DOUBLE)(h)


def test_a_convolution_in_front():
    model = braintrace.compile(Seer(), jax.ShapeDtypeStruct((BATCH, *zoo.IMAGE), jnp.float64), carry=CARRY)
    assert not model.is_batched
    check(model, zoo.linen_loop(Seer(), CARRY))


def test_mixed_precision():
    module = linen.OptimizedLSTMCell(UNITS, dtype=jnp.bfloat16, carry_init=linen.initializers.zeros)
    carry = (jnp.zeros((BATCH, UNITS), jnp.bfloat16),) * 2
    model = braintrace.compile(module, jnp.zeros((BATCH, FEATURES), jnp.bfloat16), carry=carry)
    sets, found, _ = check(model, zoo.linen_loop(module, carry), tolerance=0.05)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    traces = braintrace.online_grad(model).init(sets[0]).traces
    assert {str(trace.dtype) for name, trace in traces.items() if "kernel" in name and trace.ndim > 2} == {"float32"}
    exact = linen.OptimizedLSTMCell(UNITS)
    start = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), carry)
    truth = zoo.bptt(zoo.linen_loop(exact, start))(sets[0], *(a.astype(jnp.float32) for a in sets[1:]))
    assert zoo.cosine(found, truth) > 0.9


class Normalised(linen.Module):
    """Batch statistics, and dropout if asked for, between a layer and a cell; all in float32, as the statistics are."""

    rate: float = 0.0

    @linen.compact
    def __call__(self, carry, x):
        x = linen.BatchNorm(use_running_average=False, momentum=0.5, use_fast_variance=False)(
            linen.Dense(UNITS, use_bias=False)(x)
        )
        x = linen.Dropout(self.rate, deterministic=False)(x)
        return linen.GRUCell(UNITS)(carry, x)


def test_batch_statistics_are_carried_along():
    rows = 5  # with two, a normalised value is about one whatever comes in, and its gradient rounding
    carry, example = jnp.zeros((rows, UNITS), jnp.float32), jnp.zeros((rows, FEATURES), jnp.float32)
    model = braintrace.compile(Normalised(), example, carry=carry)
    assert model.is_batched
    last = model.report().splitlines()[-1]
    assert last.startswith("carried along, no hidden state (no gradient goes through): state/batch_stats/")
    stats = Normalised().init(jax.random.key(0), carry, example)["batch_stats"]

    def loop(params, inputs):
        def at(before, x):
            carry, stats = before
            variables = {"params": params, "batch_stats": stats}
            (carry, out), changed = Normalised().apply(variables, carry, x, mutable=["batch_stats"])
            return (carry, changed["batch_stats"]), out

        return lax.scan(at, (carry, stats), inputs)

    sets, *_ = check(model, lambda params, inputs: loop(params, inputs)[1], 1e-5)
    run = braintrace.value_and_grad(model, zoo.squared_error)
    (_, after), *_ = zoo.hurried(run)(sets[0], model.initial_carry(), *sets[1:])
    zoo.assert_same(after["state"]["batch_stats"], loop(*sets[:2])[0][1], 1e-5)


def test_batch_statistics_next_to_dropout_are_of_the_batch():
    carry = jnp.zeros((BATCH, UNITS), jnp.float32)
    model = braintrace.compile(Normalised(0.5), jnp.zeros((BATCH, FEATURES), jnp.float32), carry=carry)
    assert model.is_batched
    assert jax.tree.leaves(model.carry_shape["state"])[0].shape == (UNITS,)


class Centred(linen.Module):
    """What goes in has its mean over the batch taken off, or a part of it."""

    units: int = UNITS
    part: float = 1.0
    rate: float = 0.0

    @linen.compact
    def __call__(self, carry, x):
        x = linen.Dense(self.units)(x)
        x = linen.Dropout(self.rate, deterministic=self.rate == 0)(x - self.part * x.mean(0, keepdims=True))
        return linen.SimpleCell(self.units)(carry, x)


@pytest.mark.parametrize("options", [{}, {"rate": 0.5}, {"part": 1e-3}, {"units": 1500}])
def test_a_mean_over_the_batch_is_seen(options):
    """Next to dropout, where it is weak, and in a model of millions of parameters."""
    module = Centred(**options)
    model = braintrace.compile(
        module, jnp.zeros((3, FEATURES), jnp.float32), carry=jnp.zeros(module.units, jnp.float32)
    )
    assert model.is_batched


@pytest.mark.loose_promotion
def test_the_report_says_that_a_batch_is_a_whole():
    """As it is where a step of one example is given a batch that happens to fit: its gate meets rows, not examples."""

    def step(p, s, x):
        s = s + jax.nn.sigmoid(x @ p["gate"]) * jnp.einsum("...i,...j->...ij", x @ p["a"], x @ p["b"])
        return s, s

    params = {"gate": jnp.ones((FEATURES, 1)), "a": jnp.ones((FEATURES, UNITS)), "b": jnp.ones((FEATURES, UNITS))}
    for batch, whole in ((UNITS, True), (UNITS + 1, False)):
        model = braintrace.compile(step, jnp.zeros((batch, FEATURES)), params=params, carry=jnp.zeros((UNITS, UNITS)))
        assert model.is_batched == whole
        assert ("broadcasts against the batch" in model.report()) == whole
        assert (f"batch of {batch}, as a whole" in repr(model)) == whole


def test_numbers_that_a_model_cannot_take_do_not_couple_its_batch():
    def step(p, h, x):
        h = jnp.tanh(jnp.log(x) @ p["w"] + h @ jnp.sqrt(p["u"]))
        return h, h

    params = {"w": jnp.ones((FEATURES, UNITS)), "u": jnp.ones((UNITS, UNITS))}
    assert not braintrace.compile(step, EXAMPLE, params=params, carry=jnp.zeros(UNITS)).is_batched


def test_compiling_while_something_else_is_traced():
    def inside(x):
        model = braintrace.compile(linen.SimpleCell(UNITS, **DOUBLE), x)
        assert not model.is_batched
        return x

    jax.eval_shape(inside, EXAMPLE)


class LinenOfTwo(linen.Module):
    @linen.compact
    def __call__(self, carry, x):
        return linen.SimpleCell(UNITS, **DOUBLE)(carry, jnp.concatenate(jax.tree.leaves(x), -1))


@pytest.mark.parametrize("kind", [tuple, lambda pair: dict(zip("ab", pair, strict=True))])
def test_a_linen_module_of_several_inputs_in_one(kind):
    model = braintrace.compile(LinenOfTwo(), kind((EXAMPLE, EXAMPLE)), carry=CARRY)
    assert not model.is_batched
    assert model.params_shape["SimpleCell_0"]["i"]["kernel"].shape == (2 * FEATURES, UNITS)


@pytest.mark.loose_promotion
def test_a_brainstate_sequence_with_a_cell():
    """Its errors are of its own kind, also for the trial with a whole batch."""
    net = brainstate.nn.Sequential(brainstate.nn.GRUCell(FEATURES, UNITS), brainstate.nn.Linear(UNITS, 2))
    model = braintrace.compile(net, jnp.zeros((BATCH, FEATURES), jnp.float32))
    assert not model.is_batched
    assert model.output_shape.shape == (BATCH, 2)


def test_one_name_of_what_is_frozen():
    frozen = [
        braintrace.compile(linen.SimpleCell(UNITS, **DOUBLE), EXAMPLE, frozen=given).frozen_leaves
        for given in ("h/kernel", ["h/kernel"])
    ]
    assert frozen[0] == frozen[1]
    assert frozen[0]


class LinenDropout(linen.Module):
    @linen.compact
    def __call__(self, carry, x):
        carry, h = linen.SimpleCell(UNITS, **DOUBLE)(carry, x)
        return carry, linen.Dropout(0.5, deterministic=False)(h)


class NnxDropout(nnx.Module):
    def __init__(self, rngs):
        self.cell = nnx.SimpleCell(FEATURES, UNITS, rngs=rngs, **DOUBLE)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, carry, x):
        carry, h = self.cell(carry, x)
        return carry, self.dropout(h)


class BrainstateDropout(brainstate.nn.Module):
    """Its masks come from brainstate's own source of random numbers, which no module holds."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((FEATURES, UNITS)))
        self.h = brainstate.HiddenState(jnp.zeros(UNITS))

    def update(self, x):
        self.h.value = jnp.tanh(0.5 * self.h.value + x @ self.w.value)
        return jnp.where(brainstate.random.uniform(size=UNITS) < 0.5, self.h.value, 0.0)


@pytest.mark.parametrize("framework", ["linen", "nnx", "brainstate"])
def test_dropout_draws_for_each_step_and_example(framework):
    if framework == "brainstate":
        model = braintrace.compile(BrainstateDropout(), EXAMPLE)
    else:
        module = LinenDropout() if framework == "linen" else NnxDropout(nnx.Rngs(0))
        model = braintrace.compile(module, EXAMPLE, carry=CARRY)
    assert not model.is_batched
    params, inputs, targets = zoo.data(model, 0, 6)
    inputs = jnp.broadcast_to(inputs[:1, :1], inputs.shape)  # so that only masks can differ

    @zoo.hurried
    def run(key):
        return lax.scan(lambda c, x: model.apply(params, c, x), model.initial_carry(key), inputs)[1]

    masks = np.asarray(run(jax.random.key(1)) != 0)
    rows = {masks[t, b].tobytes() for t in range(6) for b in range(BATCH)}
    assert len(rows) > 6
    assert 0 < masks.mean() < 1
    np.testing.assert_array_equal(masks, run(jax.random.key(1)) != 0)
    assert (masks != np.asarray(run(jax.random.key(2)) != 0)).any()

    def loss(params):
        outputs = lax.scan(lambda c, x: model.apply(params, c, x), model.initial_carry(), inputs)[1]
        return jax.vmap(zoo.squared_error)(outputs, targets).sum()

    found, _ = zoo.online(model, "rtrl", 1)(params, inputs, targets)
    zoo.assert_same(found, zoo.hurried(jax.grad(loss))(params))


class Leaky(brainstate.nn.Module):
    """Units that would broadcast against a batch; they leak each by itself."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones(FEATURES))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros(FEATURES if batch_size is None else (batch_size, FEATURES)))

    def update(self, x):
        self.h.value = 0.9 * self.h.value + jnp.broadcast_to(self.w.value, x.shape) * x
        return self.h.value


def test_states_of_one_example_are_not_broadcast():
    model = braintrace.compile(Leaky(), EXAMPLE)
    assert model.carry_shape["h"].shape == (BATCH, FEATURES)

    def unroll(params, inputs):
        return lax.scan(lambda h, x: (0.9 * h + x * params["w"][None],) * 2, jnp.zeros((BATCH, FEATURES)), inputs)[1]

    _, found, truth = check(model, unroll)
    zoo.assert_same(found, truth)


def test_frozen_parameters_stay_and_have_no_traces():
    free = zoo.linen_case("SimpleCell", 1)
    whole, frozen = free.compile(), free.compile(frozen=["i"])
    sets = zoo.data(whole, 0, STEPS)
    all_of, _ = zoo.online(whole, "d_rtrl", 1)(*sets)
    some, _ = zoo.online(frozen, "d_rtrl", 1)(*sets)
    for path, value in jax.tree_util.tree_leaves_with_path(some):
        name = "/".join(key.key for key in path)
        if name.startswith("i/"):
            assert not np.any(value)
        else:
            zoo.assert_same(value, optax.tree.get(all_of, path[0].key)[path[1].key])
    traces = braintrace.online_grad(frozen).init(sets[0]).traces
    assert traces
    assert not [name for name in traces if "i/" in name]


class Wasteful(linen.Module):
    """A layer whose result goes nowhere, or nowhere that has a derivative."""

    stop: bool

    @linen.compact
    def __call__(self, carry, x):
        extra = linen.Dense(UNITS, name="extra", **DOUBLE)(x)
        carry, out = linen.SimpleCell(UNITS, **DOUBLE)(carry, x)
        return carry, out + lax.stop_gradient(extra) if self.stop else out


@pytest.mark.parametrize("stop", [False, True])
def test_a_parameter_that_cannot_learn_is_an_error(stop):
    with pytest.raises(braintrace.CompilationError, match="No gradient can ever reach extra/bias, extra/kernel"):
        braintrace.compile(Wasteful(stop), EXAMPLE, carry=CARRY)
    assert len(braintrace.compile(Wasteful(stop), EXAMPLE, carry=CARRY, frozen=["extra"]).frozen_leaves) == 2


def noisy(w, carry, x):
    """Draws from a key that it carries along."""
    h, key = carry
    key, now = jax.random.split(key)
    h = jnp.tanh(0.9 * h + x @ w) + jax.random.normal(now, (UNITS,))
    return (h, key), h


KEYED = jnp.zeros((BATCH, UNITS)), jax.random.split(jax.random.key(0), BATCH)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (linen.GRUCell(UNITS, **DOUBLE), {"frozen": ["h"]}, "`frozen` names no parameter: h. There are hn/bias"),
        (linen.GRUCell, {}, "`compile` got the class GRUCell, not a model"),
        (lambda p, c, x: (c, c), {}, "needs `params=`"),
        (lambda p, c, x: (c, c), {"params": {}}, "needs `carry=`"),
        (linen.remat(Remembers)(), {}, "hidden state memory/h is made inside a lifted transformation"),
        (linen.Dense(UNITS, **DOUBLE), {}, "reads or writes no hidden state"),
        (Seer(), {}, r"`Seer` is called with \(carry, x\), and there is 1 of `example_inputs`"),
        (NnxDropout(nnx.Rngs(0)), {}, r"`NnxDropout` is called with \(carry, x\)"),
        (HiddenVariable(nnx.Rngs(0)), {"params": {"decay": jnp.ones(3)}}, "`decay` has shape .3,. and .*expected .4,."),
        (3, {}, "got a int"),
        (noisy, {"params": jnp.ones((FEATURES, UNITS)), "carry": KEYED}, "initial carries differ from one another"),
    ],
)
def test_compile_errors(model, options, message):
    with pytest.raises((ValueError, TypeError, braintrace.CompilationError), match=message):
        braintrace.compile(model, EXAMPLE, **options)
