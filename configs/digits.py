"""Handwritten digits, pixel by pixel, with a two-layer LRU that learns online.

python -m braintrace_flax.train --config configs/digits.py
"""

from braintrace_flax.runs import LRU, Config
from braintrace_flax.tasks import Digits

config = Config(
    name="digits",
    task=Digits(by="pixel"),
    network=LRU(units=64, width=64, layers=2),
    rule="d_rtrl",
    window=16,
    batch_size=32,
    steps=1500,
    learning_rate=2e-3,
    evaluate_every=250,
    checkpoint_every=250,
)
