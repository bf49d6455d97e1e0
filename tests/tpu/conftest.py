"""Tests with the TPU's own compiler, in an environment that has it: ``make test-tpu``."""

import importlib.util

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("libtpu") is None:
        for item in items:
            if "tests/tpu/" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason="needs libtpu: make test-tpu"))
