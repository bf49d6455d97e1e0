"""Evidence accumulation: which side had more cues, with spiking neurons that adapt and e-prop.

python -m braintrace_flax.train --config configs/evidence.py

2 cores that did other work too, no accelerator: 68 s. Error over the last 50 training batches, all of new trials: 1.7 %
(1.1 to 2.5 over seeds 0, 1 and 2). With twice the learning rate and windows of 3, one seed of three did not learn.
"""

from braintrace_flax.runs import ALIF, Config
from braintrace_flax.tasks import EvidenceAccumulation

config = Config(
    name="evidence",
    task=EvidenceAccumulation(),
    network=ALIF(units=100),
    rule="e_prop",
    credit="step",
    window=6,
    batch_size=64,
    steps=300,
    learning_rate=1e-3,
    cooldown=1.0,
    evaluate_every=50,
    checkpoint_every=50,
)
