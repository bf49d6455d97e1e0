"""SVG: the few shapes that a drawing is made of, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

__all__ = [
    "Box",
    "arrow_heads",
    "curve",
    "dot",
    "line",
    "number",
    "rectangle",
    "shorten",
    "text",
    "text_width",
    "titled",
]

Point = tuple[float, float]

_NARROW, _MEDIUM, _WIDE = frozenset("ijlI|'.,:;!/()[] ·tf"), frozenset("rckszxyv-"), frozenset("mwMWQOG@%")


@dataclass(frozen=True)
class Box:
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """The right edge."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """The lower edge."""
        return self.y + self.height

    @property
    def middle(self) -> float:
        """The height of the centre."""
        return self.y + self.height / 2

    def slots(self, count: int, spread: float) -> list[float]:
        """Heights for ``count`` lines that end at a side of the box, at most ``spread`` apart."""
        step = min(spread, (self.height - 8) / max(count - 1, 1))
        return [self.middle + (i - (count - 1) / 2) * step for i in range(count)]


def number(value: float) -> str:
    """A length, to a tenth of a pixel.

    >>> number(12.0), number(3.14159)
    ('12', '3.1')
    """
    return f"{value:.1f}".removesuffix(".0")


def titled(title: str, content: str) -> str:
    """Content that shows ``title`` when the mouse is over it."""
    return f"<g><title>{escape(title)}</title>{content}</g>" if title else content


def text(
    x: float,
    y: float,
    content: str,
    size: float,
    colour: str,
    *,
    weight: int = 400,
    anchor: str = "start",
    more: str = "",
    more_colour: str = "",
) -> str:
    """A line of text whose baseline is at ``y``, and ``more`` in regular weight behind it."""
    style = f' font-weight="{weight}"' if weight != 400 else ""
    style += f' text-anchor="{anchor}"' if anchor != "start" else ""
    rest = f'<tspan dx="8" font-weight="400" fill="{more_colour}">{escape(more)}</tspan>' if more else ""
    place = f'x="{number(x)}" y="{number(y)}" font-size="{number(size)}" fill="{colour}"'
    return f"<text {place}{style}>{escape(content)}{rest}</text>"


def rectangle(box: Box, fill: str, stroke: str, *, radius: float, dashes: str = "", width: float = 1.3) -> str:
    """A rectangle with round corners."""
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    place = f'x="{number(box.x)}" y="{number(box.y)}" width="{number(box.width)}" height="{number(box.height)}"'
    return f'<rect {place} rx="{number(radius)}" fill="{fill}" stroke="{stroke}" stroke-width="{number(width)}"{dash}/>'


def dot(x: float, y: float, colour: str, radius: float = 2.3) -> str:
    """A filled circle."""
    return f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" fill="{colour}"/>'


def line(
    points: Sequence[Point],
    colour: str,
    width: float,
    *,
    dashes: str = "",
    head: str = "",
    tail: str = "",
    radius: float = 7.0,
) -> str:
    """A line through points with rounded corners, and on along the path data ``tail``; ``head`` names an arrow head."""
    points = [p for i, p in enumerate(points) if i == 0 or p != points[i - 1]]
    data = f"M{_point(points[0])}"
    for i in range(1, len(points)):
        here, before = points[i], points[i - 1]
        if i + 1 == len(points):
            data += f"L{_point(here)}"
        else:
            after = points[i + 1]
            turn = min(radius, _distance(here, before) / 2, _distance(here, after) / 2)
            data += f"L{_point(_toward(here, before, turn))}Q{_point(here)} {_point(_toward(here, after, turn))}"
    style = f' stroke-dasharray="{dashes}"' if dashes else ""
    style += f' marker-end="url(#{head})"' if head else ""
    return f'<path d="{data}{tail}" fill="none" stroke="{colour}" stroke-width="{number(width)}"{style}/>'


def curve(start: Point, end: Point) -> str:
    """Path data from one height to another, level at both ends."""
    reach = (end[0] - start[0]) / 2
    return f"C{_point((start[0] + reach, start[1]))} {_point((end[0] - reach, end[1]))} {_point(end)}"


def arrow_heads(colours: dict[str, str]) -> str:
    """Definitions of arrow heads by name."""
    shape = 'viewBox="0 0 8 8" refX="7.4" refY="4" markerWidth="7.5" markerHeight="7.5" markerUnits="userSpaceOnUse"'
    heads = [
        f'<marker id="{name}" {shape} orient="auto"><path d="M0 0.8L8 4L0 7.2z" fill="{colour}"/></marker>'
        for name, colour in colours.items()
    ]
    return "\n".join(["<defs>", *heads, "</defs>"])


def text_width(content: str, size: float) -> float:
    """About how wide a text is in a sans-serif font."""
    units = {**dict.fromkeys(_NARROW, 0.31), **dict.fromkeys(_MEDIUM, 0.5), **dict.fromkeys(_WIDE, 0.86)}
    return size * sum(units.get(c, 0.7 if c.isupper() else 0.58) for c in content)


def shorten(content: str, room: float, size: float) -> str:
    """``content``, with its middle left out if it is wider than ``room``.

    >>> shorten("encoder/layers/0/attention/kernel", 120, 12)
    'encoder/l…on/kernel'
    """
    if text_width(content, size) <= room:
        return content
    for keep in range(len(content) - 1, 1, -1):
        short = content[: (keep + 1) // 2] + "…" + content[len(content) - keep // 2 :]
        if text_width(short, size) <= room:
            return short
    return "…"


def _point(point: Point) -> str:
    return f"{number(point[0])} {number(point[1])}"


def _distance(a: Point, b: Point) -> float:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def _toward(point: Point, other: Point, distance: float) -> Point:
    part = distance / _distance(point, other)
    return point[0] + (other[0] - point[0]) * part, point[1] + (other[1] - point[1]) * part
