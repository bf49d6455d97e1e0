"""Online learning for recurrent and spiking networks in JAX: the compiler, its operators, learning rules and layers.

>>> import jax.numpy as jnp
>>> import braintrace_core
>>> def step(params, h, x):
...     h = jnp.tanh(x @ params["w"] + params["decay"] * h)
...     return h, h
>>> params = {"w": jnp.ones((3, 4)), "decay": jnp.ones(4)}
>>> graph = braintrace_core.compile_step_graph(step, params, jnp.zeros(4), jnp.zeros(3))
>>> len(graph.hidden_groups), len(graph.hidden_param_op_relations)
(1, 2)
"""

from . import _brainstate, compiler, nn, ops, rules  # noqa: F401 - _brainstate comes first: see there
from .compiler import *  # noqa: F403
from .errors import CompilationError, NotSupportedError
from .ops import *  # noqa: F403

__all__ = ["CompilationError", "NotSupportedError", "nn", "rules"]
__all__ += compiler.__all__
__all__ += ops.__all__
