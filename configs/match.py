"""Delayed match to sample, with spiking neurons that adapt and pp-prop.

python -m braintrace_flax.train --config configs/match.py
"""

from braintrace_flax.runs import ALIF, Config
from braintrace_flax.tasks import DelayedMatch

config = Config(
    name="match",
    task=DelayedMatch(),
    network=ALIF(units=100),
    rule="pp_prop",
    window=12,
    batch_size=64,
    steps=1000,
    learning_rate=2e-3,
)
