"""Online learning of recurrent networks with eligibility traces, as an ordinary Optax transformation."""

import braintrace_core
from braintrace_core import *  # noqa: F403

__all__ = list(braintrace_core.__all__)

__version__ = "0.1.0"
