"""The examples run, at reduced size, and learn."""

import re
import runpy
import sys
from pathlib import Path

import jax
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

# Arguments that make it short, and numbers in what it prints with the range in which they must be.
CASES = {
    "character_stream": ("--steps 12 --units 12 --layers 1", {r"result: ([\d.]+) bits": (1, 6.3)}),  # chance is 6.64
    "copy_gru": ("--steps 60 --units 16 --rules d_rtrl", {r"\nd_rtrl +([\d.]+)% +\d": (33, 100)}),  # chance is 25
    "custom_operator": ("--steps 40", {r"result: ([\d.]+)%": (30, 100), r"all +1.0000 +1.0000 +(\S+)": (0, 1e-5)}),
    "digits_lru": ("--steps 60 --units 16 --layers 1 --rules d_rtrl", {r"d_rtrl +2 +([\d.]+)%": (20, 100)}),
    "evidence_alif": (
        "--steps 20 --units 20 --cues 1",
        # Chance is 50; the two would be the same if the random way back were not taken.
        {r"result: ([\d.]+)%": (65, 100), r"symmetric feedback, ([\d.]+)%": (40, 64)},
    ),
    "lora": ("--steps 30", {r"base: ([\d.]+)% of": (30, 100), r"lora: .*\nlora: .* ([\d.]+)\nbase": (0, 3.5)}),
    "match_spiking": ("--steps 25 --units 32", {r"result: ([\d.]+)%": (60, 100)}),  # chance is 50
    "own_loop": ("--steps 20", {r"squared error of ([\d.]+)": (0, 0.2), r"between the two: (\S+)": (0, 1e-6)}),
    "quickstart_brainstate": ("--steps 20", {r"result: ([\d.]+)%": (25, 100)}),
    "quickstart_linen": ("--steps 20", {r"result: ([\d.]+)%": (25, 100)}),
    "quickstart_nnx": ("--steps 20", {r"result: ([\d.]+)%": (25, 100)}),
}


@pytest.mark.loose_promotion
@pytest.mark.parametrize("name", CASES)
def test_example(name, monkeypatch, capsys):
    arguments, expected = CASES[name]
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *arguments.split()])
    with jax.enable_x64(False):
        runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    for pattern, (least, most) in expected.items():
        assert least <= float(re.search(pattern, printed)[1]) <= most, printed


def test_every_example_is_under_test():
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(CASES)
