"""Plots as plain SVG: areas over time, lines over time, spreads on a logarithmic scale, bars. No script, no network."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from postbus.model import instant

if TYPE_CHECKING:
    from postbus.spark.report.facts import Latency, Line

__all__ = ["COLOURS", "areas", "bars", "duration", "lines", "number", "spreads"]

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d9da1", "#eeca3b", "#ff9da6", "#79706e")
WIDTH, HEIGHT = 900, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 14, 30
ROW = 30
LABEL = 260


def number(value: float) -> str:
    """Return a number as people read it: ``1.2 M``, ``34 k``, ``0.25``."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == ' k' else size):.3g}{unit}"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"  # noqa: PLR2004 - three figures


def duration(seconds: float) -> str:
    """Return a duration with a unit that fits it."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs" if seconds > 0 else "0"


def _open(height: int, title: str) -> list[str]:
    return [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">']


def _steps(high: float, count: int = 4) -> list[float]:
    """Return round values from 0 up to the first that is not below ``high``."""
    if high <= 0:
        return [0.0, 1.0]
    raw = high / count
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw)
    return [step * place for place in range(math.ceil(high / step - 1e-9) + 1)]


def _frame(high: float, start_s: int, bucket_s: int, places: int) -> tuple[list[str], float]:
    """Return the grid with its labels, and the value at its top."""
    ticks = _steps(high)
    parts = []
    for tick in ticks:
        y = HEIGHT - BOTTOM - tick / ticks[-1] * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    span_s = places * bucket_s
    look = "%H:%M:%S" if span_s <= 7_200 else "%m-%d %H:%M" if span_s <= 14 * 86_400 else "%Y-%m-%d"  # noqa: PLR2004
    for fifth in range(5):
        place = fifth * (places - 1) / 4
        moment = instant(int(start_s + place * bucket_s) * 1_000_000)
        anchor = ("start", "middle", "middle", "middle", "end")[fifth]
        x = _x(place, places)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{moment.strftime(look)}</text>')
    return parts, ticks[-1]


def _x(place: float, places: int) -> float:
    return LEFT + place / max(places - 1, 1) * (WIDTH - LEFT - RIGHT)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)


def _legend(names: list[str]) -> str:
    keys = [
        f'<span><i style="background:{COLOURS[place % len(COLOURS)]}"></i>{escape(name)}</span>'
        for place, name in enumerate(names)
    ]
    return f'<div class="legend">{"".join(keys)}</div>'


def areas(title: str, drawn: list[Line], start_s: int, bucket_s: int) -> str:
    """Return lines stacked on each other, with a legend."""
    places = len(drawn[0].values) if drawn else 1
    sums = [0.0] * places
    shapes = []
    for index, line in enumerate(drawn):
        lower = sums
        sums = [below + value for below, value in zip(lower, line.values, strict=True)]
        shapes.append((line.name, lower, sums, COLOURS[index % len(COLOURS)]))
    parts, top = _frame(max(sums, default=1), start_s, bucket_s, places)
    for name, lower, upper, colour in shapes:
        there = [f"{_x(place, places):.1f},{_y(value, top):.1f}" for place, value in enumerate(upper)]
        back = [f"{_x(place, places):.1f},{_y(value, top):.1f}" for place, value in reversed(list(enumerate(lower)))]
        if places == 1:  # one bucket has no width
            there.append(f"{WIDTH - RIGHT},{_y(upper[0], top):.1f}")
            back.insert(0, f"{WIDTH - RIGHT},{_y(lower[0], top):.1f}")
        shape = " ".join([*there, *back])
        parts.append(f'<polygon points="{shape}" fill="{colour}"><title>{escape(name)}</title></polygon>')
    return "\n".join([*_open(HEIGHT, title), *parts, "</svg>", _legend([line.name for line in drawn])])


def lines(title: str, drawn: list[Line], start_s: int, bucket_s: int) -> str:
    """Return lines over each other, with a legend."""
    places = len(drawn[0].values) if drawn else 1
    high = max((value for line in drawn for value in line.values), default=0)
    parts, top = _frame(high, start_s, bucket_s, places)
    for index, line in enumerate(drawn):
        points = " ".join(f"{_x(place, places):.1f},{_y(value, top):.1f}" for place, value in enumerate(line.values))
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<polyline points="{points}" stroke="{colour}"><title>{escape(line.name)}</title></polyline>')
    return "\n".join([*_open(HEIGHT, title), *parts, "</svg>", _legend([line.name for line in drawn])])


def spreads(title: str, drawn: list[Latency]) -> str:
    """Return a row per name: from the median to the 99th percentile a bar, the 95th a tick, the longest a dot."""
    low = min((row.percentiles[0] for row in drawn), default=1e-3)
    high = max((row.longest for row in drawn), default=1)
    first = math.floor(math.log10(max(low, 1e-6)))
    last = max(math.ceil(math.log10(max(high, 1e-6))), first + 1)
    height = TOP + ROW * len(drawn) + BOTTOM

    def at(seconds: float) -> float:
        share = (math.log10(max(seconds, 10**first)) - first) / (last - first)
        return LABEL + share * (WIDTH - LABEL - 90)

    parts = []
    for power in range(first, last + 1):
        x = at(10.0**power)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 10}" text-anchor="middle">{duration(10.0**power)}</text>')
    for place, row in enumerate(drawn):
        y = TOP + place * ROW + ROW / 2
        p50, _, p95, p99 = (at(value) for value in row.percentiles)
        said = ", ".join(
            f"{name} {duration(value)}"
            for name, value in zip(("p50", "p90", "p95", "p99"), row.percentiles, strict=True)
        )
        parts += [
            f"<g><title>{escape(row.name)}: {said}, longest {duration(row.longest)}</title>",
            f'<text x="{LABEL - 12}" y="{y + 4:.1f}" text-anchor="end">{escape(_cut(row.name, 40))}</text>',
            f'<rect class="bar" x="{p50:.1f}" y="{y - 7:.1f}" width="{max(p99 - p50, 2):.1f}" height="14" rx="3"/>',
            f'<line class="tick" x1="{p95:.1f}" x2="{p95:.1f}" y1="{y - 9:.1f}" y2="{y + 9:.1f}"/>',
            f'<circle class="dot" cx="{at(row.longest):.1f}" cy="{y:.1f}" r="3"/>',
            f'<text x="{WIDTH - RIGHT}" y="{y + 4:.1f}" text-anchor="end">{number(row.events)}</text></g>',
        ]
    return "\n".join([*_open(height, title), *parts, "</svg>"])


def bars(title: str, rows: list[tuple[str, float]], *, colour: str = COLOURS[0]) -> str:
    """Return a bar per name, with its number."""
    high = max((value for _, value in rows), default=1) or 1
    height = TOP + ROW * len(rows)
    parts = []
    for place, (name, value) in enumerate(rows):
        y = TOP + place * ROW
        width = value / high * (WIDTH - LABEL - 90)
        parts += [
            f"<g><title>{escape(name)}: {value:,.0f}</title>",
            f'<text x="{LABEL - 12}" y="{y + 14}" text-anchor="end">{escape(_cut(name, 40))}</text>',
            f'<rect x="{LABEL}" y="{y + 2}" width="{max(width, 2):.1f}" height="16" rx="3" fill="{colour}"/>',
            f'<text x="{LABEL + max(width, 2) + 8:.1f}" y="{y + 14}">{number(value)}</text></g>',
        ]
    return "\n".join([*_open(height, title), *parts, "</svg>"])


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: chars - 1] + "…"
