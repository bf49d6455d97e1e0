"""A run on one page that opens without a network: config, curves, graph, timing, memory, checkpoints."""

from __future__ import annotations

import base64
import html
import json
import platform
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from .run import Result, Run

__all__ = ["write_report"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .2rem 1rem .2rem 0; text-align: left; vertical-align: top; }
pre { background: #f6f6f4; padding: .8rem; overflow-x: auto; font-size: 12px; }
img, svg { max-width: 100%; height: auto; }
"""


def write_report(run: Run, result: Result, folder: Path, command: str, picture: Path | None) -> Path:
    """Write ``report.html`` into the folder of a run."""
    config = run.config
    rule = run.step.settings.rule
    rows = [
        ("command", command),
        *((name, f"{value:.4g}") for name, value in result.metrics.items()),
        ("trained", f"{config.steps} batches, {result.seconds:.1f} s in the last process"),
        ("parameters", f"{sum(leaf.size for leaf in jax.tree.leaves(result.state.params)):,}"),
        ("traces", f"{rule.bytes(run.model.plan, run.model.examples) / 2**20:.2f} MiB"),
        ("state", f"{_bytes(result.state) / 2**20:.2f} MiB"),
        ("devices", ", ".join(sorted({device.device_kind for device in jax.devices()})) + f" x {jax.device_count()}"),
        ("software", f"Python {platform.python_version()}, JAX {jax.__version__}"),
        ("checkpoints", str(folder / "checkpoints")),
    ]
    curves = "<p>Install matplotlib to see the curves.</p>"
    if picture is not None:
        data = base64.b64encode(picture.read_bytes()).decode()
        curves = f'<img alt="learning curves" src="data:image/png;base64,{data}">'
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{_safe(config.name)}</title><style>{_STYLE}</style></head><body>
<h1>{_safe(config.name)}</h1>
{_table(rows)}
<h2>Curves</h2>
{curves}
<h2>Which parameter acts on which hidden state</h2>
{_graph(run)}
<pre>{_safe(run.model.report())}</pre>
<h2>Config</h2>
<pre>{_safe(json.dumps(config.as_dict(), indent=2))}</pre>
</body></html>
"""
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _graph(run: Run) -> str:
    """The picture as a part of a page, which needs no namespace."""
    return run.model.draw().replace(' xmlns="http://www.w3.org/2000/svg"', "", 1)


def _table(rows: list[tuple[str, str]]) -> str:
    lines = "\n".join(f"<tr><th>{_safe(name)}</th><td>{_safe(value)}</td></tr>" for name, value in rows)
    return f"<table>\n{lines}\n</table>"


def _safe(text: Any) -> str:
    return html.escape(str(text))


def _bytes(state: Any) -> int:
    leaves = [leaf for leaf in jax.tree.leaves(state) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    return sum(leaf.nbytes for leaf in leaves)
