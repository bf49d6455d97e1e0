"""Evidence accumulation: which side had more cues, with spiking neurons that adapt and e-prop.

python -m braintrace_flax.train --config configs/evidence.py
"""

from braintrace_flax.runs import ALIF, Config
from braintrace_flax.tasks import EvidenceAccumulation

config = Config(
    name="evidence",
    task=EvidenceAccumulation(),
    network=ALIF(units=100),
    rule="e_prop:kappa=0.95",
    credit="step",
    window=0,
    batch_size=64,
    steps=600,
    learning_rate=5e-3,
)
