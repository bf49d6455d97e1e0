"""Layers, cells and spiking neurons as brainstate modules, built on the operators of ``braintrace_core.ops``.

All follow one pattern. First values come from ``key=`` (the same key gives the same bits; give every module of a model
its own, for instance from ``jax.random.split``). ``init_state(batch_size=None)`` makes the hidden states, a call is one
step.

>>> import jax, jax.numpy as jnp
>>> cell = GRUCell(3, 4, key=jax.random.key(1))
>>> cell.init_state(batch_size=2)
>>> cell(jnp.ones((2, 3))).shape
(2, 4)
"""

from . import surrogate
from .conv import Conv1d, Conv2d, Conv3d
from .embedding import Embedding
from .gated import CFNCell, GRUCell, MGUCell
from .gif import GIF
from .linear import GroupedLinear, Linear, LoRA, ScaledWSLinear, SignedWLinear, SparseLinear
from .lru import LRUCell
from .lstm import LSTMCell, URLSTMCell
from .minimal import MiniGRU, MiniLSTM, MinimalRNNCell
from .module import Cell, Layer
from .neurons import ALIF, LIF, GroupALIF
from .readout import LeakyRateReadout
from .spiking import SpikingLayer
from .synapses import COBA, CUBA, DualExpon, Expon
from .vanilla import ValinaRNNCell

__all__ = [
    "ALIF",
    "COBA",
    "CUBA",
    "GIF",
    "LIF",
    "CFNCell",
    "Cell",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "DualExpon",
    "Embedding",
    "Expon",
    "GRUCell",
    "GroupALIF",
    "GroupedLinear",
    "LRUCell",
    "LSTMCell",
    "Layer",
    "LeakyRateReadout",
    "Linear",
    "LoRA",
    "MGUCell",
    "MiniGRU",
    "MiniLSTM",
    "MinimalRNNCell",
    "ScaledWSLinear",
    "SignedWLinear",
    "SparseLinear",
    "SpikingLayer",
    "URLSTMCell",
    "ValinaRNNCell",
    "surrogate",
]
