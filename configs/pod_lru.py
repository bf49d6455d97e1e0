"""Six LRU layers of 2,048 complex units on 256 chips, with D-RTRL: its traces are most of what the chips hold.

All of it is float32, of which a TPU multiplies the leading bfloat16 bits. Traces lie where their examples do and are
never sent; parameters are small beside them and whole on every chip.

python -m braintrace_flax.plan --config configs/pod_lru.py --topology v5e:16x16
"""

from braintrace_flax.runs import LRU, Config
from braintrace_flax.tasks import Text

config = Config(
    name="pod_lru",
    task=Text(length=256),
    network=LRU(units=2048, width=2048, layers=6),
    rule="d_rtrl",
    window=32,
    batch_size=4096,
    steps=100_000,
    learning_rate=3e-4,
    warmup=1000,
    mesh="data=256",
)
