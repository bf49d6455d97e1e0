"""Learning rules, for ``from braintrace_flax.rules import PPProp``; the same as ``braintrace_core.rules``."""

from braintrace_core import rules as _rules
from braintrace_core.rules import *  # noqa: F403

__all__ = list(_rules.__all__)
