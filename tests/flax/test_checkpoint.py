"""Checkpoints: what comes back is what was saved, to the bit, wherever it is put."""

import os
import signal
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import braintrace_flax as braintrace
from braintrace_flax.checkpoint import CheckpointError, CheckpointMismatch, Checkpoints
from braintrace_flax.fingerprint import describe, fingerprints
from braintrace_flax.manifest import begin_manifest
from braintrace_flax.preemption import preemption
from tests.flax import small

pytestmark = [pytest.mark.loose_promotion, pytest.mark.several_devices]  # Optax relies on the first


def make(after=None, rule="d_rtrl", credit="window", model=None, **options):
    model = model or small.model()
    tx = optax.chain(braintrace.online_grad(model, rule=rule, credit=credit), after or optax.adam(0.05))
    return braintrace.train_step(model, tx, window=2, **options)(small.loss)


@pytest.fixture(scope="module")
def step():
    return make()


@pytest.fixture
def trained(step):
    return step(step.init(jax.random.key(1)), *small.data(4))[0]


def plain(**params):
    """A state that no model has made."""
    return braintrace.TrainState(jnp.int32(3), params, jnp.zeros(2), (), jax.random.key(5))


def numbers(value):
    return plain(x=jnp.full(3, value))


def bits(leaf):
    leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return np.asarray(leaf).tobytes()


def assert_same_bits(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert bits(a) == bits(b)


def shapes_of(state):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)


@pytest.mark.parametrize("small_state", [True, False])
def test_training_goes_on_as_if_it_had_not_been_interrupted(small_state, step, trained, tmp_path, monkeypatch):
    if not small_state:
        monkeypatch.setattr("braintrace_flax.checkpoint._SMALL", 0)
    kept = jax.tree.map(jnp.copy, trained)
    with Checkpoints(tmp_path, config={"rate": 0.05}) as checkpoints:
        assert checkpoints.latest is None
        assert checkpoints.save(trained, data={"epoch": 1, "order": [2, 0]}, metrics={"loss": jnp.float32(0.5)})
        later, metrics = step(trained, *small.data(4, seed=2))  # donated while files are written
        if small_state:
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(trained._replace(key=None)))
    with Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.restore(step)
    assert any(float(jnp.abs(trace).max()) > 0 for trace in found.state.opt_state[0].traces.values())
    assert small.differs(later.params, kept.params)
    assert_same_bits(found.state, kept)
    assert (found.data, found.config) == ({"epoch": 1, "order": [2, 0]}, {"rate": 0.05})
    assert (found.metrics, found.number) == ({"loss": 0.5}, 1)
    assert found.versions["jax"] == jax.__version__
    assert found.versions["braintrace-flax"] == braintrace.__version__
    again, same = step(found.state, *small.data(4, seed=2))
    assert_same_bits((again, same), (later, metrics))


def test_every_dtype_every_bit(tmp_path):
    odd = np.array([0.0, -0.0, np.nan, np.inf, 5e-324, 1 / 3])
    state = plain(
        **{
            str(np.dtype(t)): jnp.asarray(odd.astype(t))
            for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
        },
        float8=jnp.asarray(odd.astype(ml_dtypes.float8_e4m3fn)),
        complex64=jnp.asarray(odd.astype(np.float32).view(np.complex64)),
        complex128=jnp.asarray(odd.view(np.complex128)),
        int64=jnp.arange(4) * 2**40,
        uint8=jnp.arange(4, dtype=jnp.uint8),
        int16=-jnp.arange(4, dtype=jnp.int16),
        int4=jnp.arange(4).astype(jnp.int4),
        flags=jnp.array([[True], [False]]),
        nothing=jnp.zeros((0, 3)),
        scalar=jnp.float64(2.5),
        keys=jax.random.split(jax.random.key(2), (2, 3)),
        other=jax.random.key(3, impl="rbg"),
    )
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        assert_same_bits(checkpoints.restore(shapes_of(state)).state, state)
        assert_same_bits(checkpoints.restore(state).state, state)


def placed(values, shape, kind=AxisType.Auto):
    """On a mesh of this shape: divided along both axes, along one, and not at all."""
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(kind, kind), devices=devices)
    specs = {"w": ("data", "model"), "c": (None, ("data", "model")), "b": (), "keys": ("data",)}
    whole = NamedSharding(mesh, PartitionSpec())
    state = jax.tree.map(lambda leaf: jax.device_put(leaf, whole), plain(**values))
    params = {
        name: jax.device_put(value, NamedSharding(mesh, PartitionSpec(*specs[name]))) for name, value in values.items()
    }
    return state._replace(params=params)


def test_from_eight_devices_to_one_two_and_four(rng, tmp_path):
    values = {
        "w": jnp.asarray(rng.normal(size=(8, 4))),
        "c": jnp.asarray(rng.normal(size=(2, 8))).astype(jnp.complex64),
        "b": jnp.asarray(rng.normal(size=3)).astype(jnp.bfloat16),
        "keys": jax.random.split(jax.random.key(0), 4),
    }
    whole = plain(**values)
    states = [placed(values, shape) for shape in ((4, 2), (1, 1), (2, 1), (2, 2))]
    states.append(placed(values, (4, 2), AxisType.Explicit))
    expected = fingerprints(jax.tree.leaves(whole))
    assert len(set(expected)) == len(expected)
    for state in states:
        assert fingerprints(jax.tree.leaves(state)) == expected
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(states[0])
        for state in (whole, *states):
            found = checkpoints.restore(state).state
            assert_same_bits(found, whole)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
                assert a.sharding.is_equivalent_to(b.sharding, b.ndim)
                assert a.committed == b.committed


def test_onto_the_mesh_of_a_train_step(step, trained, tmp_path):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(trained)
        found = checkpoints.restore(step.sharded(mesh)).state
    assert_same_bits(found, trained)
    assert found.carry.sharding.spec == PartitionSpec("data")
    assert len(found.params["w"].sharding.device_set) == 2


def test_numbers_count_calls_and_never_come_twice(tmp_path):
    with Checkpoints(tmp_path, every=3, keep=2) as checkpoints:
        saved = [checkpoints.save(numbers(i), force=i == 7) for i in range(1, 13)]
    assert [i for i, was in enumerate(saved, 1) if was] == [3, 6, 7, 9, 12]
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.all_steps == [9, 12]
        found = checkpoints.restore(numbers(0), step=9)
        assert float(found.state.params["x"][0]) == 9
        checkpoints.save(numbers(0))
        checkpoints.wait()
        assert checkpoints.all_steps == [12, 13]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["12", "13"]


def test_a_run_that_was_not_restored_is_not_displaced(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(numbers(1))
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(CheckpointError, match="up to 1 of a run that was not restored"),
    ):
        checkpoints.save(numbers(2))
    assert float(Checkpoints(tmp_path).restore(numbers(0)).state.params["x"][0]) == 1


@pytest.mark.parametrize(("best", "expected"), [("max:accuracy", 2), ("min:accuracy", 4)])
def test_the_best_is_kept(best, expected, tmp_path):
    values = [0.5, 0.9, float("nan"), 0.1, 0.5, None, 0.3]
    with Checkpoints(tmp_path, keep=1, best=best) as checkpoints:
        for i, value in enumerate(values):
            checkpoints.save(numbers(i), metrics=None if value is None else {"accuracy": value})
        checkpoints.wait()
        assert checkpoints.best == expected
    with Checkpoints(tmp_path, keep=1, best=best) as checkpoints:
        assert (checkpoints.all_steps, checkpoints.best) == ([expected, 7], expected)
        assert checkpoints.restore(numbers(0), step=expected).metrics == {"accuracy": values[expected - 1]}


def test_told_to_stop_it_saves_at_once(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with Checkpoints(tmp_path, every=100) as checkpoints:
        assert not checkpoints.save(numbers(1))
        assert not checkpoints.reached_preemption()
        os.kill(os.getpid(), signal.SIGTERM)
        assert checkpoints.reached_preemption()
        assert checkpoints.save(numbers(2))
        assert checkpoints.all_steps == [2]  # written, not only begun
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_threads_leave_signals_alone():
    seen = []

    def look():
        with preemption() as notice:
            seen.extend([signal.getsignal(signal.SIGTERM), bool(notice)])

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before, False]


def test_a_chosen_part_goes_into_another_optimizer(trained, tmp_path):
    other = make(optax.sgd(0.1, momentum=0.9), rule="pp_prop")
    fresh = other.init(jax.random.key(9))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(trained, data=[7])
        found = checkpoints.restore(fresh, only=("params", "carry"))
        one = checkpoints.restore(fresh, only="params/w").state
        with pytest.raises(ValueError, match="state of arrays"):
            checkpoints.restore(other, only=("params",))
        with pytest.raises(ValueError, match=r"nothing in the checkpoint or the state\. There are step, params/a"):
            checkpoints.restore(fresh, only=("weights",))
        with pytest.raises(CheckpointMismatch, match="opt_state/1/0/trace/a: nothing in the checkpoint"):
            checkpoints.restore(fresh, only=("params", "opt_state"))
    assert small.differs(fresh.params, trained.params)
    assert_same_bits(found.state, fresh._replace(params=trained.params, carry=trained.carry))
    assert_same_bits(one, fresh._replace(params={**fresh.params, "w": trained.params["w"]}))
    assert found.data == [7]


def wider():
    values = {**small.params_of(), "r": jnp.zeros((small.UNITS, small.OUTPUTS + 1))}
    return braintrace.compile(small.step, jnp.zeros((2, small.FEATURES)), params=values, carry=jnp.zeros(small.UNITS))


def shorter():
    values = small.params_of(dtype=jnp.float32)
    zeros = jnp.zeros((2, small.FEATURES), jnp.float32), jnp.zeros(small.UNITS, jnp.float32)
    return braintrace.compile(small.step, zeros[0], params=values, carry=zeros[1])


def test_what_differs_is_said_line_by_line(trained, tmp_path):
    others = {
        "params/r: float64[3, 2] in the checkpoint, expected float64[3, 3]": lambda: make(model=wider()),
        "params/a: float64[3] in the checkpoint, expected float32[3]": lambda: make(model=shorter()),
        "batch size: 2 in the checkpoint, expected 4": lambda: make(model=small.model(4)),
        "carry: float64[2, 3] in the checkpoint, expected float64[4, 3]": lambda: make(model=small.model(4)),
        "rule: DRTRL(rows=None) in the checkpoint, expected PPProp(decay=0.9)": lambda: make(rule="pp_prop"),
        "credit: window in the checkpoint, expected step": lambda: make(credit="step"),
        "opt_state/1/0/mu/a: float64[3] in the checkpoint, expected nothing": lambda: make(optax.sgd(0.1)),
    }
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(trained)
        for line, other in others.items():
            with pytest.raises(CheckpointMismatch, match=r'(?s)/1` is of another .*only=\("params",\)') as caught:
                checkpoints.restore(other())
            assert f"\n  {line}\n" in str(caught.value)


def test_what_json_would_change_is_refused(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for data in ({"position": (1, 2)}, {3: "x"}):
            with pytest.raises(TypeError, match="`data` would come back changed"):
                checkpoints.save(numbers(1), data=data)
        with pytest.raises(TypeError, match="`data` must be made of what JSON knows"):
            checkpoints.save(numbers(1), data={"x": np.zeros(2)})
        for value in (np.zeros(2), "0.5", None):
            with pytest.raises(TypeError, match="metric `loss` must be one number"):
                checkpoints.save(numbers(1), metrics={"loss": value})
    assert Checkpoints(tmp_path).latest is None


def test_what_the_user_goes_on_writing_to_is_saved_as_it_was(tmp_path):
    position, config = {"files": [1]}, {"rate": 1}
    finish = begin_manifest(numbers(1.0), position, config, {}, copy=True)
    position["files"].append(2)
    config["rate"] = 2
    manifest = finish()[1]
    assert manifest.data == {"files": [1]}
    assert manifest.config == {"rate": 1}


def test_arguments_are_checked(tmp_path):
    for options, said in (({"keep": 0}, "`keep`"), ({"every": 0}, "`every`"), ({"best": "loss"}, "`best` is")):
        with pytest.raises(ValueError, match=said):
            Checkpoints(tmp_path, **options)
    with pytest.raises(ValueError, match="not told what is best"):
        _ = Checkpoints(tmp_path).best
    with pytest.raises(TypeError, match="takes a train step or a train state, got a dict"):
        Checkpoints(tmp_path).restore({})
    with pytest.raises(CheckpointError, match="has no checkpoint; there are none"):
        Checkpoints(tmp_path).restore(numbers(1))


def test_a_graph_is_described_without_what_changes_between_processes(trained):
    found = describe(trained.opt_state)
    assert found["relations"]
    assert " at 0x" not in str(found)
    made_again = describe(jax.eval_shape(make(model=small.model.__wrapped__()).init, jax.random.key(0)).opt_state)
    assert made_again == found
    graphs = [begin_manifest(trained, *given, copy=False)()[1].graph for given in ((1, 2, {"a": 3}), (None,) * 3)]
    assert graphs[0] == graphs[1]
    assert describe(()) == {}
