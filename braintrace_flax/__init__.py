"""Online learning of recurrent networks with eligibility traces, as an ordinary Optax transformation."""

from braintrace_core import *  # noqa: F403

__version__ = "0.1.0"
