"""TensorBoard: the same metrics as in the file of a run, or one line that says what is missing."""

import sys
import types

import pytest

from braintrace_flax import train
from braintrace_flax.runs import command
from braintrace_flax.runs.board import Board
from braintrace_flax.runs.records import read_records

pytestmark = pytest.mark.loose_promotion  # Optax relies on it

TINY = """
from braintrace_flax.runs import LRU, Config
from braintrace_flax.tasks import Copy

config = Config(
    name="tiny", task=Copy(symbols=2, length=1, delay=2), network=LRU(units=2, width=2, layers=1), window=2,
    batch_size=2, steps=3, evaluate_every=2, checkpoint_every=2,
)
"""


@pytest.fixture
def given(tmp_path):
    (tmp_path / "config.py").write_text(TINY)
    return ["--config", str(tmp_path / "config.py"), "--folder", str(tmp_path / "run"), "--quiet", "--tensorboard"]


def call(given):
    return command.main(train._train, ("fresh", "quiet", "tensorboard"), "", given)


def test_metrics_are_written_and_a_run_that_goes_on_hides_what_came_after(given, tmp_path, monkeypatch):
    opened, scalars = [], []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            opened.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            scalars.append((step, name, value))

        def close(self):
            opened.append("closed")

    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    folder = str(tmp_path / "run" / "tensorboard")
    assert call(given) == 0
    assert opened == [(folder, None), "closed"]
    expected = [
        (record["step"], f"{record['kind']}/{name.removeprefix('test_')}", value)
        for record in read_records(tmp_path / "run" / "metrics.jsonl")
        for name, value in record.items()
        if name not in ("step", "kind")
    ]
    assert scalars == expected
    assert {name for _, name, _ in scalars} == {"train/loss", "train/accuracy", "test/loss", "test/accuracy"}
    Board(tmp_path, start=3).close()
    assert opened[2] == (str(tmp_path), 4)


def test_without_the_package_there_is_one_line(given, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert call(given) == 2
    said = capsys.readouterr().err
    assert said == "error: `--tensorboard` needs tensorboardX: `pip install 'braintrace-flax[tensorboard]'`.\n"
