"""Every layer and cell of ``nn`` in a small size, with inputs that exercise it (spiking ones do spike).

Other tests run over these tables: ``CELLS`` have hidden states and parameters, ``LAYERS`` no hidden state, ``NEURONS``
no parameters.

    cell = CELLS["GRUCell"].build()               # also build(dtype=..., key=...)
    cell.init_state(batch_size=2)
    for x in CELLS["GRUCell"].inputs(steps=5, batch_size=2):
        y = cell(x)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers

from braintrace_core import nn


class Example(NamedTuple):
    """How to build a module, and what to feed it.

    ``build(dtype=None, key=None)`` makes the module. Inputs are normal with deviation ``scale`` around ``mean``, or
    integers below ``rows``; their absolute values if ``positive``; ``shape`` is that of one of them, without a batch.
    """

    build: Callable[..., Any]
    shape: tuple[int, ...]
    scale: float = 1.0
    mean: float = 0.0
    rows: int | None = None
    positive: bool = False
    spiking: bool = False

    def inputs(self, steps: int, batch_size: int | None = None, dtype: Any = None, seed: int = 0) -> jax.Array:
        """``(steps, *shape)``, or ``(steps, batch_size, *shape)``."""
        rng = np.random.default_rng(seed)
        shape = (steps, *(() if batch_size is None else (batch_size,)), *self.shape)
        if self.rows is not None:
            return jnp.asarray(rng.integers(self.rows, size=shape))
        x = self.mean + self.scale * rng.normal(size=shape)
        return jnp.asarray(np.abs(x) if self.positive else x, dtype or jnp.result_type(float))

    def input(self, dtype: Any = None, seed: int = 0) -> jax.Array:
        """One step of a single stream, ``shape``."""
        return self.inputs(1, dtype=dtype, seed=seed)[0]


def spread(key: Any, shape: Any, dtype: Any) -> jax.Array:
    """Biases that are not zero, so that nothing cancels."""
    return initializers.normal(0.3)(key, shape, dtype)


def spiking(
    neuron: Callable[..., nn.LIF],
    synapse: Callable[..., Any] | None = None,
    output: Any = None,
    *,
    gain: float = 1.0,
    recurrent: bool = True,
    bias: bool = False,
) -> Example:
    """A spiking layer from 3 inputs to 4 neurons."""
    output = nn.CUBA() if output is None else output
    positive = isinstance(output, nn.COBA)

    def build(dtype: Any = None, key: Any = None) -> nn.SpikingLayer:
        options = {"w_init": initializers.normal(gain), "dtype": dtype, "key": key}
        sizes = 7 if recurrent else 3, 4
        if positive:
            W = nn.SignedWLinear(*sizes, **options)
        else:
            W = nn.Linear(*sizes, b_init=spread if bias else None, **options)
        other = None if synapse is None else synapse(4, dtype=dtype)
        return nn.SpikingLayer(3, neuron(4, dtype=dtype), other, output, W=W, recurrent=recurrent)

    return Example(build, (3,), scale=1.0, mean=0.5, positive=positive, spiking=True)


def of(layer: Callable[..., Any], *sizes: Any, **fixed: Any) -> Callable[..., Any]:
    """A builder with these sizes and options."""
    return lambda **options: layer(*sizes, **fixed, **options)


def lif(size: int, **options: Any) -> nn.LIF:
    return nn.LIF(size, tau=8.0, **options)


def hard_lif(size: int, **options: Any) -> nn.LIF:
    return nn.LIF(size, tau=8.0, reset="hard", surrogate=nn.surrogate.FastSigmoid(), **options)


def alif(size: int, **options: Any) -> nn.ALIF:
    return nn.ALIF(size, tau=8.0, tau_a=20.0, beta=0.3, **options)


def group_alif(size: int, **options: Any) -> nn.GroupALIF:
    return nn.GroupALIF(size, tau=8.0, tau_a=20.0, beta=0.3, **options)


def gif(size: int, **options: Any) -> nn.GIF:
    return nn.GIF(size, tau=8.0, A1=0.5, R1=0.2, theta_reset=1.2, a=0.05, b=0.1, **options)


CELLS: dict[str, Example] = {
    "ValinaRNNCell": Example(of(nn.ValinaRNNCell, 3, 4, b_init=spread), (3,)),
    "GRUCell": Example(of(nn.GRUCell, 3, 4, b_init=spread), (3,)),
    "MGUCell": Example(of(nn.MGUCell, 3, 4, b_init=spread), (3,)),
    "CFNCell": Example(of(nn.CFNCell, 3, 4, b_init=spread), (3,)),
    "LSTMCell": Example(of(nn.LSTMCell, 3, 4, b_init=spread), (3,)),
    "URLSTMCell": Example(of(nn.URLSTMCell, 3, 4), (3,)),
    "MinimalRNNCell": Example(of(nn.MinimalRNNCell, 3, 4, b_init=spread), (3,)),
    "MiniGRU": Example(of(nn.MiniGRU, 3, 4, b_init=spread), (3,)),
    "MiniGRU recurrent": Example(of(nn.MiniGRU, 3, 4, b_init=spread, recurrent_gates=True), (3,)),
    "MiniLSTM": Example(of(nn.MiniLSTM, 3, 4, b_init=spread), (3,)),
    "MiniLSTM recurrent": Example(of(nn.MiniLSTM, 3, 4, b_init=spread, recurrent_gates=True), (3,)),
    "LRUCell": Example(of(nn.LRUCell, 3, 4), (3,)),
    "LeakyRateReadout": Example(of(nn.LeakyRateReadout, 3, 4), (3,)),
    "LIF delta": spiking(lif),
    "LIF delta feedforward": spiking(lif, recurrent=False, bias=True),
    "LIF delta hard": spiking(hard_lif),
    "LIF Expon CUBA": spiking(lif, nn.Expon, nn.CUBA(scale=2.0)),
    "LIF Expon COBA": spiking(lif, nn.Expon, nn.COBA(E=3.0), gain=0.2),
    "LIF DualExpon CUBA": spiking(lif, nn.DualExpon, gain=2.0),
    "LIF DualExpon COBA": spiking(lif, nn.DualExpon, nn.COBA(E=3.0), gain=0.2),
    "ALIF delta": spiking(alif),
    "ALIF Expon CUBA": spiking(alif, nn.Expon, nn.CUBA(scale=2.0)),
    "ALIF Expon COBA": spiking(alif, nn.Expon, nn.COBA(E=3.0), gain=0.2),
    "GroupALIF delta": spiking(group_alif),
    "GroupALIF Expon CUBA": spiking(group_alif, nn.Expon, nn.CUBA(scale=2.0)),
    "GIF delta": spiking(gif),
    "GIF Expon CUBA": spiking(gif, nn.Expon, nn.CUBA(scale=2.0)),
}

STRUCTURE = (np.array([0, 2, 1, 0]), np.array([1, 0, 3, 2]), (3, 4))
HALF = np.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]])

LAYERS: dict[str, Example] = {
    "Linear": Example(of(nn.Linear, 3, 4, b_init=spread), (3,)),
    "Linear masked": Example(of(nn.Linear, 3, 4, b_init=spread, mask=HALF), (3,)),
    "GroupedLinear": Example(of(nn.GroupedLinear, 2, 3, 4, b_init=spread), (2, 3)),
    "SignedWLinear": Example(of(nn.SignedWLinear, 3, 4, sign=2 * HALF - 1), (3,)),
    "ScaledWSLinear": Example(of(nn.ScaledWSLinear, 3, 4, b_init=spread), (3,)),
    "SparseLinear": Example(of(nn.SparseLinear, STRUCTURE, b_init=spread), (3,)),
    "LoRA": Example(of(nn.LoRA, 3, 2, 4, alpha=3.0, b_init=initializers.normal()), (3,)),
    "Embedding": Example(of(nn.Embedding, 5, 4), (), rows=5),
    "Conv1d": Example(of(nn.Conv1d, (6, 3), 4, 3, b_init=spread), (6, 3)),
    "Conv2d": Example(of(nn.Conv2d, (5, 4, 2), 6, (3, 2), strides=2, groups=2, b_init=spread), (5, 4, 2)),
    "Conv3d": Example(of(nn.Conv3d, (3, 4, 3, 2), 2, 2, padding="VALID", b_init=spread), (3, 4, 3, 2)),
}

NEURONS: dict[str, Example] = {
    "LIF": Example(of(nn.LIF, 4), (4,), scale=3.0, mean=3.0, spiking=True),
    "LIF hard": Example(of(nn.LIF, 4, reset="hard", V_rest=0.2), (4,), scale=3.0, mean=3.0, spiking=True),
    "ALIF": Example(of(nn.ALIF, 4, beta=0.3), (4,), scale=3.0, mean=3.0, spiking=True),
    "GroupALIF": Example(of(nn.GroupALIF, 4, beta=0.3), (4,), scale=3.0, mean=3.0, spiking=True),
    "GIF": Example(of(gif, 4), (4,), scale=3.0, mean=3.0, spiking=True),
    "Expon": Example(of(nn.Expon, 4), (4,)),
    "DualExpon": Example(of(nn.DualExpon, 4), (4,)),
}


Values = dict[tuple[str, ...], Any]


def values(module: Any, kind: type[brainstate.State] = brainstate.State) -> Values:
    """The values of the states of one kind, by path."""
    return {path: state.value for path, state in module.states(kind).items()}


def pure(module: Any, x: jax.Array) -> Callable[[Values, jax.Array], tuple[Values, jax.Array]]:
    """The module's step as a pure function: values of its states and an input in, new values and the output out."""
    function = brainstate.transform.StatefulFunction(module)
    function.make_jaxpr(x)
    path_of = {id(state): path for path, state in module.states().items()}
    paths = [path_of[id(state)] for state in function.get_states(x)]

    def step(old: Values, x: jax.Array) -> tuple[Values, jax.Array]:
        new, y = function.jaxpr_call([old[path] for path in paths], x)
        # What is only read comes back as None.
        return old | {path: value for path, value in zip(paths, new, strict=True) if value is not None}, y

    return step


def run(module: Any, inputs: jax.Array) -> np.ndarray:
    """The outputs of all steps; the module's states move on."""
    step = pure(module, inputs[0])
    new, outputs = jax.jit(lambda old: jax.lax.scan(step, old, inputs))(values(module))
    for path, state in module.states().items():
        state.value = new[path]
    return np.asarray(outputs)


def assert_close(actual: Any, expected: Any, atol: float = 1e-12) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)
