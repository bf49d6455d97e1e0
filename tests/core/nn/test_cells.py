"""Each cell against a plain loop over its documented equations."""

import brainstate
import jax
import numpy as np
import pytest

from braintrace_core import nn
from tests.core.nn.zoo import CELLS, assert_close, run, values

STEPS = 12


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def dense(p, name, *parts):
    """``W [parts] + b``, from the parameters ``p`` by name."""
    layer = p[name, "weight"]
    return np.concatenate(parts) @ layer["weight"] + layer.get("bias", 0.0)


def vanilla(p, x, h):
    h = np.maximum(dense(p, "W", x, h), 0.0)
    return h, {"h": h}


def gru(p, x, h):
    z = sigmoid(dense(p, "Wz", x, h))
    r = sigmoid(dense(p, "Wr", x, h))
    h = (1 - z) * h + z * np.tanh(dense(p, "Wh", x, r * h))
    return h, {"h": h}


def mgu(p, x, h):
    f = sigmoid(dense(p, "Wf", x, h))
    h = (1 - f) * h + f * np.tanh(dense(p, "Wh", x, f * h))
    return h, {"h": h}


def cfn(p, x, h):
    f = sigmoid(dense(p, "Wf", x, h))
    i = sigmoid(dense(p, "Wi", x, h))
    h = f * np.tanh(h) + i * np.tanh(dense(p, "Wh", x))
    return h, {"h": h}


def lstm(p, x, c, h):
    i = sigmoid(dense(p, "Wi", x, h))
    f = sigmoid(dense(p, "Wf", x, h) + 1)
    o = sigmoid(dense(p, "Wo", x, h))
    c = f * c + i * np.tanh(dense(p, "Wg", x, h))
    h = o * np.tanh(c)
    return h, {"c": c, "h": h}


def urlstm(p, x, c, h):
    f = sigmoid(dense(p, "Wf", x, h) + p[("bias",)])
    r = sigmoid(dense(p, "Wr", x, h) - p[("bias",)])
    # Gu et al. 2020, equation (7): the gate lies between f**2 and 1 - (1 - f)**2, r says where.
    low, high = f**2, 1 - (1 - f) ** 2
    g = (1 - r) * low + r * high
    c = g * c + (1 - g) * np.tanh(dense(p, "Wu", x, h))
    h = sigmoid(dense(p, "Wo", x, h)) * np.tanh(c)
    return h, {"c": c, "h": h}


def minimal_rnn(p, x, h):
    z = np.tanh(dense(p, "phi", x))
    u = sigmoid(dense(p, "W_u", z, h))
    h = u * h + (1 - u) * z
    return h, {"h": h}


def mini_gru(p, x, h):
    z = sigmoid(dense(p, "W_z", x))
    h = (1 - z) * h + z * dense(p, "W_x", x)
    return h, {"h": h}


def mini_gru_recurrent(p, x, h):
    z = sigmoid(dense(p, "W_z", x, h))
    h = (1 - z) * h + z * dense(p, "W_x", x)
    return h, {"h": h}


def mini_lstm(p, x, h):
    h = sigmoid(dense(p, "W_f", x)) * h + sigmoid(dense(p, "W_i", x)) * dense(p, "W_x", x)
    return h, {"h": h}


def mini_lstm_recurrent(p, x, h):
    h = sigmoid(dense(p, "W_f", x, h)) * h + sigmoid(dense(p, "W_i", x, h)) * dense(p, "W_x", x)
    return h, {"h": h}


def lru(p, x, h_re, h_im):
    B = p["B_re", "weight"]["weight"] + 1j * p["B_im", "weight"]["weight"]
    C = p["C_re", "weight"]["weight"] + 1j * p["C_im", "weight"]["weight"]
    eigenvalues = np.exp(-np.exp(p[("nu_log",)]) + 1j * np.exp(p[("theta_log",)]))
    h = eigenvalues * (h_re + 1j * h_im) + np.exp(p[("gamma_log",)]) * (x @ B)
    return (h @ C).real + p[("D",)] * x, {"h_re": h.real, "h_im": h.imag}


def leaky(p, x, r):
    r = np.exp(-1.0 / 5.0) * r + x @ p[("W",)]
    return r, {"r": r}


EQUATIONS = {
    "ValinaRNNCell": vanilla,
    "GRUCell": gru,
    "MGUCell": mgu,
    "CFNCell": cfn,
    "LSTMCell": lstm,
    "URLSTMCell": urlstm,
    "MinimalRNNCell": minimal_rnn,
    "MiniGRU": mini_gru,
    "MiniGRU recurrent": mini_gru_recurrent,
    "MiniLSTM": mini_lstm,
    "MiniLSTM recurrent": mini_lstm_recurrent,
    "LRUCell": lru,
    "LeakyRateReadout": leaky,
}


def test_every_cell_has_its_equations():
    assert set(EQUATIONS) == {name for name, example in CELLS.items() if not example.spiking}


@pytest.mark.parametrize("name", EQUATIONS)
def test_a_cell_follows_its_equations(name):
    module = CELLS[name].build()
    module.init_state()
    inputs = CELLS[name].inputs(STEPS)
    outputs = run(module, inputs)
    params = jax.tree.map(np.asarray, values(module, brainstate.ParamState))
    state = {path: np.zeros(value.shape) for (path,), value in values(module, brainstate.HiddenState).items()}
    for x, output in zip(np.asarray(inputs), outputs, strict=True):
        expected, state = EQUATIONS[name](params, x, **state)
        assert_close(output, expected)
    for name, value in state.items():
        assert_close(getattr(module, name).value, value)


def test_activations_are_chosen_by_the_user():
    for cell in (nn.ValinaRNNCell, nn.GRUCell, nn.MGUCell, nn.CFNCell, nn.LSTMCell, nn.URLSTMCell, nn.MinimalRNNCell):
        plain, linear = cell(3, 4), cell(3, 4, activation=lambda x: 3 * x)
        plain.init_state()
        linear.init_state()
        assert not np.allclose(plain(np.ones(3)), linear(np.ones(3)))


def test_lru_starts_inside_its_ring():
    cell = nn.LRUCell(3, 200, r_min=0.4, r_max=0.9, max_phase=1.0)
    radius = np.exp(-np.exp(cell.nu_log.value))
    phase = np.exp(cell.theta_log.value)
    assert 0.4 <= radius.min() < 0.45
    assert 0.85 < radius.max() <= 0.9
    assert 0 <= phase.min() < 0.05
    assert 0.95 < phase.max() <= 1.0
    assert_close(np.exp(cell.gamma_log.value), np.sqrt(1 - radius**2))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_lru_starts_finite(dtype):
    cell = nn.LRUCell(3, 10_000, dtype=dtype)
    for state in (cell.nu_log, cell.theta_log, cell.gamma_log):
        assert np.isfinite(np.asarray(state.value, float)).all()


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_urlstm_spreads_its_forget_gates(size):
    gates = sigmoid(np.asarray(nn.URLSTMCell(3, size).bias.value))
    assert (gates >= min(1 / size, 0.5) - 1e-12).all()
    assert (gates <= max(1 - 1 / size, 0.5) + 1e-12).all()
    if size > 2:
        assert gates.min() < 0.01
        assert gates.max() > 0.99


def test_the_time_step_of_the_readout_matters():
    for tau, dt in [(5.0, 1.0), (10.0, 0.5)]:
        readout = nn.LeakyRateReadout(1, 1, tau=tau, dt=dt, w_init=[[1.0]])
        readout.init_state()
        outputs = run(readout, np.array([[1.0], [0.0], [0.0]]))
        assert_close(outputs[:, 0], np.exp(-dt / tau * np.arange(3)), atol=1e-15)
