"""The learning curve of a run, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .records import read_records

__all__ = ["draw_curves"]


def draw_curves(records: Path, picture: Path, title: str = "") -> bool:
    """Draw the metrics of a run; whether it could be done (it needs matplotlib).

    Args:
      records: the file of metrics.
      picture: where to write it, a PNG or SVG by its name.
      title: above it.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    lines = read_records(records)
    names = sorted({name for line in lines for name in line if name not in ("step", "kind", "skipped")})
    kinds = sorted({name.removeprefix("test_") for name in names})
    figure, axes = plt.subplots(1, max(len(kinds), 1), figsize=(4.5 * max(len(kinds), 1), 3.2), squeeze=False)
    for axis, kind in zip(axes[0], kinds, strict=False):
        styles: dict[str, dict[str, Any]] = {
            kind: {"linewidth": 1, "label": "train"},
            f"test_{kind}": {"marker": "o", "label": "test"},
        }
        for name, style in styles.items():
            points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            if points:
                steps, values = zip(*_smoothed(points, 100 if name == kind else len(points)), strict=True)
                axis.plot(steps, values, **style)
        axis.set_xlabel("batches")
        axis.set_ylabel(kind)
        if kind == "accuracy":
            axis.set_ylim(0, 1)
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    plt.close(figure)
    return True


def _smoothed(points: list[Any], count: int) -> list[Any]:
    """At most about ``count`` points, each the mean of its neighbours."""
    size = max(len(points) // max(count, 1), 1)
    pieces = [points[i : i + size] for i in range(0, len(points), size)]
    return [(piece[-1][0], sum(value for _, value in piece) / len(piece)) for piece in pieces]
