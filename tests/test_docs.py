"""The pages of docs: their code runs, their links lead somewhere, and the API page is that of the docstrings."""

import importlib.util
import re
from pathlib import Path
from xml.etree import ElementTree

import jax
import pytest

import braintrace_flax

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def code_of(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.loose_promotion
@pytest.mark.parametrize("name", ["how-it-works.md", "choosing.md"])
def test_code_of_a_page_runs(name, capsys):
    names: dict[str, object] = {}
    with jax.enable_x64(False):  # as a reader has it
        for block in code_of(DOCS / name):
            exec(compile(block, name, "exec"), names)
    shown = capsys.readouterr().out
    comments = re.findall(r"print\(.*?\)  # (.*)", (DOCS / name).read_text())
    assert all(comment in shown for comment in comments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text()
    titles = {re.sub(r"[^a-z0-9_ -]", "", t.lower()).replace(" ", "-") for t in re.findall(r"^#+ (.*)", text, re.M)}
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        path, _, anchor = target.partition("#")
        assert not path or (page.parent / path).exists(), target
        assert path or anchor in titles, target


@pytest.mark.parametrize("picture", sorted(DOCS.glob("*.svg")), ids=lambda picture: picture.name)
def test_pictures_are_well_formed_and_used(picture):
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert any(picture.name in page.read_text() for page in PAGES)


def test_the_picture_of_the_layers_is_true():
    names = re.findall(r'class="name">(\w+)<', (DOCS / "layers.svg").read_text())
    user, core = names[:7], names[7:]
    for package, shown in ((ROOT / "braintrace_flax", user), (ROOT / "braintrace_core", core)):
        assert [name for name in shown if not list(package.glob(f"{name}*"))] == []
    assert {path.name for path in (ROOT / "braintrace_core").iterdir() if (path / "__init__.py").exists()} == set(core)
    for at, name in enumerate(user[1:], start=1):
        imported = re.findall(r"^from \.(\w+)", (ROOT / f"braintrace_flax/{name}.py").read_text(), flags=re.MULTILINE)
        assert set(imported) & set(user[: at + 1])
        assert not set(imported) & set(user[at + 1 :])


def test_every_rule_has_a_place_in_the_tables():
    from braintrace_core.rules.names import _RULES

    for name in ("how-it-works.md", "choosing.md"):
        text = (DOCS / name).read_text()
        assert [rule for rule in _RULES if f"`{rule}`" not in text] == []


def test_the_api_page_is_that_of_the_docstrings():
    spec = importlib.util.spec_from_file_location("make_api", DOCS / "make_api.py")
    make_api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_api)
    text = make_api.page()
    assert (DOCS / "api.md").read_text() == text, "Docstrings have changed: run `python docs/make_api.py`."
    modules = ("nn", "rules")
    assert [n for n in braintrace_flax.__all__ if n not in modules and f"`{n}`" not in text] == []
    assert "0x" not in text  # an address, other in each run
