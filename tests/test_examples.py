"""The examples run, at reduced size, and go on from where they stopped."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(folder, epochs):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "examples/digits.py", "--epochs", str(epochs), "--folder", str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout


def test_digits_learns_and_resumes(tmp_path):
    first = run(tmp_path, 1)
    assert "epoch   1/1" in first
    assert (tmp_path / "curve.png").stat().st_size > 1000
    second = run(tmp_path, 2)
    assert "going on from" in second
    assert "epoch   2/2" in second
    assert "epoch   1/2" not in second
    accuracy = float(second.split("held-out accuracy ")[1].split("%")[0])
    assert accuracy > 30  # ten classes: chance is 10
