"""Neurons, synapses and spiking layers against plain loops over their documented equations."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_core import nn
from tests.core.nn.zoo import CELLS, NEURONS, assert_close, pure, run, values

STEPS = 40
N = 4


def spread(low, high):
    return np.linspace(low, high, N)


def lif(currents, tau, R=1.0, V_th=1.0, V_reset=0.0, V_rest=0.0, dt=1.0, reset="soft", delta=0.0):
    v = np.zeros(N) + V_rest
    A = np.exp(-dt / np.asarray(tau))
    for current in currents:
        z = v >= V_th
        v = v - (V_th - V_reset) * z if reset == "soft" else np.where(z, V_reset, v)
        v = A * v + (1 - A) * (V_rest + R * current) + delta
        yield v >= V_th, [v]


def alif(currents, tau, tau_a, beta, V_th=1.0, V_reset=0.0, V_rest=0.0, dt=1.0):
    v, a = np.zeros(N) + V_rest, np.zeros(N)
    A, B = np.exp(-dt / np.asarray(tau)), np.exp(-dt / np.asarray(tau_a))
    for current in currents:
        z = v >= V_th + beta * a
        v = A * (v - (V_th - V_reset) * z) + (1 - A) * (V_rest + current)
        a = B * (a + z)
        yield v >= V_th + beta * a, [v, a]


def gif(currents, tau, R=1.0, V_th=1.0, V_reset=0.0, V_rest=0.0, theta_reset=1.0, dt=1.0, reset="hard", **c):
    v, theta, I1, I2 = np.zeros(N) + V_rest, np.zeros(N) + V_th, np.zeros(N), np.zeros(N)
    for current in currents:
        for n in range(N):
            if v[n] >= theta[n]:
                v[n] = V_reset if reset == "hard" else v[n] - (V_th - V_reset)
                I1[n] = c["R1"] * I1[n] + c["A1"]
                I2[n] = c["R2"] * I2[n] + c["A2"]
                theta[n] = max(theta[n], theta_reset)
        I1, I2 = np.exp(-c["k1"] * dt) * I1, np.exp(-c["k2"] * dt) * I2
        slope = c["a"] * (v - V_rest) - c["b"] * (theta - V_th)
        theta = theta + (1 - np.exp(-c["b"] * dt)) / c["b"] * slope
        v_inf = V_rest + R * (current + I1 + I2)
        v = v_inf + np.exp(-dt / tau) * (v - v_inf)
        yield v >= theta, [v, theta, I1, I2]


GIF = {"a": 0.05, "b": 0.1, "k1": 0.2, "k2": 0.02, "R1": 0.3, "R2": 1.0, "A1": 0.5, "A2": -0.1, "theta_reset": 1.2}
CASES = {
    "LIF": (nn.LIF, lif, {"tau": 5.0}),
    "LIF hard": (nn.LIF, lif, {"tau": 5.0, "reset": "hard", "V_reset": -0.3}),
    "LIF mixed": (nn.LIF, lif, {"tau": spread(3, 9), "R": spread(1, 2), "V_th": spread(0.5, 1.5), "dt": 0.5}),
    "LIF potentials": (nn.LIF, lif, {"tau": 5.0, "V_rest": -0.2, "V_reset": -0.5, "V_th": 0.8}),
    "ALIF": (nn.ALIF, alif, {"tau": 5.0, "tau_a": 20.0, "beta": 0.4}),
    "ALIF mixed": (nn.ALIF, alif, {"tau": spread(3, 9), "tau_a": spread(9, 50), "beta": spread(0.1, 1), "dt": 0.5}),
    "GroupALIF": (nn.GroupALIF, alif, {"tau": 5.0, "tau_a": 20.0, "beta": 0.4, "V_rest": 0.1}),
    "GIF": (nn.GIF, gif, {"tau": 5.0, **GIF}),
    "GIF soft": (nn.GIF, gif, {"tau": 5.0, "reset": "soft", "V_rest": 0.1, "V_reset": -0.2, "dt": 0.5, **GIF}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_neuron_follows_its_equations(name, rng):
    neuron, equations, options = CASES[name]
    neuron = neuron(N, **options)
    neuron.init_state()
    currents = 2.0 + 2.0 * rng.normal(size=(STEPS, N))
    total = 0
    for current, (spikes, states) in zip(currents, equations(currents, **options), strict=True):
        np.testing.assert_array_equal(neuron(current), spikes)
        for value, expected in zip(neuron.read(), states, strict=True):
            assert_close(value, expected)
        np.testing.assert_array_equal(neuron.spikes(), spikes)
        total += spikes.sum()
    assert 0.05 < total / currents.size < 0.8


def test_adaptation_slows_a_neuron():
    def rate(neuron):
        neuron.init_state()
        return run(neuron, 2.0 * np.ones((200, 1)))[100:].mean()

    plain = rate(nn.LIF(1, tau=5.0))
    assert rate(nn.ALIF(1, tau=5.0, beta=0.5)) < 0.8 * plain
    assert rate(nn.GIF(1, tau=5.0, reset="soft")) < 0.8 * plain


def test_a_jump_of_the_membrane_is_not_filtered():
    neuron = nn.LIF(N, tau=5.0)
    neuron.init_state()
    neuron(delta=np.full(N, 0.7))
    assert_close(neuron.V.value, 0.7)
    neuron(current=0.3, delta=np.full(N, 0.1))
    assert_close(neuron.V.value, 0.7 * np.exp(-0.2) + 0.3 * (1 - np.exp(-0.2)) + 0.1)


@pytest.mark.parametrize("neuron", [nn.LIF, nn.ALIF, nn.GroupALIF, nn.GIF])
def test_a_conductance_is_integrated_exactly(neuron, rng):
    g, E, tau, R = rng.uniform(1, 4, size=N), 3.0, 5.0, np.array([0.5, 1.0, 1.5, 2.0])
    one = neuron(N, tau=tau, R=R, V_rest=0.1, V_th=100.0)
    one.init_state()
    V_inf = (0.1 + R * g * E) / (1 + R * g)
    for t in range(1, 6):
        one(lambda V: g * (E - V))
        assert_close(one.read()[0], V_inf + (0.1 - V_inf) * np.exp(-t * (1 + R * g) / tau))


@pytest.mark.parametrize("neuron", [nn.LIF, nn.ALIF, nn.GroupALIF, nn.GIF])
def test_a_current_that_is_no_conductance_is_a_current(neuron, rng):
    one, two = neuron(N), neuron(N)
    one.init_state()
    two.init_state()
    for current in 3 + rng.normal(size=(STEPS, N)):
        np.testing.assert_array_equal(one(lambda V, current=current: jnp.asarray(current)), two(current))
        assert_close(one.read(), two.read())


def test_strong_conductances_are_stable():
    layer = nn.SpikingLayer(3, nn.LIF(N, V_th=2.0), nn.Expon(N), nn.COBA(E=3.0))
    layer.init_state()
    for _ in range(STEPS):
        layer(1e6 * np.ones(3))
        assert (layer.neuron.V.value >= 0).all()
        assert (layer.neuron.V.value <= 3).all()


def test_group_alif_is_alif(rng):
    one, group = nn.ALIF(N, beta=0.4, V_rest=0.1), nn.GroupALIF(N, beta=0.4, V_rest=0.1)
    currents = 3 * rng.normal(size=(STEPS, 2, N)) + 2
    one.init_state(2)
    group.init_state(2)
    np.testing.assert_array_equal(run(one, currents), run(group, currents))
    assert isinstance(group.state, brainstate.HiddenGroupState)
    assert group.state.num_state == 2
    assert group.state.varshape == (2, N)
    assert_close(group.state.value, np.stack([one.V.value, one.a.value], -1))


def test_neurons_may_form_a_sheet(rng):
    sheet, row = nn.ALIF((2, 3), tau=np.ones((2, 3))), nn.ALIF(6, tau=1.0)
    sheet.init_state(5)
    row.init_state(5)
    currents = 2 * rng.normal(size=(STEPS, 5, 2, 3))
    np.testing.assert_array_equal(run(sheet, currents).reshape(STEPS, 5, 6), run(row, currents.reshape(STEPS, 5, 6)))


def test_one_step_differentiates_through_reset_and_spike():
    """dV'/dV: the leak, and the reset through the pseudo-derivative."""
    A, psi = np.exp(-1 / 5), 0.3 * (1 - 0.2)

    def slope(reset, V):
        neuron = nn.LIF(1, tau=5.0, reset=reset)
        neuron.init_state()
        step = pure(neuron, jnp.zeros(1))
        return float(jax.grad(lambda V: step({("V",): jnp.array([V])}, jnp.zeros(1))[0]["V",][0])(V))

    assert slope("soft", 1.2) == pytest.approx(A * (1 - psi))
    assert slope("soft", 0.8) == pytest.approx(A * (1 - psi))
    assert slope("hard", 1.2) == pytest.approx(A * (0 - 1.2 * psi))
    assert slope("hard", 0.8) == pytest.approx(A * (1 - 0.8 * psi))


def test_expon(rng):
    synapse, inputs = nn.Expon(N, tau=spread(2, 9), dt=0.5), rng.normal(size=(STEPS, N))
    synapse.init_state()
    g = np.zeros(N)
    for x, output in zip(inputs, run(synapse, inputs), strict=True):
        g = np.exp(-0.5 / spread(2, 9)) * g + x
        assert_close(output, g)


def test_dual_expon_peaks_at_one():
    tau_decay, tau_rise = np.array([10.0, 20.0, 7.0, 3.0]), np.array([1.0, 5.0, 6.0, 0.5])
    synapse = nn.DualExpon(N, tau_decay=tau_decay, tau_rise=tau_rise, dt=0.01)
    synapse.init_state()
    inputs = np.zeros((3000, N))
    inputs[0] = 1
    response = run(synapse, inputs)
    assert_close(response.max(0), 1, atol=1e-5)
    t = 0.01 * np.arange(3000)[:, None]
    shape = np.exp(-t / tau_decay) - np.exp(-t / tau_rise)
    assert_close(response / response.max(0), shape / shape.max(0), atol=1e-6)


SYNAPSES = {
    "LIF Expon CUBA": (8.0, 2.0, None),
    "LIF Expon COBA": (8.0, None, 3.0),
    "LIF DualExpon CUBA": ((10.0, 1.0), 1.0, None),
    "LIF DualExpon COBA": ((10.0, 1.0), None, 3.0),
    "LIF delta": (None, None, None),
    "LIF delta feedforward": (None, None, None),
}


@pytest.mark.parametrize("name", SYNAPSES)
def test_a_spiking_layer_follows_its_equations(name):
    layer, inputs = CELLS[name].build(), np.asarray(CELLS[name].inputs(STEPS))
    layer.init_state()
    tau, scale, E = SYNAPSES[name]
    params = layer.W.weight.value
    weight = np.asarray(params["weight"]) if E is None else np.abs(params)
    bias = np.asarray(params.get("bias", 0.0)) if E is None else 0.0
    A = np.exp(-1 / 8)
    V, g, rise = np.zeros(N), np.zeros(N), np.zeros(N)
    for x, output in zip(inputs, run(layer, inputs), strict=True):
        z = (V >= 1).astype(float)
        s = (x @ weight if "feedforward" in name else np.concatenate([x, z]) @ weight) + bias
        V = V - z
        if tau is None:
            V = A * V + s
        else:
            if isinstance(tau, tuple):
                g, rise = np.exp(-1 / tau[0]) * g + s, np.exp(-1 / tau[1]) * rise + s
                conductance = (g - rise) * 10 / 9 * 10 ** (1 / 9)
            else:
                conductance = g = np.exp(-1 / tau) * g + s
            if E is None:
                V = A * V + (1 - A) * scale * conductance
            else:
                V_inf = conductance * E / (1 + conductance)
                V = V_inf + A ** (1 + conductance) * (V - V_inf)
        np.testing.assert_array_equal(output, V >= 1)
    assert_close(layer.neuron.V.value, V)


def test_a_spiking_layer_in_one_line():
    layer = nn.SpikingLayer(3, nn.ALIF(N, tau=10.0), nn.Expon(N, tau=5.0), nn.COBA(E=3.0), key=jax.random.key(1))
    assert set(layer.states()) == {("W", "weight")}
    brainstate.nn.init_all_states(layer)
    assert set(layer.states()) == {("W", "weight"), ("neuron", "V"), ("neuron", "a"), ("synapse", "g")}
    assert layer.W.weight.value.shape == (3 + N, N)
    assert (layer.W(np.eye(3 + N)) >= 0).all()
    assert set(nn.SpikingLayer(3, nn.LIF(N)).W.weight.value) == {"weight"}


def test_neurons_start_at_rest():
    for example in NEURONS.values():
        neuron = example.build()
        neuron.init_state()
        start = values(neuron)
        if isinstance(neuron, nn.LIF):
            neuron()
            jax.tree.map(lambda new, old: assert_close(new, old, atol=1e-15), values(neuron), start)


def test_fast_membranes_follow_their_input():
    neuron = nn.LIF(N, tau=1e-5)
    neuron.init_state()
    neuron(0.5)
    assert_close(neuron.V.value, 0.5)
    neuron(lambda V: 0.5 * (1 - V))
    assert_close(neuron.V.value, 0.5 / 1.5)
