"""One adapter a framework: each turns a model into one pure step function; the compiler sees nothing else."""

from .choose import adapt
from .nnx import Hidden
from .step import Step

__all__ = ["Hidden", "Step", "adapt"]
