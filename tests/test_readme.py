"""The README's code runs as it stands, and its training with each of the models that it shows."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
MODELS = [block for block in BLOCKS if "\nmodel = braintrace.compile(" in block]
[TRAINING] = [block for block in BLOCKS if "@braintrace.train_step(" in block]


@pytest.mark.loose_promotion
@pytest.mark.several_devices
def test_code_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    kinds, losses = [], []
    with jax.enable_x64(False):  # as a reader has it
        for block in BLOCKS:
            again = [TRAINING] if block in MODELS[1:] else []
            for code in (block, *again):
                exec(compile(code, str(README), "exec"), names)
                if code is TRAINING:
                    kinds.append(repr(names["model"]).removeprefix("Model(").split()[0])
                    losses.append(np.asarray(names["metrics"]["loss"]))
                    assert int(names["state"].step) == 20
    assert kinds == ["NNX", "Linen", "brainstate", "function"]
    for found in losses:
        assert found.shape == (4,)
        assert 0.1 < found.mean() < 3
    shown = capsys.readouterr().out
    assert "online: a trace carries its credit through time" in shown
    assert "DRTRL(rows=None), window credit, window of 16, 64 steps, against BPTT" in shown
    for comment in re.findall(r"print\(graph.*#\s*(.*)", README.read_text()):
        assert comment in shown
    assert (tmp_path / "model.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("block", [TRAINING, *MODELS], ids=["training", "nnx", "linen", "brainstate", "function"])
def test_a_quick_start_is_ten_lines_after_imports(block):
    lines = [line for line in block.splitlines() if line.strip() and not re.match("import |from ", line)]
    assert len(lines) <= 10
