"""Runs: from a config to a trained network, with progress, checkpoints and a report."""

from .config import Config, ConfigError, load_config, parse_rule, with_overrides
from .networks import ALIF, GRU, LRU, Network
from .run import Result, Run, build, evaluate, train

__all__ = [
    "ALIF",
    "GRU",
    "LRU",
    "Config",
    "ConfigError",
    "Network",
    "Result",
    "Run",
    "build",
    "evaluate",
    "load_config",
    "parse_rule",
    "train",
    "with_overrides",
]
