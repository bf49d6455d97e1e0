"""Runs that are killed go on as if they had not been, wherever it happens."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from braintrace_flax.checkpoint import Checkpoints
from braintrace_flax.runs import build, load_config
from braintrace_flax.runs import run as runs
from braintrace_flax.runs.records import Records
from tests.flax.test_runs import assert_same_run, tiny_file

pytestmark = pytest.mark.loose_promotion  # Optax relies on it

ROOT = Path(__file__).parents[2]
LINES = 10  # of the tiny run


class Killed(BaseException):
    """Nothing handles this, like a kill."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return build(load_config(tiny_file(tmp_path_factory.mktemp("config"))))


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert runs.train(tiny, folder, quiet=True).finished
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == LINES
    return folder


def killing(function, after):
    """The function, with an end to the process before a call of it."""
    calls = iter(range(after))

    def killed(*given, **options):
        if next(calls, None) is None:
            raise Killed
        return function(*given, **options)

    return killed


def train_until_killed(run, folder, owner, name, after):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, killing(getattr(owner, name), after))
        with pytest.raises(Killed):
            runs.train(run, folder, quiet=True)


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [(Records, "write", (1, 3, 4, 8, 9)), (Checkpoints, "save", (1, 3, 6)), (runs, "evaluate", (0, 2))],
    ids="line save test".split(),
)
def test_killed_before_a_line_save_or_test(owner, name, calls, tiny, whole, tmp_path):
    for after in calls:
        folder = tmp_path / str(after)
        train_until_killed(tiny, folder, owner, name, after)
        assert (folder / "metrics.jsonl").read_text() != (whole / "metrics.jsonl").read_text()
        runs.train(tiny, folder, quiet=True)
        assert_same_run(tiny, folder, whole)


def test_killed_while_old_lines_are_dropped(tiny, whole, tmp_path):
    train_until_killed(tiny, tmp_path, Records, "write", LINES - 1)
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", killing(os.replace, 0))
        with pytest.raises(Killed):
            Records(tmp_path / "metrics.jsonl", 6)
    assert before == (tmp_path / "metrics.jsonl").read_text()
    runs.train(tiny, tmp_path, quiet=True)
    assert_same_run(tiny, tmp_path, whole)


def test_processes_killed_at_random_moments():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "benchmarks/kill_and_resume.py", "--kills", "2"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    chains = re.search(r"^2 kills, .* of (\d+) runs in", done.stdout)[1]
    assert f"{chains} of {chains} runs ended with the same bits" in done.stdout
