"""The same training on every mesh, in one process with eight devices and in two with four each."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.flax.meshes import CASES, FEW, RULES, trained

pytestmark = pytest.mark.several_devices

ROOT = Path(__file__).parents[2]


def free_port():
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return any_port.getsockname()[1]


@pytest.fixture(scope="module")
def alone():
    return {rule: trained("", rule) for rule in RULES}


def in_two_processes(path, *more):
    port = str(free_port())
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)
    line = [sys.executable, "-m", "tests.flax.meshes", port]
    children = [
        subprocess.Popen(
            [*line, str(i), str(path), *more], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    try:
        told = [child.communicate(timeout=900)[1] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], "\n".join(text[-3000:] for text in told)
    return np.load(path)


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory):
    return in_two_processes(tmp_path_factory.mktemp("two") / "found.npz")


def assert_same(found, expected):
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-11)


def assert_all_same(found, cases, alone):
    for shape, rule, kind in cases:
        name = f"{shape}/{rule}/{kind}"
        assert_same([found[f"{name}:{i}"] for i in range(len(alone[rule]))], alone[rule])


def some_for_ci(cases):
    """Every mesh, with the rules in turn; the others belong to the whole table."""
    chosen = {shape: RULES[i % 2] for i, shape in enumerate(dict.fromkeys(shape for shape, *_ in cases))}
    for case in cases:
        in_ci = chosen[case[0]] == case[1]
        yield pytest.param(*case, marks=() if in_ci else pytest.mark.whole_table)


@pytest.mark.parametrize(("shape", "rule", "kind"), list(some_for_ci(CASES)))
def test_eight_devices_of_one_process(alone, shape, rule, kind):
    assert_same(trained(shape, rule, kind), alone[rule])


def test_two_processes_of_four_devices(alone, of_two_processes):
    assert_all_same(of_two_processes, FEW, alone)


@pytest.mark.whole_table
def test_two_processes_on_every_mesh(alone, tmp_path):
    assert_all_same(in_two_processes(tmp_path / "found.npz", "all"), CASES, alone)


def test_the_training_has_an_effect(alone):
    for leaves in alone.values():
        losses = np.concatenate([leaf for leaf in leaves if leaf.shape == (4,)])
        assert len(losses) == 52
        assert losses[-4:].mean() < losses[:4].mean()


def test_processes_with_different_graphs_are_told_so(of_two_processes):
    assert str(of_two_processes["told"]) == (
        "The processes differ in their compiled graph: process 1 has units = 5 where process 0 has 4."
    )
