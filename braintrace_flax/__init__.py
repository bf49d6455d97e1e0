"""Online learning of recurrent networks with eligibility traces, as an ordinary Optax transformation."""

import braintrace_core
from braintrace_core import *  # noqa: F403

from .adapters import Hidden
from .checkpoint import CheckpointDamaged, CheckpointError, CheckpointMismatch, Checkpoints, Restored
from .model import Model, compile
from .online_grad import OnlineGradState, online_grad, reset_traces
from .quality import check_against_bptt
from .sharding import data_sharding, shardings
from .state import TrainState
from .train_step import TrainStep, buckets, train_step
from .window import Window, value_and_grad

__all__ = [
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointMismatch",
    "Checkpoints",
    "Hidden",
    "Model",
    "OnlineGradState",
    "Restored",
    "TrainState",
    "TrainStep",
    "Window",
    "buckets",
    "check_against_bptt",
    "compile",
    "data_sharding",
    "online_grad",
    "reset_traces",
    "shardings",
    "train_step",
    "value_and_grad",
]
__all__ += braintrace_core.__all__

__version__ = "0.1.0"
