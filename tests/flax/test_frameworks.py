"""One network, an LSTM with a read-out, as every framework has it: the same parameters get the same updates."""

from __future__ import annotations

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import braintrace_flax as braintrace
from tests.flax.zoo import BATCH, CLASSES, DOUBLE, FEATURES, UNITS, assert_same, squared_error

GATES = "igfo"  # in this order, side by side
EXAMPLE = jnp.zeros((BATCH, FEATURES))
CALLS, STEPS, WINDOW = 3, 4, 2

pytestmark = pytest.mark.loose_promotion  # for brainstate's layers


@pytest.fixture(autouse=True)
def double_precision():
    with brainstate.environ.context(precision=64):
        yield
    jax.config.update("jax_enable_x64", True)  # leaving brainstate's context turned it off, for all tests to come


def parameters():
    draw = np.random.default_rng(0).standard_normal
    shapes = {
        "wi": (FEATURES, 4 * UNITS),
        "wh": (UNITS, 4 * UNITS),
        "b": (4 * UNITS,),
        "w": (UNITS, CLASSES),
        "c": (CLASSES,),
    }
    return {name: jnp.asarray(0.6 * draw(shape)) for name, shape in shapes.items()}


def ordered(array, order, start=GATES):
    """The gates of the last axis in another order."""
    pieces = dict(zip(start, jnp.split(array, 4, axis=-1), strict=True))
    return jnp.concatenate([pieces[gate] for gate in order], axis=-1)


class Function:
    def model(self, p):
        def step(p, carry, x):
            h, c = carry
            i, g, f, o = jnp.split(x @ p["wi"] + h @ p["wh"] + p["b"], 4)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h @ p["w"] + p["c"]

        return braintrace.compile(step, EXAMPLE, params=p, carry=(jnp.zeros(UNITS), jnp.zeros(UNITS)))

    def back(self, params):
        return params


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, carry, x):
        carry, h = linen.OptimizedLSTMCell(UNITS, name="cell", **DOUBLE)(carry, x)
        return carry, linen.Dense(CLASSES, name="out", **DOUBLE)(h)


class Linen:
    def model(self, p):
        wi, wh, b = (jnp.split(p[name], 4, axis=-1) for name in ("wi", "wh", "b"))
        cell = {f"i{gate}": {"kernel": wi[k]} for k, gate in enumerate(GATES)}
        cell |= {f"h{gate}": {"kernel": wh[k], "bias": b[k]} for k, gate in enumerate(GATES)}
        params = {"cell": cell, "out": {"kernel": p["w"], "bias": p["c"]}}
        carry = linen.OptimizedLSTMCell(UNITS, **DOUBLE).initialize_carry(jax.random.key(0), EXAMPLE.shape)
        return braintrace.compile(LinenNet(), EXAMPLE, params=params, carry=carry)

    def back(self, params):
        cell, out = params["cell"], params["out"]

        def join(side, kind):
            return jnp.concatenate([cell[side + gate][kind] for gate in GATES], axis=-1)

        found = {"wi": join("i", "kernel"), "wh": join("h", "kernel"), "b": join("h", "bias")}
        return found | {"w": out["kernel"], "c": out["bias"]}


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.cell = nnx.OptimizedLSTMCell(FEATURES, UNITS, rngs=rngs, **DOUBLE)
        self.out = nnx.Linear(UNITS, CLASSES, rngs=rngs, **DOUBLE)

    def initialize_carry(self, input_shape, rngs):
        return self.cell.initialize_carry(input_shape, rngs)

    def __call__(self, carry, x):
        carry, h = self.cell(carry, x)
        return carry, self.out(h)


class Nnx:
    def model(self, p):
        net = NnxNet(nnx.Rngs(0))
        net.cell.dense_i.kernel[...] = ordered(p["wi"], "ifgo")
        net.cell.dense_h.kernel[...] = ordered(p["wh"], "ifgo")
        net.cell.dense_h.bias[...] = ordered(p["b"], "ifgo")
        net.out.kernel[...], net.out.bias[...] = p["w"], p["c"]
        return braintrace.compile(net, EXAMPLE)

    def back(self, params):
        p = nnx.to_pure_dict(params)
        cell, out = p["cell"], p["out"]
        found = {"wi": cell["dense_i"]["kernel"], "wh": cell["dense_h"]["kernel"], "b": cell["dense_h"]["bias"]}
        found = {name: ordered(array, GATES, "ifgo") for name, array in found.items()}
        return found | {"w": out["kernel"], "c": out["bias"]}


class BrainstateNet(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = brainstate.nn.LSTMCell(FEATURES, UNITS)
        self.out = brainstate.nn.Linear(UNITS, CLASSES)

    def update(self, x):
        return self.out(self.cell(x))


class Brainstate:
    shift = jnp.repeat(jnp.array([0.0, 0.0, 1.0, 0.0]), UNITS)  # brainstate adds one to the forget gate

    def model(self, p):
        net = BrainstateNet()
        net.cell.W.weight.value = {"weight": jnp.concatenate([p["wi"], p["wh"]]), "bias": p["b"] - self.shift}
        net.out.weight.value = {"weight": p["w"], "bias": p["c"]}
        return braintrace.compile(net, EXAMPLE)

    def back(self, params):
        cell, out = params["cell/W/weight"], params["out/weight"]
        wi, wh = jnp.split(cell["weight"], [FEATURES])
        return {"wi": wi, "wh": wh, "b": cell["bias"] + self.shift, "w": out["weight"], "c": out["bias"]}


def trained(model):
    """The parameters after some calls of a train step, and those before."""
    tx = optax.chain(braintrace.online_grad(model), optax.sgd(0.1, momentum=0.9))
    step = braintrace.train_step(model, tx, window=WINDOW)(squared_error)
    rng = np.random.default_rng(1)
    state = step.init(jax.random.key(0))
    before = jax.tree.map(jnp.array, state.params)
    for _ in range(CALLS):
        inputs, targets = (jnp.asarray(rng.standard_normal((STEPS, BATCH, n))) for n in (FEATURES, CLASSES))
        state, metrics = step(state, inputs, targets)
    assert not metrics["skipped"].any()
    return before, state.params


def test_updates_are_the_same():
    expected = None
    for framework in (Function(), Linen(), Nnx(), Brainstate()):
        before, after = map(framework.back, trained(framework.model(parameters())))
        assert_same(before, parameters())
        updates = jax.tree.map(jnp.subtract, after, before)
        expected = updates if expected is None else expected
        assert_same(updates, expected)
