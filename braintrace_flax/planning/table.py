"""A plan in print, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..runs.config import Config
from .advice import Row
from .chips import Chip, spell_size
from .estimate import Need
from .tpu import Compiled

__all__ = ["as_json", "compiled_lines", "rows_table", "table"]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as needed, the first to the left."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def rows_table(rows: Sequence[Row]) -> str:
    """Bytes on one device for each way to train."""
    header = ("rule", "window", "parameters", "optimizer", "traces", "activations", "total", "largest batch")
    return table(header, [_cells(row) for row in rows])


def compiled_lines(need: Need, found: Compiled, chip: Chip) -> list[str]:
    """What the compiler says, next to the estimate, and what it means for time."""
    if not found.fits:
        wanted = f"{spell_size(found.needed)} are needed" if found.needed else "it needs more than there is"
        return [f"By the compiler it does not fit: {wanted} ({found.seconds:.0f} s)."]
    lines = [
        f"By the compiler, on one chip: {spell_size(found.needed)} ({spell_size(found.arguments)} state and batch, "
        f"{spell_size(found.temporaries)} temporary, {spell_size(found.aliased)} updated in place); the estimate is "
        f"{need.total / found.needed - 1:+.1%}. Compiled in {found.seconds:.0f} s.",
        "",
        "A window, on one chip, at the published peak: not run on hardware.",
        table(
            ("", "amount", "at peak"),
            [
                ("matrix products", f"{found.flops / 1e12:.3f} TFLOP", _time(found.flops / chip.flops)),
                ("main memory", spell_size(found.bytes_accessed), _time(found.bytes_accessed / chip.bandwidth)),
                ("links", spell_size(found.sent), _time(found.sent / chip.links)),
            ],
        ),
        "",
        "Collectives in a window:",
    ]
    return [*lines, collectives_table(found)]


def collectives_table(found: Compiled) -> str:
    """Each kind of collective, with its sizes; scalars are left out."""
    counts: Counter[tuple[str, str, int, float, int]] = Counter()
    for c in found.collectives:
        if c.bytes > 1024:
            kinds = Counter(str(shape) for shape in c.shapes if shape.dims)
            arrays = " ".join(f"{n} x {shape}" if n > 1 else shape for shape, n in list(kinds.items())[:4])
            arrays += " ..." if len(kinds) > 4 else ""
            counts[c.kind, arrays, c.group, c.times / found.windows, c.bytes] += 1
    rows = [
        (kind, f"{n * times:g}", str(group), spell_size(size), arrays)
        for (kind, arrays, group, times, size), n in counts.items()
    ]
    rows.sort(key=lambda row: row[0])
    return table(("kind", "times", "chips", "size", "arrays"), rows) if rows else "none"


def as_json(config: Config, chip: Chip, rows: Sequence[Row], advice: Sequence[str], found: Compiled | None) -> Any:
    """All of a plan, as what JSON knows."""
    result: dict[str, Any] = {
        "config": config.as_dict(),
        "chip": chip._asdict(),
        "rows": [{**asdict(row), "total": row.need.total} for row in rows],
        "advice": list(advice),
    }
    if found is not None:
        known = {key: value for key, value in vars(found).items() if key not in ("text", "collectives")}
        moved = [
            {
                "kind": c.kind,
                "arrays": [str(shape) for shape in c.shapes],
                "bytes": c.bytes,
                "chips": c.group,
                "times": c.times / found.windows,
            }
            for c in found.collectives
        ]
        times = {
            "matrix products": found.flops / chip.flops,
            "main memory": found.bytes_accessed / chip.bandwidth,
            "links": found.sent / chip.links,
        }
        result["compiled"] = {**known, "sent": found.sent, "seconds at peak": times, "collectives": moved}
    return result


def _cells(row: Row) -> tuple[str, ...]:
    need = row.need
    sizes = (need.parameters, need.optimizer, need.traces, need.activations + need.carry + need.data, need.total)
    return (row.rule, str(row.window), *map(spell_size, sizes), str(row.largest_batch or "none"))


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
