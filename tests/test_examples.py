"""The examples run, at reduced size, and learn."""

import re
import runpy
import sys
from pathlib import Path

import jax
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

# Arguments that make it short, and a pattern in what it prints with the least that its number must be.
CASES = {
    "character_stream": ("--steps 12 --units 12", r"all characters alike, ([\d.]+)", 5),
    "copy_gru": ("--steps 60 --units 16", r"d_rtrl copies ([\d.]+)%", 32),  # chance is 25
    "custom_operator": ("--steps 40", r"result: ([\d.]+)%", 30),  # chance is 10
    "digits_lru": ("--steps 30 --units 8", r"d_rtrl +8 +([\d.]+)%", 25),
    "evidence_alif": ("--steps 12 --units 20 --cues 1", r"result: ([\d.]+)%", 60),  # chance is 50
    "lora": ("--steps 30", r"base: ([\d.]+)% of", 30),
    "match_spiking": ("--steps 25 --units 32", r"result: ([\d.]+)%", 60),
    "own_loop": ("--steps 20", r"who always answers 1 has ([\d.]+)", 0.1),
    "quickstart_brainstate": ("--steps 20", r"result: ([\d.]+)%", 25),
    "quickstart_linen": ("--steps 20", r"result: ([\d.]+)%", 25),
    "quickstart_nnx": ("--steps 20", r"result: ([\d.]+)%", 25),
}


@pytest.mark.loose_promotion
@pytest.mark.parametrize("name", CASES)
def test_example(name, monkeypatch, capsys):
    arguments, pattern, least = CASES[name]
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *arguments.split()])
    with jax.enable_x64(False):
        runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    print(printed)
    assert float(re.search(pattern, printed)[1]) > least
    assert "result: " in printed.splitlines()[-1]


def test_every_example_is_under_test():
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(CASES)
