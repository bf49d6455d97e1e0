"""Train states on meshes: the same numbers as on one device, and no communication of traces."""

import re
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import AxisType

import braintrace_flax as braintrace
from braintrace_flax.planning.hlo import Program

pytestmark = pytest.mark.several_devices

BATCH, FEATURES, UNITS, OUTPUTS, STEPS, WINDOW = 8, 12, 16, 8, 8, 4
RULES = [("kernel", (None, "model"))]
MESHES = {"data": (8, 1), "model": (1, 8), "both": (4, 2)}


class Net(nn.Module):
    """A GRU with a linear readout."""

    @nn.compact
    def __call__(self, carry, x):
        carry, y = nn.GRUCell(UNITS, param_dtype=jnp.float64, dtype=jnp.float64)(carry, x)
        return carry, nn.Dense(OUTPUTS, param_dtype=jnp.float64, dtype=jnp.float64)(y)

    def initialize_carry(self, key, shape):
        return jnp.zeros((*shape[:-1], UNITS))


@pytest.fixture(scope="module")
def model():
    return braintrace.compile(Net(), jnp.zeros((BATCH, FEATURES)))


def make(model, rule="d_rtrl"):
    tx = optax.chain(braintrace.online_grad(model, rule=rule), optax.sgd(0.1, momentum=0.9))

    @braintrace.train_step(model, tx, window=WINDOW)
    def step(outputs, targets):
        return jnp.mean((outputs - targets) ** 2)

    return step


def data():
    draws = np.random.default_rng(0)
    inputs, targets = draws.normal(size=(STEPS, BATCH, FEATURES)), draws.normal(size=(STEPS, BATCH, OUTPUTS))
    return inputs, targets, draws.random((STEPS, BATCH)) < 0.1


def mesh_of(shape, kind):
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind, kind))


@pytest.fixture(scope="module")
def alone(model):
    found = {}
    for rule in ("d_rtrl", "pp_prop"):
        step = make(model, rule)
        found[rule], _ = step(step.init(jax.random.key(0)), *data())
    return found


CASES = [
    ("d_rtrl", "data", AxisType.Auto),
    ("d_rtrl", "model", AxisType.Auto),
    ("d_rtrl", "both", AxisType.Auto),
    ("d_rtrl", "both", AxisType.Explicit),
    ("pp_prop", "both", AxisType.Explicit),
]


@pytest.mark.parametrize(("rule", "name", "kind"), CASES)
def test_the_same_numbers_as_on_one_device(model, alone, rule, name, kind):
    mesh = mesh_of(MESHES[name], kind)
    with jax.set_mesh(mesh):
        step = make(model, rule).sharded(mesh, RULES)
        state = step.init(jax.random.key(0))
        given = jax.device_put(data(), braintrace.data_sharding(mesh))
        before = jax.tree.map(lambda leaf: leaf.sharding, state)
        compiled = step.lower(state, *given).compile()
        state, _ = compiled(state, *given)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == before
    for mine, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(alone[rule]), strict=True):
        if not jnp.issubdtype(mine.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-9, atol=1e-12)
    traces = optax.tree.get(state.opt_state, "traces")
    weights = [t for n, t in traces.items() if ".weight." in n]
    assert bool(weights) == (rule == "d_rtrl")
    of_traces = {s[-2:] for t in weights for s in (t.shape, t.sharding.shard_shape(t.shape))}
    moved = collectives(compiled.as_text())
    assert moved, "nothing is communicated: is anything divided?"
    assert not [shape for shape in moved if len(shape) > 2 and shape[-2:] in of_traces], "a collective on a trace"


def adaptive(params, carry, x):
    """Two states that feed each other: their traces lie along axes that turn with them."""
    v, a = carry
    fired = jax.nn.sigmoid(v - a)
    v = 0.9 * (v - fired) + x @ params["into"]["kernel"] + fired @ params["again"]["kernel"]
    return (v, 0.99 * (a + fired)), fired @ params["out"]["kernel"]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_axes_of_traces_are_divided_like_the_states(kind):
    draw = np.random.default_rng(1).normal
    sizes = {"into": (FEATURES, UNITS), "again": (UNITS, UNITS), "out": (UNITS, OUTPUTS)}
    params = {name: {"kernel": jnp.asarray(draw(size=shape))} for name, shape in sizes.items()}
    states = (jnp.zeros(UNITS), jnp.zeros(UNITS))
    step = make(braintrace.compile(adaptive, jnp.zeros((BATCH, FEATURES)), params=params, carry=states))
    expected, _ = step(step.init(jax.random.key(0)), *data())
    mesh = mesh_of(MESHES["both"], kind)
    spread = step.sharded(mesh, RULES)
    given = jax.device_put(data(), braintrace.data_sharding(mesh))
    state, _ = spread(spread.init(jax.random.key(0)), *given)
    for mine, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        if not jnp.issubdtype(mine.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-9, atol=1e-12)
    axes = [t for n, t in optax.tree.get(state.opt_state, "traces").items() if ".axis." in n]
    assert len(axes) == 2
    assert {t.sharding.spec for t in axes} == {jax.P("data", "model")}


def collectives(text):
    """The shape of each array that a collective moves."""
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    moved = []
    for line in text.splitlines():
        found = re.match(rf"\s*(?:ROOT )?\S+ = (.*?) (?:{kinds})(?:-start)?\(", line)
        if found:
            shapes = re.findall(r"\w+\[([\d,]*)\]", found.group(1))
            moved += [tuple(int(n) for n in shape.split(",") if n) for shape in shapes]
    return moved


def test_traces_are_divided_like_carry_and_parameter(model):
    mesh = mesh_of((4, 2), AxisType.Auto)
    found = braintrace.shardings(make(model), mesh, RULES)
    traces = optax.tree.get(found.opt_state, "OnlineGradState").traces
    weights = {n: s.spec for n, s in traces.items() if ".weight." in n}
    assert weights
    assert set(weights.values()) == {jax.P("data", None, "model")}
    assert found.params["GRUCell_0"]["hn"]["kernel"].spec == jax.P(None, "model")
    assert found.carry.spec == jax.P("data")
    moments = [s.spec for s in jax.tree.leaves(optax.tree.get(found.opt_state, "trace"))]
    assert moments.count(jax.P(None, "model")) == 7
    assert {s.spec for n, s in traces.items() if ".df." in n} == {jax.P("data", "model")}
    assert {s.spec for n, s in traces.items() if n.startswith("group")} == {jax.P("data", "model")}
    assert {s.spec for n, s in traces.items() if n.endswith(".x")} == {jax.P("data")}


def test_what_a_rule_keeps_of_inputs_and_results_is_divided_too(model):
    rules = [*RULES, ("carry", ("data", "model"))]
    found = braintrace.shardings(make(model, "pp_prop"), mesh_of((4, 2), AxisType.Auto), rules)
    traces = optax.tree.get(found.opt_state, "OnlineGradState").traces
    assert {s.spec for n, s in traces.items() if ".f." in n} == {jax.P("data", "model")}
    assert {s.spec for n, s in traces.items() if n.endswith(".x")} == {jax.P("data")}  # as the rows of the weights
    found = braintrace.shardings(make(model, "pp_prop"), mesh_of((4, 2), AxisType.Auto), [("kernel", ("model",))])
    traces = optax.tree.get(found.opt_state, "OnlineGradState").traces
    assert {s.spec for n, s in traces.items() if n.endswith(".x")} == {jax.P("data", "model")}


@pytest.mark.parametrize("carry", [(), [("carry", ("data", "model"))]], ids=["carry whole", "carry divided"])
def test_with_divided_units_no_more_is_sent_than_a_window_needs_without_traces(model, alone, carry):
    mesh = mesh_of((4, 2), AxisType.Auto)
    given = jax.device_put(data(), braintrace.data_sharding(mesh))
    sent = {}
    for rule in ("tbptt", "d_rtrl", "pp_prop"):
        step = make(model, rule).sharded(mesh, [*RULES, *carry])
        compiled = step.lower(state := step.init(jax.random.key(0)), *given).compile()
        moved = Program(compiled.as_text()).collectives()
        sent[rule] = sorted((c.kind, c.group, s.dims, c.loops) for c in moved for s in c.shapes if s.dims)
        if rule in alone:
            state, _ = compiled(state, *given)
            for mine, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(alone[rule].params), strict=True):
                np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-9, atol=1e-12)
    assert sent["tbptt"]
    assert sent["d_rtrl"] == sent["pp_prop"] == sent["tbptt"]


def test_fully_sharded_parameters_are_gathered_once_a_window_and_do_not_divide_a_trace_twice(model, alone):
    mesh = jax.make_mesh((4, 2), ("fsdp", "model"), axis_types=(AxisType.Auto,) * 2)
    step = make(model).sharded(mesh, [("kernel", ("fsdp", "model"))])
    specs = {
        s.spec for n, s in optax.tree.get(step.shardings.opt_state, "OnlineGradState").traces.items() if ".weight." in n
    }
    assert specs == {jax.P("fsdp", None, "model")}
    given = jax.device_put(data(), braintrace.data_sharding(mesh))
    compiled = step.lower(state := step.init(jax.random.key(0)), *given).compile()
    kernels = {(FEATURES, UNITS // 2): 3, (UNITS, UNITS // 2): 3, (UNITS, OUTPUTS // 2): 1}
    moved = Program(compiled.as_text()).collectives()
    gathered = [(c.shapes[0].dims, c.loops) for c in moved if c.kind == "all-gather" and c.group == 4]
    windows = (STEPS // WINDOW,)
    assert sorted(gathered) == sorted((dims, windows) for dims, count in kernels.items() for _ in range(count))
    assert any(c.loops == (*windows, WINDOW) for c in moved), "the model's axis is gathered step by step"
    state, _ = compiled(state, *given)
    for mine, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(alone["d_rtrl"].params), strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-9, atol=1e-12)


REDUCED = {
    "data": ({"data": 8}, (), {("all-reduce", 8): "all"}),
    "fsdp": ({"fsdp": 8}, (None, "fsdp"), {("reduce-scatter", 8): "kernels", ("all-reduce", 8): "biases"}),
    "both": (
        {"data": 2, "fsdp": 4},
        ("fsdp",),
        {("reduce-scatter", 4): "kernels", ("all-reduce", 2): "parts", ("all-reduce", 8): "biases"},
    ),
}


@pytest.mark.parametrize(
    ("rule", "name"),
    [("d_rtrl", "data"), ("d_rtrl", "fsdp"), ("d_rtrl", "both"), ("pp_prop", "both"), ("tbptt", "data")],
)
def test_each_gradient_is_reduced_once_a_window(model, alone, rule, name):
    axes, spec, expected = REDUCED[name]
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    step = make(model, rule).sharded(mesh, [("kernel", spec)] if spec else [])
    given = jax.device_put(data(), braintrace.data_sharding(mesh))
    compiled = step.lower(state := step.init(jax.random.key(0)), *given).compile()
    shapes = [leaf.shape for leaf in jax.tree.leaves(state.params)]
    kernels = [shape for shape in shapes if len(shape) > 1]
    of = {
        "all": shapes,
        "kernels": kernels,
        "parts": [(rows // 4, columns) for rows, columns in kernels],
        "biases": [shape for shape in shapes if len(shape) == 1],
    }
    found = {key: [] for key in expected}
    for c in Program(compiled.as_text()).collectives():
        if c.kind in ("all-reduce", "reduce-scatter"):
            dims = [s.dims for s in c.shapes if s.dims and s.dims != (WINDOW,)]  # losses are summed too
            assert not dims or c.loops == (STEPS // WINDOW,)
            if dims:
                found[c.kind, c.group] += dims
    assert {key: sorted(dims) for key, dims in found.items()} == {
        key: sorted(of[name]) for key, name in expected.items()
    }
    if rule in alone:
        state, _ = compiled(state, *given)
        for mine, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(alone[rule].params), strict=True):
            np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_quality_meter_reads_the_same_on_a_mesh(model, kind):
    tx = optax.chain(braintrace.online_grad(model), optax.sgd(0.1))
    meter = braintrace.rules.QualityMeter(every=2, windows=2)
    step = braintrace.train_step(model, tx, window=2, meter=meter)(lambda o, t: jnp.mean((o - t) ** 2))
    mask = np.random.default_rng(1).random(STEPS) < 0.8
    example = (*data(), mask)
    _, expected = step(step.init(jax.random.key(0), example=example), *example)
    assert np.isfinite(np.asarray(expected["gradient_cosine"])).tolist() == [False, True, False, True]
    mesh = mesh_of((4, 2), kind)
    on_mesh = step.sharded(mesh, RULES)
    state = on_mesh.init(jax.random.key(0), example=example)
    assert {leaf.sharding.spec[1] for leaf in state.meter.items[0]} == {"data"}
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    given = (*jax.device_put(data(), braintrace.data_sharding(mesh)), mask)
    state, found = on_mesh(state, *given)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == places
    for name in ("gradient_cosine", "gradient_norm_ratio"):
        np.testing.assert_allclose(np.asarray(found[name]), np.asarray(expected[name]), rtol=1e-9)
    on_mesh(state, *given)
    assert on_mesh.jitted._cache_size() == 1


def test_a_quality_meter_of_a_single_stream_on_a_mesh():
    model = braintrace.compile(nn.SimpleCell(UNITS), jnp.zeros((FEATURES,), jnp.float32))
    tx = optax.chain(braintrace.online_grad(model), optax.sgd(0.1))
    meter = braintrace.rules.QualityMeter(every=2, windows=2)
    step = braintrace.train_step(model, tx, window=2, meter=meter)(lambda o, t: jnp.mean((o - t) ** 2))
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    on_mesh = step.sharded(mesh, [("kernel", (None, "model")), ("carry", ("model",))])
    example = (jnp.ones((4, FEATURES), jnp.float32), jnp.zeros((4, UNITS), jnp.float32))
    state = on_mesh.init(jax.random.key(0), example=example)
    assert state.meter.items[0][0].sharding.spec == jax.P(None, None, "model")  # windows, a batch of one, units
    _, metrics = on_mesh(state, *example)
    assert np.isfinite(np.asarray(metrics["gradient_cosine"])).tolist() == [False, True]


class FiresFirst(nn.Module):
    """Units that fire by the potential that they come with, and then integrate."""

    @nn.compact
    def __call__(self, v, x):
        fired = jax.nn.sigmoid(4 * v - 2)
        seen = jnp.concatenate([x, fired], axis=-1)
        v = 0.8 * v - fired + nn.Dense(UNITS, param_dtype=jnp.float64, dtype=jnp.float64)(seen)
        return v, nn.Dense(OUTPUTS, param_dtype=jnp.float64, dtype=jnp.float64)(fired)

    def initialize_carry(self, key, shape):
        return jnp.zeros((*shape[:-1], UNITS))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("rule", ["d_rtrl", "pp_prop", "rtrl"])
def test_step_credit_of_states_before_a_step(rule, kind):
    model = braintrace.compile(FiresFirst(), jnp.zeros((BATCH, FEATURES)))
    tx = optax.chain(braintrace.online_grad(model, rule=rule, credit="step"), optax.sgd(0.1))
    step = braintrace.train_step(model, tx, window=WINDOW)(lambda outputs, targets: jnp.mean((outputs - targets) ** 2))
    inputs, targets, reset = data()
    start = step.init(jax.random.key(0))
    first = jax.tree.map(np.asarray, start.params)
    expected, _ = step(start, inputs, targets, reset)
    mesh = mesh_of((4, 2), kind)
    on_mesh = step.sharded(mesh, RULES)
    given = jax.device_put((inputs, targets, reset), braintrace.data_sharding(mesh))
    found, _ = on_mesh(on_mesh.init(jax.random.key(0)), *given)
    for mine, theirs, old in zip(*map(jax.tree.leaves, (found.params, expected.params, first)), strict=True):
        assert np.abs(np.asarray(theirs) - old).max() > 1e-4
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("credit", "in_use"), [("window", True), ("step", True), ("window", False)])
def test_a_loop_of_ones_own_on_an_explicit_mesh(model, credit, in_use):
    tx = optax.chain(braintrace.online_grad(model, credit=credit), optax.sgd(0.1))
    run = braintrace.value_and_grad(model, lambda o, t: jnp.mean((o - t) ** 2), credit=credit)

    @jax.jit
    def one(params, carry, opt_state, inputs, targets):
        (_, carry), grads, window = run(params, carry, inputs, targets)
        updates, opt_state = tx.update(grads, opt_state, params, online=window)
        return optax.apply_updates(params, updates), carry, opt_state

    params, carry = model.init(jax.random.key(0)), model.initial_carry()
    opt_state = tx.init(params)
    inputs, targets, _ = data()
    expected = one(params, carry, opt_state, jnp.asarray(inputs), jnp.asarray(targets))
    mesh = mesh_of((4, 2), AxisType.Explicit)
    with jax.set_mesh(mesh) if in_use else nullcontext():
        placed = braintrace.shardings(braintrace.train_step(model, tx)(lambda o, t: jnp.mean(o)), mesh, RULES)
        state = jax.device_put((params, carry), (placed.params, placed.carry))
        opt_state = jax.device_put(opt_state, placed.opt_state)
        given = jax.device_put((inputs, targets), braintrace.data_sharding(mesh))
        found = one(*state, opt_state, *given)
        assert jax.tree.map(jax.typeof, found[2]) == jax.tree.map(jax.typeof, opt_state)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("rules", "shape", "text"),
    [
        ([("kernel", (None, "modle"))], (4, 2), "names the axis 'modle'; the mesh has 'data', 'model'"),
        ([("hn/kernel", (None, None, "model"))], (4, 2), "has more axes than"),
        ([("bias", ("model", "data"))], (4, 2), "has more axes than"),
        ([("Dense_0/bias", (("data", "model"),))], (4, 2), None),
        (["kernel"], (4, 2), "A sharding rule is a pair"),
    ],
)
def test_wrong_rules_are_refused(model, rules, shape, text):
    mesh = mesh_of(shape, AxisType.Auto)
    if text is None:
        braintrace.shardings(make(model), mesh, rules)
        return
    with pytest.raises(ValueError, match=text):
        braintrace.shardings(make(model), mesh, rules)


@pytest.mark.loose_promotion
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", ["masked", "partition"])
def test_an_optimizer_of_some_parameters_after_it(model, name, kind):
    """Moments of what it leaves out are not there to be placed."""
    some = lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: "Dense_0" in str(path), tree)  # noqa: E731
    labels = lambda tree: jax.tree.map(lambda chosen: "a" if chosen else "b", some(tree))  # noqa: E731
    tail = {
        "masked": optax.masked(optax.adam(0.1), some),
        "partition": optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, labels),
    }[name]
    tx = optax.chain(braintrace.online_grad(model), tail)
    step = braintrace.train_step(model, tx, window=WINDOW)(lambda outputs, targets: jnp.mean((outputs - targets) ** 2))
    expected, _ = step(step.init(jax.random.key(0)), *data())
    placed = step.sharded(mesh_of((4, 2), kind), RULES)
    found, _ = placed(placed.init(jax.random.key(0)), *data())
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_shardings_allocate_nothing():
    """Those of a state of many terabytes are found on any machine."""
    wide = jax.ShapeDtypeStruct((2**30, 64), jnp.float64)
    large = braintrace.compile(nn.GRUCell(64, param_dtype=jnp.float64, dtype=jnp.float64), wide)
    found = braintrace.shardings(make(large), mesh_of((4, 2), AxisType.Auto), RULES)
    traces = optax.tree.get(found.opt_state, "OnlineGradState").traces
    assert traces["params/in/kernel@4.weight.0"].shard_shape((2**30, 64, 64)) == (2**28, 64, 32)


def test_a_mesh_that_does_not_divide_is_refused():
    cell = nn.SimpleCell(6, param_dtype=jnp.float64, dtype=jnp.float64)
    model = braintrace.compile(cell, jnp.zeros((6, 3)))
    mesh = mesh_of((4, 2), AxisType.Auto)
    with pytest.raises(ValueError, match="A batch of 6 cannot be divided over data = 4 devices"):
        braintrace.shardings(model, mesh)
    with pytest.raises(ValueError, match=r"`h/kernel` of shape \(6, 6\) cannot be divided"):
        braintrace.shardings(braintrace.compile(cell, jnp.zeros((8, 3))), mesh, [("h/kernel", ("data", None))])


def test_traces_are_updated_in_place(model):
    """All memory of the state is given to the new one, and no second copy of the traces is made."""
    step = make(model)
    state = step.init(jax.random.key(0))
    compiled = step.lower(state, *map(jnp.asarray, data())).compile()
    memory = compiled.memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
    assert memory.alias_size_in_bytes >= size
