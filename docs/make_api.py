"""Writes docs/api.md from the docstrings: our own names first, then what the core brings, by group.

python docs/make_api.py
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import braintrace_core
import braintrace_flax
from braintrace_core import compiler, nn, ops, rules
from braintrace_flax import checkpoint

PAGE = Path(__file__).parent / "api.md"
OURS = ("braintrace_core", "braintrace_flax")
INTRODUCTION = """# API

Written by `docs/make_api.py` from the docstrings. `braintrace` stands for `braintrace_flax`, as in
`import braintrace_flax as braintrace`.
"""
WITH_METHODS = (
    "ETraceGraph",
    "GradientComparison",
    "QualityMeter",
    "Rule",
)  # of the core; other methods are for the core
SECTIONS = ("Args", "Attributes", "Further arguments", "Main arguments", "Other arguments", "Raises", "Returns")


def groups() -> list[tuple[str, str, list[tuple[str, Any]]]]:
    """Title, introduction and members of each part of the page; functions come first."""
    elsewhere = {*braintrace_core.__all__, *checkpoint.__all__}
    own = [name for name in braintrace_flax.__all__ if name not in elsewhere]
    errors = [name for name in braintrace_core.__all__ if name.endswith("Error")]
    parts: list[tuple[str, str, ModuleType, list[str]]] = [
        ("Training", "", braintrace_flax, own),
        ("Checkpoints", "", checkpoint, checkpoint.__all__),
        ("Learning rules", "In `braintrace.rules`.", rules, rules.__all__),
        ("Compiler", "", compiler, compiler.__all__),
        ("Operators", "", ops, ops.__all__),
        ("Layers, cells and neurons", "In `braintrace.nn`.", nn, nn.__all__),
        ("Surrogate gradients", "In `braintrace.nn.surrogate`.", nn.surrogate, nn.surrogate.__all__),
        ("Errors", "", braintrace_flax, errors),
    ]
    found = []
    for title, text, module, names in parts:
        members = [(name, getattr(module, name)) for name in names if not inspect.ismodule(getattr(module, name))]
        found.append((title, text, sorted(members, key=lambda member: not inspect.isfunction(member[1]))))
    return found


def page() -> str:
    """The whole page."""
    found = groups()
    contents = [f"- [{title}](#{_anchor(title)}): {', '.join(f'`{n}`' for n, _ in ms)}" for title, _, ms in found]
    parts = [INTRODUCTION, "\n".join(contents)]
    for title, text, members in found:
        parts.append(f"## {title}")
        parts += [text] if text else []
        primitives = [name for name, member in members if isinstance(member, ops.ETPPrimitive)]
        parts += [part for name, member in members if name not in primitives for part in _entry(name, member)]
        if primitives:
            parts += [f"### {', '.join(f'`{name}`' for name in primitives)}", "The operators' primitives."]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _entry(name: str, member: Any) -> list[str]:
    parts = [f"### `{name}`"]
    if inspect.isclass(member):
        if _has_own_signature(member):
            parts.append(_call(name, member))
        parts.append(_text(_own_doc(member)))
        if issubclass(member, enum.Enum):
            parts.append("Members: " + ", ".join(f"`{item.name}`" for item in member) + ".")
        if member.__module__.startswith("braintrace_flax") or name in WITH_METHODS:
            parts += _list_of(_methods(member))
    elif inspect.isfunction(member):
        parts += [_call(name, member), _text(inspect.getdoc(member) or "")]
    else:
        parts.append(f"`{_spelt(member)}`")
    return [part for part in parts if part]


def _list_of(methods: dict[str, Any]) -> list[str]:
    """Methods and properties: short ones as a list, those with arguments to explain in full after it."""
    short, long = [], []
    for name, value in sorted(methods.items()):
        inner = getattr(value, "fget", None) or getattr(value, "func", None)
        spelt = name if inner else _signature(name, value, skip=1)
        text = _text(inspect.getdoc(inner or value) or "")
        if "\n\n" in text:
            long += [f"#### `{spelt}`", text]
        else:
            short.append(f"- `{spelt}`: {' '.join(text.split())}")
    return ["**Methods and properties**", "\n".join(short), *long] if methods else []


def _methods(cls: type) -> dict[str, Any]:
    """Public methods and properties with a docstring of their own."""
    found = {}
    for name, value in vars(cls).items():
        inner = getattr(value, "fget", None) or getattr(value, "func", None) or value
        if (
            not name.startswith("_")
            and inspect.isfunction(inner)
            and inner.__doc__
            and inner.__module__ == cls.__module__
        ):
            found[name] = value
    return {} if issubclass(cls, enum.Enum) else found


def _own_doc(cls: type) -> str:
    """A class's docstring; that which a dataclass makes up, its signature, is none."""
    doc = inspect.cleandoc(cls.__doc__ or "")
    return "" if doc.startswith(f"{cls.__name__}(") else doc


def _has_own_signature(cls: type) -> bool:
    if issubclass(cls, (enum.Enum, Exception)):
        return False
    if _lists_fields(cls):
        return True
    maker = next((c for c in cls.__mro__ if "__init__" in vars(c)), object)
    return maker.__module__.startswith(OURS)


def _lists_fields(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")


def _call(name: str, function: Any) -> str:
    line = _signature(name, function)
    if len(line) > 100:
        line = _signature(name, function, apart=True)
    return f"```python\n{line}\n```"


def _signature(name: str, function: Any, skip: int = 0, apart: bool = False) -> str:
    """The call as it is written; with each argument on a line of its own if ``apart``."""
    if inspect.isclass(function) and not _lists_fields(function):
        signature, skip = inspect.signature(function.__init__), 1  # a metaclass may hide it
    else:
        signature = inspect.signature(function)
    parts, star = [], False
    for parameter in list(signature.parameters.values())[skip:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        text = prefix + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {_spelt(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {_spelt_value(parameter.default)}"
        parts.append(text)
    result = signature.return_annotation
    end = "" if result in (signature.empty, None, "None") or inspect.isclass(function) else f" -> {_spelt(result)}"
    inside = "\n" + "".join(f"    {part},\n" for part in parts) if apart else ", ".join(parts)
    return f"{name}({inside}){end}"


def _spelt(annotation: Any) -> str:
    """A type as the source has it."""
    if isinstance(annotation, str):
        return annotation.strip("'\"")
    if hasattr(annotation, "__forward_arg__"):
        return annotation.__forward_arg__
    if inspect.isclass(annotation) and not hasattr(annotation, "__args__"):
        return annotation.__name__
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", str(annotation))


def _spelt_value(value: Any) -> str:
    if dataclasses.is_dataclass(value) or isinstance(value, (str, int, float, tuple, bool, type(None))):
        return repr(value).replace("'", '"')
    return getattr(value, "__name__", None) or (
        "..." if "object at" in repr(value) or "<" in repr(value) else repr(value)
    )


def _text(doc: str) -> str:
    """A docstring as Markdown: sections become lists, doctests code, formulas stay as they are."""
    lines, blocks = doc.expandtabs().splitlines(), []
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.strip().startswith(">>>"):
            start = at
            while at < len(lines) and lines[at].strip():
                at += 1
            blocks.append("```python\n" + "\n".join(inspect.cleandoc("\n".join(lines[start:at])).split("\n")) + "\n```")
        elif line.rstrip(":") in SECTIONS and line.endswith(":"):
            start, at = at + 1, at + 1
            while at < len(lines) and (not lines[at].strip() or lines[at].startswith(" ")):
                at += 1
            blocks.append(_section(line[:-1], inspect.cleandoc("\n".join(lines[start:at])).splitlines()))
        elif not line.strip():
            at += 1
        else:
            start = at
            while at < len(lines) and lines[at].strip() and not lines[at].strip().startswith(">>>"):
                at += 1
            block = "\n".join(lines[start:at])
            blocks.append(block if line.startswith("    ") else _inline(block))
    return "\n\n".join(blocks)


def _section(title: str, lines: list[str]) -> str:
    if title == "Returns" or not any(re.match(r"\S[^:]*: ", line) for line in lines):
        return f"**{title}**\n\n" + _inline("\n".join(lines))
    items: list[str] = []
    for line in lines:
        if line.startswith(" ") and items:
            items[-1] += " " + line.strip()
        elif line.strip():
            names, _, what = line.partition(": ")
            items.append(f"- `{names}`: {_inline(what)}" if what else f"- {_inline(line)}")
    return f"**{title}**\n\n" + "\n".join(map(_inline, items))


def _inline(text: str) -> str:
    text = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", text)
    return re.sub("::$", ":", text.replace("``", "`"), flags=re.MULTILINE)


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z -]", "", title.lower()).replace(" ", "-")


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE}: {len(PAGE.read_text().splitlines())} lines")
