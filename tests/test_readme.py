"""The README's code runs as it stands."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.loose_promotion
def test_code_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, str(README), "exec"), namespace)
    assert "online" in capsys.readouterr().out
    assert (tmp_path / "model.svg").read_text().startswith("<svg")


def test_the_readme_shows_files_that_exist():
    for target in re.findall(r"\]\(([^)#:]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
