"""A character model on an endless stream: it never resets, in constant memory.

python -m braintrace_flax.train --config configs/text.py
"""

from braintrace_flax.runs import LRU, Config
from braintrace_flax.tasks import Text

config = Config(
    name="text",
    task=Text(),
    network=LRU(units=128, width=128, layers=2),
    rule="d_rtrl",
    window=16,
    batch_size=16,
    steps=3000,
    learning_rate=2e-3,
)
