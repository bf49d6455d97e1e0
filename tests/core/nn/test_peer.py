"""The same parameters give the same outputs and states in the peer library (braintrace, brainpy.state) and here.

Where the peer's equations are not those of the literature, ours are; ``DIFFERENCES`` lists these places, and each has a
test that shows it.
"""

import warnings

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_core import nn
from tests.core.nn.zoo import assert_close, values

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    reason = "the peer library is not installed here"
    braintrace = pytest.importorskip("braintrace", reason=reason)
    brainevent = pytest.importorskip("brainevent", reason=reason)
    brainpy = pytest.importorskip("brainpy", reason=reason)
    u = pytest.importorskip("brainunit", reason=reason)

STEPS = 12
pytestmark = [
    pytest.mark.loose_promotion,  # the peer's own code needs it
    pytest.mark.filterwarnings("ignore"),
]

# Where, the peer's equation, ours.
DIFFERENCES = {
    "MinimalRNNCell": ("z = phi x", "z = tanh(phi x), Chen 2017; the peer's with activation=identity"),
    "MiniGRU": (
        "z = sigmoid(W_z [x, h])",
        "z = sigmoid(W_z x), Feng et al. 2024; as MiniLSTM",
    ),
    "MiniLSTM": ("gates of [x, h]", "gates of x, Feng et al. 2024; the peer's with recurrent_gates=True"),
    "ScaledWSLinear": ("one example gives shape (1, out)", "(out,)"),
    "Conv": ("bias of shape (1, ..., out)", "(out,)"),
    "hard reset": ("the gradient passes as if V had not been overwritten", "it does not: dV'/dV = 0 after a reset"),
    "GIF soft reset": ("the moving threshold is taken off", "the resting one is; Mihalas and Niebur 2009 reset hard"),
    "states": ("the first states are weakly typed", "strongly"),
}


@pytest.fixture(autouse=True)
def double_precision():
    with brainstate.environ.context(precision=64, dt=1.0 * u.ms):
        yield
    jax.config.update("jax_enable_x64", True)  # leaving brainstate's context turned it off, for all tests to come


def identity(x):
    return x


CELLS = {
    "ValinaRNNCell": {},
    "GRUCell": {},
    "MGUCell": {},
    "LSTMCell": {},
    "URLSTMCell": {},
    "MinimalRNNCell": {"activation": identity},
    "MiniGRU": {"recurrent_gates": True},
    "MiniLSTM": {"recurrent_gates": True},
    "LRUCell": {},
    "CFNCell": {},
    "LeakyRateReadout": {},
}


def noisy(leaf, rng):
    return jnp.asarray(rng.normal(size=leaf.shape) * 0.5)


def pair(name, rng, **options):
    """The peer's cell and ours with the same random parameters."""
    theirs, ours = getattr(braintrace.nn, name)(3, 4), getattr(nn, name)(3, 4, **options)
    params = theirs.states(brainstate.ParamState)
    assert set(ours.states()) == set(params)
    for path, state in params.items():
        state.value = jax.tree.map(lambda leaf: noisy(leaf, rng), state.value)
        ours.states()[path].value = state.value
    return theirs, ours


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("name", CELLS)
def test_cells(name, batch, rng):
    theirs, ours = pair(name, rng, **CELLS[name])
    brainstate.nn.init_all_states(theirs, batch_size=batch)
    brainstate.nn.init_all_states(ours, batch_size=batch)
    assert set(theirs.states()) == set(ours.states())
    for x in rng.normal(size=(STEPS, *(() if batch is None else (batch,)), 3)):
        assert_close(ours(x), theirs(jnp.asarray(x)))
        expected = values(theirs, brainstate.HiddenState)
        for path, value in values(ours, brainstate.HiddenState).items():
            assert_close(value, expected[path])


@pytest.mark.parametrize("name", ["MinimalRNNCell", "MiniGRU", "MiniLSTM"])
def test_cells_differ_where_the_literature_does(name, rng):
    assert name in DIFFERENCES
    theirs = getattr(braintrace.nn, name)(3, 4)
    ours = getattr(nn, name)(3, 4)
    theirs.init_state()
    ours.init_state()
    for path, state in ours.states(brainstate.ParamState).items():
        value = theirs.states()[path].value
        # Without the rows that see the state, which our gates do not.
        state.value = jax.tree.map(lambda old, new: new[: old.shape[0]], state.value, value)
    xs = rng.normal(size=(3, 3))
    assert not np.allclose([ours(x) for x in xs], [theirs(jnp.asarray(x)) for x in xs], atol=1e-3)


def test_the_first_states_of_the_peer_are_weak():
    assert "states" in DIFFERENCES
    theirs, ours = braintrace.nn.GRUCell(3, 4), nn.GRUCell(3, 4)
    theirs.init_state()
    ours.init_state()
    assert jax.typeof(theirs.h.value).weak_type
    assert not jax.typeof(ours.h.value).weak_type


LAYERS = {
    "Linear": (lambda lib: lib.Linear(3, 4), (3,)),
    "GroupedLinear": (lambda lib: lib.GroupedLinear(2, 3, 4), (2, 3)),
    "SignedWLinear": (lambda lib: lib.SignedWLinear(3, 4), (3,)),
    "ScaledWSLinear": (lambda lib: lib.ScaledWSLinear(3, 4), (3,)),
    "LoRA": (lambda lib: lib.LoRA(3, 2, 4), (3,)),
    "Conv1d": (lambda lib: lib.Conv1d((6, 3), 4, 3, b_init=bias(lib)), (6, 3)),
    "Conv2d": (lambda lib: lib.Conv2d((5, 4, 2), 6, (3, 2), groups=2, b_init=bias(lib)), (5, 4, 2)),
    "Conv3d": (lambda lib: lib.Conv3d((3, 4, 3, 2), 2, 2, padding="VALID", b_init=bias(lib)), (3, 4, 3, 2)),
}


def bias(lib):
    return jax.nn.initializers.zeros if lib is nn else brainstate.nn.init.ZeroInit()


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, batch, rng):
    build, shape = LAYERS[name]
    theirs, ours = build(braintrace.nn), build(nn)
    theirs.weight.value = jax.tree.map(lambda leaf: noisy(leaf, rng), theirs.weight.value)
    ours.weight.value = jax.tree.map(lambda old, new: new.reshape(old.shape), ours.weight.value, theirs.weight.value)
    x = rng.normal(size=(*(() if batch is None else (batch,)), *shape))
    expected = theirs(jnp.asarray(x))
    if name == "ScaledWSLinear" and batch is None:
        assert name in DIFFERENCES
        expected = expected[0]
    assert_close(ours(x), expected)


def test_the_bias_of_a_convolution_has_one_axis():
    assert "Conv" in DIFFERENCES
    build, _ = LAYERS["Conv2d"]
    assert build(braintrace.nn).weight.value["bias"].shape == (1, 1, 6)
    assert build(nn).weight.value["bias"].shape == (6,)


def test_embedding(rng):
    theirs, ours = braintrace.nn.Embedding(5, 4), nn.Embedding(5, 4)
    ours.weight.value = theirs.weight.value
    for indices in (rng.integers(5), rng.integers(5, size=7), rng.integers(5, size=(2, 3))):
        np.testing.assert_array_equal(ours(indices), theirs(jnp.asarray(indices)))


def test_sparse_linear(rng):
    dense = jnp.asarray(np.where(rng.random((3, 4)) < 0.6, rng.normal(size=(3, 4)), 0.0))
    matrix = brainevent.CSR.fromdense(dense, backend="jax_raw")
    theirs, ours = braintrace.nn.SparseLinear(matrix), nn.SparseLinear(matrix, b_init=None)
    assert ours.weight.value.keys() == theirs.weight.value.keys()
    for shape in [(3,), (5, 3)]:
        x = rng.normal(size=shape)
        assert_close(ours(x), theirs(jnp.asarray(x)))


mV, mA, ms = u.mV, u.mA, u.ms
POTENTIALS = {"V_th": 0.9, "V_rest": 0.1}
GIF = {"a": 0.05, "b": 0.1, "k1": 0.2, "k2": 0.02}
GIF_JUMPS = {"R1": 0.3, "R2": 0.9}
GIF_CURRENTS = {"A1": 0.5, "A2": -0.1}


def times(options, unit):
    return {name: value * unit for name, value in options.items()}


def their_gif(size, reset="hard"):
    return brainpy.state.Gif(
        size,
        tau=5.0 * ms,
        R=1.0 * u.ohm,
        V_rest=0.1 * mV,
        V_reset=-0.2 * mV,
        V_th_inf=0.9 * mV,
        V_th_reset=1.1 * mV,
        V_th_initializer=brainstate.nn.init.Constant(0.9 * mV),
        V_initializer=brainstate.nn.init.Constant(0.1 * mV),
        spk_reset=reset,
        **times(GIF, u.kHz),
        **GIF_JUMPS,
        **times(GIF_CURRENTS, mA),
    )


def our_gif(size, reset="hard"):
    options = {"tau": 5.0, "V_th": 0.9, "V_rest": 0.1, "V_reset": -0.2, "theta_reset": 1.1, "reset": reset}
    return nn.GIF(size, **options, **GIF, **GIF_JUMPS, **GIF_CURRENTS)


def their(neuron, size, **options):
    start = brainstate.nn.init.Constant(0.1 * mV)
    return neuron(size, tau=8.0 * ms, V_initializer=start, **times(POTENTIALS, mV), **options)


NEURONS = {
    "LIF": (lambda n: their(brainpy.state.LIF, n), lambda n: nn.LIF(n, tau=8.0, **POTENTIALS), {"V": "V"}),
    "LIF potentials": (
        lambda n: their(brainpy.state.LIF, n, V_reset=-0.3 * mV),
        lambda n: nn.LIF(n, tau=8.0, V_reset=-0.3, **POTENTIALS),
        {"V": "V"},
    ),
    "LIF hard": (
        lambda n: their(brainpy.state.LIF, n, spk_reset="hard", V_reset=-0.3 * mV),
        lambda n: nn.LIF(n, tau=8.0, reset="hard", V_reset=-0.3, **POTENTIALS),
        {"V": "V"},
    ),
    "ALIF": (
        lambda n: their(brainpy.state.ALIF, n, tau_a=20.0 * ms, beta=0.4 * mV),
        lambda n: nn.ALIF(n, tau=8.0, tau_a=20.0, beta=0.4, **POTENTIALS),
        {"V": "V", "a": "a"},
    ),
    "GIF": (their_gif, our_gif, {"V": "V", "theta": "V_th", "I1": "I1", "I2": "I2"}),
}


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("name", NEURONS)
def test_neurons(name, batch, rng):
    theirs, ours, states = NEURONS[name]
    theirs, ours = theirs(4), ours(4)
    theirs.init_state(batch)
    ours.init_state(batch)
    total = 0.0
    for current in 2 + 2 * rng.normal(size=(STEPS, *(() if batch is None else (batch,)), 4)):
        spikes = ours(current)
        np.testing.assert_array_equal(spikes, theirs(current * mA))
        for mine, other in states.items():
            assert_close(getattr(ours, mine).value, magnitude(getattr(theirs, other).value))
        total += float(spikes.sum())
    assert total >= 4


@pytest.mark.parametrize("name", ["LIF", "ALIF"])
def test_conductances(name, rng):
    theirs, ours = getattr(brainpy.state, name)(4, tau=8.0 * ms), getattr(nn, name)(4, tau=8.0)
    theirs.init_state()
    ours.init_state()
    conductance = np.zeros(4)
    theirs.add_current_input("synapse", lambda V: jnp.asarray(conductance) / u.ohm * (3.0 * mV - V))
    for conductance in rng.uniform(0, 2, size=(STEPS, 4)):
        np.testing.assert_array_equal(ours(lambda V, g=conductance: g * (3.0 - V)), theirs(0.0 * mA))
        assert_close(ours.V.value, magnitude(theirs.V.value))
    assert ours.V.value.all()


def magnitude(value):
    return value.mantissa if isinstance(value, u.Quantity) else value


def slope(neuron, V, potential=1.0, current=1.0):
    """``dV'/dV`` of one step without input."""
    neuron.init_state()

    @brainstate.transform.StatefulFunction
    def step(V):
        neuron.V.value = V * potential
        neuron(jnp.zeros(1) * current)
        return magnitude(neuron.V.value)

    V = jnp.array([V])
    step.make_jaxpr(V)
    states = [state.value for state in step.get_states(V)]
    return float(jax.jacobian(lambda V: step.jaxpr_call(states, V)[1])(V)[0, 0])


@pytest.mark.parametrize("V", [0.3, 0.8, 1.2, 5.0])
@pytest.mark.parametrize("name", ["LIF", "ALIF"])
def test_gradient_of_a_soft_reset(name, V):
    theirs = slope(getattr(brainpy.state, name)(1, V_reset=-0.5 * mV), V, mV, mA)
    assert_close(slope(getattr(nn, name)(1, V_reset=-0.5), V), theirs)


def test_gradient_of_a_hard_reset():
    assert "hard reset" in DIFFERENCES
    # So far above the threshold the pseudo-derivative is zero: all that could pass is the old V, which is gone.
    assert_close(slope(nn.LIF(1, reset="hard"), 5.0), 0.0)
    assert_close(slope(brainpy.state.LIF(1, spk_reset="hard"), 5.0, mV, mA), np.exp(-1 / 5))


def test_soft_reset_of_a_moving_threshold():
    assert "GIF soft reset" in DIFFERENCES
    theirs, ours = their_gif(1, "soft"), our_gif(1, "soft")
    theirs.init_state()
    ours.init_state()
    theirs.V.value, ours.V.value = 2 * jnp.ones(1) * mV, 2 * jnp.ones(1)
    theirs.V_th.value, ours.theta.value = 1.5 * jnp.ones(1) * mV, 1.5 * jnp.ones(1)
    theirs(jnp.zeros(1) * mA)
    ours(0.0)
    difference = ours.V.value - magnitude(theirs.V.value)
    assert_close(difference, np.exp(-1 / 5) * (1.5 - 0.9))


@pytest.mark.parametrize("batch", [None, 2])
def test_synapses(batch, rng):
    pairs = [
        (brainpy.state.Expon(4, tau=8.0 * ms), nn.Expon(4, tau=8.0), ["g"]),
        (
            brainpy.state.DualExpon(4, tau_decay=10.0 * ms, tau_rise=2.0 * ms),
            nn.DualExpon(4, tau_decay=10.0, tau_rise=2.0),
            ["g_rise", "g_decay"],
        ),
    ]
    for theirs, ours, names in pairs:
        theirs.init_state(batch)
        ours.init_state(batch)
        for x in rng.normal(size=(STEPS, *(() if batch is None else (batch,)), 4)):
            assert_close(ours(x), magnitude(theirs(x * u.mS)))
            for name in names:
                expected = magnitude(getattr(theirs, name).value)
                assert_close(getattr(ours, name).value, expected)


def test_currents(rng):
    g, V = rng.normal(size=(2, 4))
    assert_close(nn.CUBA(scale=2.0)(g, V), brainpy.state.CUBA(scale=2.0).update(g, V))
    assert_close(nn.COBA(E=1.5)(g, V), brainpy.state.COBA(E=1.5).update(g, V))
