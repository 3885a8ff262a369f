"""A bar plot of ratios as plain SVG, on a logarithmic scale so that twice and half are equally far from 1."""

from __future__ import annotations

import math
from html import escape

from benchmarks.harness import Finding

__all__ = ["bars"]

LABEL_PX = 470
SCALE_PX = 420
ROW_PX = 24
TOP_PX = 60
COLOURS = {True: "#2a9d5c", False: "#c8402f", None: "#7a8794"}


def bars(title: str, findings: list[Finding]) -> str:
    """Return an SVG with one bar per finding, its target as a tick; green met, red missed, grey for scale."""
    ratios = [finding.ratio_of_medians or 1.0 for finding in findings]
    ends = [math.log10(ratio) for ratio in ratios] + [-0.5, 0.5]
    low, high = math.floor(min(ends) * 2) / 2, math.ceil(max(ends) * 2) / 2

    def at(ratio: float) -> float:
        return LABEL_PX + (math.log10(ratio) - low) / (high - low) * SCALE_PX

    height = TOP_PX + ROW_PX * len(findings) + 10
    font = 'font-family="system-ui, sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LABEL_PX + SCALE_PX + 70} {height}" {font}>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="22" font-size="15" font-weight="600">{escape(title)}</text>',
    ]
    for power in range(math.ceil(low), math.floor(high) + 1):
        for step in (1, 2, 5):
            value = step * 10.0**power
            if low <= math.log10(value) <= high:
                x, ink = at(value), "#444" if value == 1 else "#ddd"
                parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP_PX - 8}" y2="{height - 8}" stroke="{ink}"/>')
                parts.append(f'<text x="{x:.1f}" y="{TOP_PX - 14}" text-anchor="middle" fill="#555">{value:g}</text>')
    for row, (finding, ratio) in enumerate(zip(findings, ratios, strict=True)):
        y = TOP_PX + row * ROW_PX
        measure = finding.measure
        label = escape(f"{measure.title}: {measure.ours} ÷ {measure.reference}")
        left, right = sorted((at(1.0), at(ratio)))
        parts.append(f'<text x="{LABEL_PX - 8}" y="{y + 13}" text-anchor="end" font-size="10">{label}</text>')
        parts.append(
            f'<rect x="{left:.1f}" y="{y + 2}" width="{max(right - left, 1):.1f}" height="{ROW_PX - 8}" '
            f'fill="{COLOURS[finding.met]}"/>'
        )
        goal = measure.at_least if measure.at_least is not None else measure.at_most
        if goal is not None and low <= math.log10(goal) <= high:
            x = at(goal)
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + ROW_PX - 4}" stroke="#000" stroke-width="2"/>'
            )
        parts.append(f'<text x="{right + 5:.1f}" y="{y + 13}">{ratio:.2f}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
