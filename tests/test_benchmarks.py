"""The benchmarks run, at reduced size."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_rules(tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    sizes = "--nets lif4 --batches 2 --windows 2 --inputs 3 --repeats 2".split()
    command = [sys.executable, "benchmarks/rules.py", *sizes, "--json", str(tmp_path / "rules.json")]
    command += ["--contenders", "window,bptt,bound"]
    out = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    found = json.loads((tmp_path / "rules.json").read_text())
    times = {record["contender"]: record["seconds"] for record in found["times"]}
    assert set(times) == {"window", "bptt", "bound"}
    assert min(times.values()) > 0
    checks = {check["target"]: check for check in found["checks"]}
    traces = checks["MB of the traces of weights: what D demands"]
    assert traces["met"]
    assert traces["found"] == 2 * (3 + 4) * 4 * 4 / 2**20  # one float32 for each weight and example
    assert checks["temporary memory at 4T steps: at T steps"]["met"]
    assert "1/1" in out.split("target")[1]


def test_results():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "benchmarks/results.py", "--only", "copy", "--seeds", "1", "--rows", "tbptt"]
    command += ["--more=--steps 2 --network.units 4 --batch_size 4 --window 8"]
    out = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    (line,) = out.splitlines()[2:]
    found = re.fullmatch(r"\| `(.*)` \| (.*) \| (.*)% \| (.*)% \.\. (.*)% \| (\d+) \|", line)
    assert found[1].startswith("--config configs/copy.py --rule tbptt")
    assert found[2] == "test accuracy"
    assert 0 < float(found[3]) < 100
    assert found[3] == found[4] == found[5]  # of one seed
    assert int(found[6]) > 0
