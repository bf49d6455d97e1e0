"""Imports brainstate without its effect on JAX: some of its versions switch 64-bit numbers off when imported."""

import jax

_enabled = jax.config.read("jax_enable_x64")
import brainstate  # noqa: E402, F401 - between reading the setting and putting it back

jax.config.update("jax_enable_x64", _enabled)
