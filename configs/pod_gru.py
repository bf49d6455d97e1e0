"""A language model of 1.2 billion parameters on 512 chips: three GRU layers of 8,192 units, with pp-prop.

Parameters and states are float32, matrix products bfloat16. Weights, moments and gradients are divided over fsdp; a
window gathers the weights once. Only the batch divides the recurrence, so that no time step waits for another chip.
Its 8,192 streams want a corpus of their own: `--task.file corpus.txt`.

python -m braintrace_flax.plan --config configs/pod_gru.py --topology v5p:8x8x8
"""

from braintrace_flax.runs import GRU, Config
from braintrace_flax.tasks import Text

config = Config(
    name="pod_gru",
    task=Text(length=256),
    network=GRU(units=8192, layers=3, dtype="bfloat16"),
    rule="pp_prop",
    window=32,
    batch_size=8192,
    steps=100_000,
    learning_rate=3e-4,
    warmup=1000,
    mesh="data=64,fsdp=8",
    sharding=((r"layers/\d+/(in|back)", ("fsdp",)), ("in/table", (None, "fsdp")), ("out/kernel", ("fsdp",))),
)
