"""Networks of the configs in short products: the same training as in float32, to rounding."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from braintrace_flax.runs import GRU, LRU, Config, build
from braintrace_flax.sharding import gathered, shardings
from braintrace_flax.tasks import Copy

pytestmark = [pytest.mark.loose_promotion, pytest.mark.several_devices]  # Optax relies on the first
TASK = Copy(symbols=3, length=2, delay=2)


@pytest.mark.parametrize(
    ("network", "rule", "credit"),
    [
        (LRU(units=6, width=8, layers=1), "d_rtrl", "window"),
        (LRU(units=6, width=8, layers=1), "d_rtrl", "step"),
        (GRU(units=8), "pp_prop", "window"),
    ],
)
def test_short_products_train_like_long_ones(network, rule, credit):
    batch = TASK.batch(0, 4)
    found = {}
    with jax.enable_x64(False):
        for dtype in ("float32", "bfloat16"):
            config = Config("n", TASK, replace(network, dtype=dtype), rule=rule, credit=credit, window=2, batch_size=4)
            step = build(config).step
            state = step.init(jax.random.key(0))
            assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
            state, _ = step(state, batch.inputs, batch.targets, batch.reset, batch.mask)
            moments = optax.tree.get(state.opt_state, "mu")
            found[dtype] = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(moments)])
    long, short = found["float32"], found["bfloat16"]
    assert np.linalg.norm(long) > 1e-3
    assert 0 < np.linalg.norm(short - long) < 0.05 * np.linalg.norm(long)


def test_a_weight_that_is_cast_is_gathered_as_short_as_it_is_used():
    network = GRU(units=8, dtype="bfloat16")
    step = build(Config("n", TASK, network, window=2, batch_size=4)).step
    mesh = jax.make_mesh((4,), ("fsdp",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    placed = shardings(step, mesh, [("back|kernel", ("fsdp",)), ("layers.*bias", (None, "fsdp"))])
    found = gathered(step.model, placed.params)
    assert found["in"]["bias"] is None
    assert found["layers"][0]["in"] is None
    assert found["layers"][0]["back"].dtype == found["out"]["kernel"].dtype == jnp.bfloat16
    assert found["layers"][0]["back"].sharding.spec == jax.P(None)
    assert found["layers"][0]["bias"].dtype == jnp.float32


def test_another_dtype_is_refused():
    with pytest.raises(ValueError, match="GRU needs dtype to be float32 or bfloat16"):
        GRU(dtype="int8")
