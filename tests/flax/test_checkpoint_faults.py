"""Checkpoints when things go wrong: damage is never read as if there were none, failures cost nothing else."""

import ast
import gc
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_flax
from braintrace_flax import storage
from braintrace_flax.checkpoint import CheckpointDamaged, CheckpointError, Checkpoints
from tests.flax.test_checkpoint import assert_same_bits, make, numbers, plain, shapes_of

pytestmark = [
    pytest.mark.loose_promotion,  # Optax relies on it
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # Orbax drops its other reads
]

ROOT = pathlib.Path(__file__).parents[2]
FLIPS = 200


@pytest.fixture(autouse=True)
def collected():
    """What Orbax has dropped is found here, not in another test."""
    yield
    gc.collect()


def varied():
    draws = np.random.default_rng(0)
    return plain(
        w=jnp.asarray(draws.normal(size=(24, 16))),  # long enough to lie where Orbax has no checksum
        short=jnp.asarray(draws.normal(size=40)).astype(jnp.bfloat16),
        zeros=jnp.zeros(50, jnp.float32),
        keys=jax.random.split(jax.random.key(1), 3),
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A directory with one checkpoint, its state and its files."""
    directory, state = tmp_path_factory.mktemp("written"), varied()
    with Checkpoints(directory, config={"width": 8}) as checkpoints:
        checkpoints.save(state, data={"epoch": 3}, metrics={"loss": 0.25})
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)
    assert len(files) > 5
    return directory, state, files


def outcome(directory, state, like):
    """How it is refused; if it is not, it must be what was written."""
    try:
        found = Checkpoints(directory).restore(like)
    except CheckpointDamaged as error:
        return "values" if "not the bits that were written" in str(error) else "files"
    assert_same_bits(found.state, state)
    assert (found.data, found.config, found.metrics) == ({"epoch": 3}, {"width": 8}, {"loss": 0.25})
    return None


def test_no_flipped_bit_is_read_as_if_it_were_not(written):
    directory, state, files = written
    draws, like, seen = np.random.default_rng(1), shapes_of(state), {}
    for flip in range(FLIPS):
        path = files[flip % len(files)]
        content = path.read_bytes()
        place = int(draws.integers(len(content)))
        changed = bytearray(content)
        changed[place] ^= 1 << int(draws.integers(8))
        path.write_bytes(changed)
        try:
            seen.setdefault(path.name, []).append(outcome(directory, state, like))
        finally:
            path.write_bytes(content)
    refused = [kind for kinds in seen.values() for kind in kinds if kind is not None]
    assert len(refused) > FLIPS // 5
    assert "values" in refused  # these Orbax would have given back, wrong
    assert outcome(directory, state, like) is None


def test_no_missing_or_cut_file_is_overlooked(written):
    directory, state, files = written
    like, seen = shapes_of(state), []
    for path in files:
        content = path.read_bytes()
        for rest in (None, content[: len(content) // 2]):
            path.unlink()
            if rest is not None:
                path.write_bytes(rest)
            try:
                seen.append(outcome(directory, state, like))
            finally:
                path.write_bytes(content)
    assert len(seen) - seen.count(None) >= len(files)
    assert outcome(directory, state, like) is None


def test_the_newest_that_is_intact_is_offered(tmp_path):
    state = varied()
    with Checkpoints(tmp_path) as checkpoints:
        for _ in range(3):
            checkpoints.save(state)
    values = max((tmp_path / "3").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(values.read_bytes())
    content[len(content) // 3] ^= 16
    values.write_bytes(content)
    for path in (tmp_path / "2").rglob("d/*"):
        path.unlink()
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointDamaged, match=r"(?s)/3` .*newest that is intact is 1: `restore\(..., step=1\)`"):
            checkpoints.restore(state)
        assert_same_bits(checkpoints.restore(state, step=1).state, state)
        shutil.rmtree(tmp_path / "1" / "state")
        with pytest.raises(CheckpointDamaged, match="No other is intact"):
            checkpoints.restore(state)


def test_damaged_values_are_named(written, monkeypatch):
    directory, state, _ = written
    whole = storage.read_arrays

    def changed(path, targets):
        return {**(found := whole(path, targets)), "params/zeros": -found["params/zeros"]}

    monkeypatch.setattr("braintrace_flax.restoring.read_arrays", changed)
    with pytest.raises(CheckpointDamaged, match="not the bits that were written:\n  params/zeros\nNo other"):
        Checkpoints(directory).restore(state)


def test_a_save_that_was_cut_short_is_ignored_and_made_anew(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(numbers(1))
    left = tmp_path / f"2{storage.UNFINISHED}"
    shutil.copytree(tmp_path / "1", left)
    (tmp_path / "0.deleted").mkdir()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.all_steps == [1]
        checkpoints.restore(numbers(0))
        assert left.exists()  # whoever only reads may do so beside a run that is writing
        checkpoints.save(numbers(2))
        checkpoints.wait()
        assert float(checkpoints.restore(numbers(0)).state.params["x"][0]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_a_path_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/below` cannot be used for checkpoints: .*Not a directory"):
        Checkpoints(tmp_path / "file" / "below")


@pytest.mark.parametrize("late", [False, True])
def test_an_error_of_writing_leaves_all_else_as_it_was(late, tmp_path, monkeypatch):
    def fail(*args, **options):
        raise OSError(30, "Read-only file system")

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(numbers(1))
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr("braintrace_flax.checkpoint.begin_writing", (lambda *args, **options: fail) if late else fail)
            if late:
                assert checkpoints.save(numbers(2))
            act = checkpoints.wait if late else lambda: checkpoints.save(numbers(2))
            with pytest.raises(CheckpointError, match=r"(?s)Checkpoint 2 could not .*Read-only.*as they were \(1\)"):
                act()
        assert float(checkpoints.restore(numbers(0)).state.params["x"][0]) == 1
        checkpoints.save(numbers(3))
        checkpoints.wait()
        assert checkpoints.all_steps == [3]


CHILD = """
import resource, signal, sys
from tests import conftest
import jax, jax.numpy as jnp, numpy as np
from braintrace_flax.checkpoint import CheckpointError, Checkpoints
from tests.flax.test_checkpoint import make, plain

with conftest.loose_promotion(), Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(make().init(jax.random.key(4)))
    checkpoints.wait()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))  # as if the disk were full
    state = plain(big=jnp.asarray(np.random.default_rng(0).normal(size=50_000)))
    try:
        checkpoints.save(state)
        checkpoints.wait()
    except CheckpointError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(checkpoints.all_steps, float(state.params["big"].sum()))
"""


def test_a_full_disk_and_a_checkpoint_of_another_process(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "77"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, tmp_path], env=environment, capture_output=True, text=True, timeout=240, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "Checkpoint 2 could not be written" in done.stdout
    assert "as they were (1)" in done.stdout
    total = float(np.random.default_rng(0).normal(size=50_000).sum())
    assert done.stdout.splitlines()[-1].startswith(f"[1] {total:.6f}"[:8])
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    step = make()
    assert_same_bits(Checkpoints(tmp_path).restore(step).state, step.init(jax.random.key(4)))


def test_nothing_is_executed_on_reading(written):
    directory, _, _ = written
    for path in sorted(pathlib.Path(braintrace_flax.__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not {"eval", "exec", "__import__"} & names
        assert not {"pickle", "cloudpickle", "dill", "marshal", "shelve"} & modules
        assert path.name == "storage.py" or not any("orbax" in (module or "") for module in modules)
    record = json.loads((directory / "1" / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]
    assert json.loads(record["manifest"])["data"] == {"epoch": 3}
