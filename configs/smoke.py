"""The smallest run there is: digits row by row, for seconds.

python -m braintrace_flax.train --config configs/smoke.py
"""

from braintrace_flax.runs import LRU, Config
from braintrace_flax.tasks import Digits

config = Config(
    name="smoke",
    task=Digits(by="row"),
    network=LRU(units=16, width=16, layers=1),
    window=4,
    batch_size=16,
    steps=30,
    learning_rate=5e-3,
    evaluate_every=10,
    checkpoint_every=10,
)
