"""Lines in a plot, as SVG: small, readable as text, and without a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import log10

__all__ = ["line_plot"]

_WIDTH, _HEIGHT, _MARGIN = 640, 400, 60
_COLOURS = ("#1b6ca8", "#d1495b", "#6a994e", "#8d6a9f", "#c77d0a")


def line_plot(
    lines: Mapping[str, Sequence[tuple[float, float]]], *, x_label: str, y_label: str, title: str
) -> str:
    """Return a plot with a logarithmic horizontal axis that ends where the points do, and y from 0.

    Args:
        lines: Points of each line by its name, x above 0.
        x_label: Below the axis.
        y_label: Above the other one.
        title: On top.
    """
    points = [point for line in lines.values() for point in line]
    low, high = (log10(end(x for x, _ in points)) for end in (min, max))
    top = max(y for _, y in points) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        along = (log10(x) - low) / ((high - low) or 1.0)
        return (
            round(_MARGIN + along * (_WIDTH - 2 * _MARGIN), 1),
            round(_HEIGHT - _MARGIN - y / top * (_HEIGHT - 2 * _MARGIN), 1),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_WIDTH / 2, 20, title, "middle"),
        _text(_WIDTH / 2, _HEIGHT - 15, x_label, "middle"),
        _text(_MARGIN, 40, y_label, "start"),
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = place(10**low, share * top)
        parts.append(f'<path d="M{x} {y}H{_WIDTH - _MARGIN}" stroke="#dddddd"/>')
        parts.append(_text(x - 6, y + 4, f"{share * top:.3g}", "end"))
    for value in dict.fromkeys(x for x, _ in points):
        x, y = place(value, 0)
        parts.append(_text(x, y + 18, f"{value:g}", "middle"))
    for number, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x},{y}" for x, y in (place(*point) for point in line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(_WIDTH - _MARGIN, 60 + 16 * number, name, "end", colour))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str, colour: str = "black") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
