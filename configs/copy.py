"""Copy: repeat a sequence of symbols after a delay, with a GRU.

python -m braintrace_flax.train --config configs/copy.py
"""

from braintrace_flax.runs import GRU, Config
from braintrace_flax.tasks import Copy

config = Config(
    name="copy",
    task=Copy(),
    network=GRU(units=128),
    rule="d_rtrl",
    window=10,
    batch_size=32,
    steps=2000,
    learning_rate=2e-3,
)
