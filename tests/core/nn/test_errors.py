"""What goes wrong is said in words that help."""

import re

import jax
import numpy as np
import pytest

from braintrace_core import nn

CASES = {
    "size": (
        lambda: nn.Linear(0, 4),
        ValueError,
        "Linear needs in_size as a positive integer or a tuple of them, got 0.",
    ),
    "size type": (
        lambda: nn.GRUCell(3, 4.0),
        ValueError,
        "GRUCell needs out_size as a positive integer or a tuple of them, got 4.0.",
    ),
    "axes": (
        lambda: nn.GRUCell((2, 3), 4),
        ValueError,
        "GRUCell maps one axis to one axis, got in_size=(2, 3) and out_size=(4,). Flatten the input first.",
    ),
    "dtype": (lambda: nn.Linear(3, 4, dtype=int), TypeError, "Linear needs a floating dtype, got dtype=int64."),
    "key": (lambda: nn.Linear(3, 4, key=3), TypeError, "key must be a JAX key such as jax.random.key(0), got 3."),
    "first value": (
        lambda: nn.Linear(3, 4, w_init=np.ones((4, 3))),
        ValueError,
        "w_init must give shape (3, 4), got (4, 3).",
    ),
    "input": (lambda: nn.Linear(3, 4)(np.ones((2, 5))), ValueError, "Linear needs x of shape (..., 3), got (2, 5)."),
    "scalar input": (lambda: nn.Linear(3, 4)(1.0), ValueError, "Linear needs x of shape (..., 3), got ()."),
    "grouped input": (
        lambda: nn.GroupedLinear(2, 3, 4)(np.ones((3, 2))),
        ValueError,
        "GroupedLinear needs x of shape (..., 2, 3), got (3, 2).",
    ),
    "complex input": (
        lambda: nn.Linear(3, 4)(np.ones(3, complex)),
        TypeError,
        "Linear has dtype float64 and cannot take x of dtype complex128.",
    ),
    "mask": (
        lambda: nn.Linear(3, 4, mask=np.ones(3)),
        ValueError,
        "mask must have the weight's shape (3, 4), got (3,).",
    ),
    "sign": (
        lambda: nn.SignedWLinear(3, 4, sign=np.ones(3)),
        ValueError,
        "sign must have the weight's shape (3, 4), got (3,).",
    ),
    "rank": (lambda: nn.LoRA(3, 4, 5), ValueError, "LoRA needs a rank between 1 and 3, got 4."),
    "structure": (
        lambda: nn.SparseLinear([[1, 2]]),
        ValueError,
        "SparseLinear needs structure as (rows, cols, (in, out)) or as a sparse matrix, got list.",
    ),
    "indices": (lambda: nn.Embedding(3, 4)(np.ones(2)), ValueError, "embedding needs integer indices, got float64."),
    "conv size": (
        lambda: nn.Conv2d((8, 3), 4, 3),
        ValueError,
        "Conv2d needs in_size as 2 spatial sizes and the channels, got (8, 3).",
    ),
    "conv window": (
        lambda: nn.Conv2d((8, 8, 3), 4, (3,)),
        ValueError,
        "Conv2d needs window as one integer or as 2, got (3,).",
    ),
    "conv groups": (
        lambda: nn.Conv1d((8, 3), 4, 3, groups=2),
        ValueError,
        "Conv1d cannot split 3 input and 4 output channels into 2 equal groups.",
    ),
    "ring": (
        lambda: nn.LRUCell(3, 4, r_min=0.9, r_max=0.5),
        ValueError,
        "LRUCell needs 0 <= r_min < r_max <= 1, got r_min=0.9 and r_max=0.5.",
    ),
    "phase": (lambda: nn.LRUCell(3, 4, max_phase=0.0), ValueError, "LRUCell needs a positive max_phase, got 0.0."),
    "hidden size": (
        lambda: nn.LRUCell(3, 0),
        ValueError,
        "LRUCell needs d_hidden as a positive integer or a tuple of them, got 0.",
    ),
    "readout": (
        lambda: nn.LeakyRateReadout(3, 4, tau=0.0),
        ValueError,
        "LeakyRateReadout needs a positive tau, got 0.0.",
    ),
    "tau": (lambda: nn.LIF(4, tau=-1.0), ValueError, "LIF needs a positive tau, got -1.0."),
    "dt": (lambda: nn.ALIF(4, dt=0.0), ValueError, "ALIF needs a positive dt, got 0.0."),
    "finite": (lambda: nn.LIF(4, R=float("nan")), ValueError, "LIF needs a finite R, got nan."),
    "constant": (
        lambda: nn.ALIF(4, tau_a=np.ones(3)),
        ValueError,
        "ALIF needs tau_a as a number or an array of shape (4,), got (3,).",
    ),
    "threshold": (lambda: nn.LIF(4, V_reset=1.0), ValueError, "LIF needs V_th above V_reset, got 1.0 and 1.0."),
    "reset": (lambda: nn.LIF(4, reset="mild"), ValueError, 'LIF needs reset="soft" or reset="hard", got \'mild\'.'),
    "option": (lambda: nn.ALIF(4, tua=3.0), TypeError, "unexpected keyword argument 'tua'"),
    "rise": (
        lambda: nn.DualExpon(4, tau_rise=10.0),
        ValueError,
        "DualExpon needs tau_rise below tau_decay, got 10.0 and 10.0.",
    ),
    "synapse": (
        lambda: nn.SpikingLayer(3, nn.LIF(4), nn.Expon(5)),
        ValueError,
        "SpikingLayer needs synapse from (4,) to (4,) of dtype float64, got (5,) to (5,) of dtype float64.",
    ),
    "synapse dtype": (
        lambda: nn.SpikingLayer(3, nn.LIF(4, dtype="float32"), nn.Expon(4)),
        ValueError,
        "SpikingLayer needs synapse from (4,) to (4,) of dtype float32, got (4,) to (4,) of dtype float64.",
    ),
    "weights": (
        lambda: nn.SpikingLayer(3, nn.LIF(4), W=nn.Linear(3, 4)),
        ValueError,
        "SpikingLayer needs W from (7,) to (4,) of dtype float64, got (3,) to (4,) of dtype float64.",
    ),
    "batch size": (
        lambda: nn.GRUCell(3, 4).init_state(batch_size=0),
        ValueError,
        "GRUCell needs batch_size as a positive integer or a tuple of them, got 0.",
    ),
    "state option": (
        lambda: nn.GRUCell(3, 4).init_state(batchsize=3),
        TypeError,
        "unexpected keyword argument 'batchsize'",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_error(name):
    wrong, error, text = CASES[name]
    with pytest.raises(error, match=re.escape(text)):
        wrong()


def test_current_of_another_shape():
    neuron = nn.LIF(4)
    neuron.init_state()
    with pytest.raises(ValueError, match=re.escape("LIF needs x of shape (..., 4), got (3,).")):
        neuron(np.ones(3))


def test_old_keys_are_keys():
    old, new = nn.Linear(3, 4, key=jax.random.PRNGKey(3)), nn.Linear(3, 4, key=jax.random.key(3))
    np.testing.assert_array_equal(old.weight.value["weight"], new.weight.value["weight"])
