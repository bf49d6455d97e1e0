"""The project's own rules: layers, public names, file sizes, portable text, packaging."""

import ast
import importlib
import itertools
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import braintrace_flax

ROOT = Path(__file__).parent.parent
PACKAGES = ("braintrace_core", "braintrace_flax")
SOURCES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# What each part of the core may import from the others. A new part needs a line here, after a thought about its place.
CORE_LAYERS = {
    "_brainstate": set(),
    "_compat": set(),
    "errors": set(),
    "ops": {"_compat", "errors"},
    "compiler": {"_compat", "errors", "ops"},
    "rules": {"_compat", "errors", "ops", "compiler"},
    "nn": {"errors", "ops"},
}
ABOVE_THE_CORE = ("braintrace_flax", "flax", "optax", "orbax")
COMPAT = Path("braintrace_core/_compat.py")
VERSION_DEPENDENT_JAX = ("jax.core", "jax.extend", "jax.interpreters")
# Import name -> distribution, where they differ.
DISTRIBUTIONS = {"orbax": "orbax-checkpoint", "sklearn": "scikit-learn"}


# Layers


def imported_names(path: Path) -> set[str]:
    """Full dotted names that a file imports or reaches as an attribute of an imported package: ``jax.core.Tracer``."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = path.with_suffix("").parts[: -node.level] if node.level else ()
            module = ".".join([*parents, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and (text := ast.unparse(node)).startswith("jax."):
            names.add(text)
    return names


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def may_import(part: str, name: str) -> bool:
    allowed = {part, *CORE_LAYERS[part]}
    return not within(name, "braintrace_core") or any(within(name, f"braintrace_core.{other}") for other in allowed)


def breaches(path: Path) -> Iterator[str]:
    in_core = path.parts[0] == "braintrace_core"
    part = path.with_suffix("").parts[1]
    if in_core and part not in {"__init__", *CORE_LAYERS}:
        yield f"add {part!r} to CORE_LAYERS"
    for name in sorted(imported_names(path)):
        if in_core and any(within(name, package) for package in ABOVE_THE_CORE):
            yield f"{name}: the core knows only JAX and brainstate"
        if in_core and part in CORE_LAYERS and not may_import(part, name):
            yield f"{name}: {part} may import only {CORE_LAYERS[part]} from the core"
        if within(name, "jax._src"):
            yield f"{name}: private"
        if any(within(name, module) for module in VERSION_DEPENDENT_JAX) and path != COMPAT:
            yield f"{name}: depends on the JAX version, so it is imported in {COMPAT} alone"


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_module_imports_only_from_the_layers_before_it(path):
    assert list(breaches(path)) == []


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_third_party_imports_are_declared_dependencies(path):
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    used = (extras[name] for name in ("plot", "tensorboard", "train"))
    requirements = [*project["dependencies"], *itertools.chain(*used)]
    declared = {canonicalize_name(Requirement(text).name) for text in requirements}
    imported = {name.split(".")[0] for name in imported_names(path)} - set(sys.stdlib_module_names) - set(PACKAGES)
    assert {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in imported} <= declared


# Files


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_public_name_exists(path):
    module = importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
    names = getattr(module, "__all__", [])
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(module, name)] == []


def test_public_names_are_sorted():
    # Ruff's order (constants, classes, functions) is the one that `make format` establishes.
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=RUF022", "--quiet", *PACKAGES]
    check = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
    assert check.returncode == 0, check.stdout + check.stderr


def test_everything_public_in_the_core_is_public_in_the_user_package():
    core = importlib.import_module("braintrace_core")
    assert [name for name in getattr(core, "__all__", []) if not hasattr(braintrace_flax, name)] == []


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_file_is_short_enough_to_be_one_idea(path):
    lines = len((ROOT / path).read_text().splitlines())
    assert lines <= 450


def test_the_text_holds_for_every_machine():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git clone: no telling which files are the project's")
    # The brackets keep these patterns from finding themselves.
    paths = r"/roo[t]/|/tmp/venv[s]|/wor[k]/|\.pyenv/version[s]"
    hosts = r"pypi[.]org|pythonhosted[.]org|npmjs[.]org|debian[.]org"
    machine = re.compile(f"{paths}|{hosts}")
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    files = [ROOT / name for name in listed if name]
    assert ROOT / "pyproject.toml" in files
    found = {
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in files
        if path.is_file()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if machine.search(line)
    }
    assert not found


# Packaging


def test_the_supported_python_is_stated_once_and_the_same_everywhere():
    supported = SpecifierSet(PROJECT["project"]["requires-python"])
    versions = [f"3.{minor}" for minor in range(8, 30) if f"3.{minor}" in supported]
    prefix = "Programming Language :: Python :: "
    classifiers = [text.removeprefix(prefix) for text in PROJECT["project"]["classifiers"] if text.startswith(prefix)]
    assert classifiers == versions
    assert PROJECT["tool"]["mypy"]["python_version"] == versions[0]
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + versions[0].replace(".", "")


@pytest.mark.parametrize(("python", "jax"), [("311", "0.10"), ("313", "0.12")])
def test_the_pins_satisfy_the_declared_ranges(python, jax):
    lines = (ROOT / f"constraints/py{python}.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    assert pins["jax"].startswith(jax + ".")
    extras = PROJECT["project"]["optional-dependencies"]
    for text in [*PROJECT["project"]["dependencies"], *extras["test"], *extras["peer"], *extras["plot"]]:
        requirement = Requirement(text)
        if requirement.name != PROJECT["project"]["name"]:
            assert pins[canonicalize_name(requirement.name)] in requirement.specifier, text


def test_the_wheel_holds_both_packages_and_nothing_else(tmp_path):
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    build = subprocess.run([*pip, "--wheel-dir", tmp_path, ROOT], capture_output=True, text=True)
    assert build.returncode == 0, build.stdout + build.stderr
    [path] = tmp_path.glob("*.whl")
    info = f"braintrace_flax-{braintrace_flax.__version__}.dist-info"
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(f"{info}/METADATA").decode()
    assert {name.split("/")[0] for name in names} == {*PACKAGES, info}
    assert {str(source) for source in SOURCES} | {f"{package}/py.typed" for package in PACKAGES} <= names
    assert f"{info}/licenses/LICENSE" in names
    assert f"\nVersion: {braintrace_flax.__version__}\n" in metadata


@pytest.mark.parametrize("enabled", [True, False])
def test_importing_the_package_leaves_jax_settings_alone(enabled):
    code = (
        f"import jax; jax.config.update('jax_enable_x64', {enabled}); import braintrace_flax; "
        f"assert jax.config.jax_enable_x64 is {enabled}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
