"""Bars and curves as small SVG files that follow the reader's light or dark setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 760
_LEFT, _RIGHT, _TOP, _BAR, _GAP = 178, 96, 46, 20, 9
_STYLE = """<style>
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: #1c2128; }
.title { font-weight: 600; font-size: 15px; } .dim { fill: #636c76; font-size: 12px; }
.grid { stroke: #d5dae0; } .line { fill: none; stroke-width: 2; } .mark { stroke: #cf222e; stroke-dasharray: 4 3; }
.c0 { fill: #1a7f4b; } .c1 { fill: #1f6feb; } .c2 { fill: #bf5b04; } .c3 { fill: #7a51c7; } .c4 { fill: #8a939d; }
.s0 { stroke: #1a7f4b; } .s1 { stroke: #1f6feb; }
@media (prefers-color-scheme: dark) {
text { fill: #e3e8ee; } .dim { fill: #9aa4af; } .grid { stroke: #30363e; } .mark { stroke: #ff7b72; }
.c0 { fill: #53c785; } .c1 { fill: #6aa9ff; } .c2 { fill: #f0913d; } .c3 { fill: #b596f5; } .c4 { fill: #757e88; }
.s0 { stroke: #53c785; } .s1 { stroke: #6aa9ff; } }
</style>"""


@dataclass(frozen=True)
class Bar:
    """A bar of one or several parts, each with its length and the number of its colour; `text` is at its end."""

    name: str
    parts: Sequence[tuple[float, int]]
    text: str

    @property
    def length(self) -> float:
        """Length of all parts."""
        return sum(length for length, _ in self.parts)


def bars(
    title: str, about: str, rows: Sequence[Bar], *, key: Sequence[tuple[str, int]] = (), note: str = ""
) -> str:
    """Return horizontal bars below each other; `key` names the colours of their parts."""
    longest = max(row.length for row in rows)
    right = max(_RIGHT, 12 + max(round(7.5 * len(row.text)) for row in rows if row.length > longest / 2))
    scale = (WIDTH - _LEFT - right) / longest
    top = _TOP + (22 if key else 0)
    lines = [_text(8, 20, title, "title"), _text(8, 38, about, "dim")]
    across = _LEFT
    for name, color in key:
        lines.append(f'<rect class="c{color}" x="{across}" y="{_TOP + 4}" width="11" height="11" rx="2"/>')
        lines.append(_text(across + 16, _TOP + 14, name, "dim"))
        across += 34 + 7 * len(name)
    for index, row in enumerate(rows):
        y = top + index * (_BAR + _GAP)
        lines.append(_text(_LEFT - 8, y + 15, row.name, "", anchor="end"))
        x = float(_LEFT)
        for length, color in row.parts:
            width = max(length * scale, 1.5 if length else 0.0)
            lines.append(f'<rect class="c{color}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}"/>')
            x += width
        lines.append(_text(x + 6, y + 15, row.text, ""))
    height = top + len(rows) * (_BAR + _GAP) + (24 if note else 6)
    if note:
        lines.append(_text(8, height - 10, note, "dim"))
    return _svg(height, f"{title}. {about}", lines)


def curves(
    title: str, about: str, series: Sequence[tuple[str, Sequence[float]]], *, mark: tuple[int, str], unit: str
) -> str:
    """Return curves over the steps from 1, with a vertical line after step `mark[0]`."""
    top, height, left, right = 66, 300, 52, 16
    values = [value for _, each in series for value in each]
    low, high = min(values), max(values)
    low, high = max(0.0, low - 0.04 * (high - low)), high + 0.04 * (high - low)
    steps = max(len(each) for _, each in series)

    def place(step: float, value: float) -> str:
        x = left + (step - 1) / (steps - 1) * (WIDTH - left - right)
        return f"{x:.1f},{top + (high - value) / (high - low) * (height - top - 34):.1f}"

    lines = [_text(8, 20, title, "title"), _text(8, 38, about, "dim")]
    for share in (0, 0.25, 0.5, 0.75, 1):
        value = low + share * (high - low)
        y = place(1, value).split(",")[1]
        lines.append(f'<line class="grid" x1="{left}" x2="{WIDTH - right}" y1="{y}" y2="{y}"/>')
        lines.append(_text(left - 6, float(y) + 4, f"{value:.1f}", "dim", anchor="end"))
    for step in range(20, steps + 1, 20):
        lines.append(_text(float(place(step, low).split(",")[0]), height - 16, str(step), "dim", anchor="middle"))
    for number, (name, each) in enumerate(series):
        points = " ".join(place(step, value) for step, value in enumerate(each, start=1))
        dash = ' stroke-dasharray="7 5"' if number else ""
        lines.append(f'<polyline class="line s{number}" points="{points}"{dash}/>')
        x = left + 250 * number
        lines.append(f'<line class="line s{number}" x1="{x}" x2="{x + 24}" y1="54" y2="54"{dash}/>')
        lines.append(_text(x + 30, 58, name, "dim"))
    x = float(place(mark[0] + 0.5, low).split(",")[0])
    lines.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - 34}"/>')
    lines.append(_text(x + 5, top + 12, mark[1], "dim"))
    lines.append(_text(WIDTH - right, height - 2, f"step; {unit}", "dim", anchor="end"))
    return _svg(height + 4, f"{title}. {about}", lines)


def _text(x: float, y: float, text: str, look: str, anchor: str = "start") -> str:
    kind = f' class="{look}"' if look else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind} text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, label: str, lines: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
        f'height="{height:g}" role="img" aria-label="{escape(label)}">'
    )
    return "\n".join([head, _STYLE, *lines, "</svg>", ""])
