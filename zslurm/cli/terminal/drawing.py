"""Drawings of characters: progress bars, sparklines and heat maps. Colours repeat what the characters show."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zslurm.cli.terminal.screen import Line
from zslurm.cli.terminal.table import BAD, GOOD, QUIET, WAITS

_LEVELS = "▁▂▃▄▅▆▇█"
_SHADES = (
    (1.05, "░", GOOD),
    (1.15, "▒", ""),
    (1.3, "▓", WAITS),
    (math.inf, "█", BAD),
)
"""Of a heat map: up to which multiple of the median, the character, the style."""


def bar(share: float, width: int) -> Line:
    """Return a progress bar of `width` characters."""
    done = round(min(max(share, 0.0), 1.0) * width)
    return [("█" * done, GOOD), ("░" * (width - done), QUIET)]


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as a line of at most `width` bars, the newest at the right; means if there are more.

    Values that are not finite are left out.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    count = min(width, len(finite))
    means = []
    for index in range(count):
        chunk = finite[index * len(finite) // count : (index + 1) * len(finite) // count]
        means.append(sum(chunk) / len(chunk))
    lowest, highest = min(means), max(means)
    if highest == lowest:
        return _LEVELS[len(_LEVELS) // 2] * count
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round((value - lowest) / (highest - lowest) * top)] for value in means)


def heat_map(rows: Sequence[Sequence[float | None]], width: int) -> list[Line]:
    """Return a line for each row, with a cell for each value by its ratio to 1.

    Of values that share a cell the highest counts; one that is not known is a blank.
    """
    longest = max(map(len, rows), default=0)
    if not longest or width < 1:
        return []
    cells = min(longest, width)
    lines: list[Line] = []
    for row in rows:
        line: Line = []
        for index in range(cells):
            chunk = row[index * longest // cells : (index + 1) * longest // cells]
            finite_values = [value for value in chunk if value is not None and math.isfinite(value)]
            line.append(_cell(max(finite_values)) if finite_values else (" ", ""))
        lines.append(line)
    return lines


def heat_map_legend(width: int) -> Line:
    """Return what the characters of a heat map mean, as far as there is room."""
    line: Line = []
    used = 0
    for limit, character, style in _SHADES:
        text = f" to {limit:g}x  " if math.isfinite(limit) else " slower"
        used += len(character + text)
        if used <= width:
            line += [(character, style), (text, QUIET)]
    return line


def _cell(ratio: float) -> tuple[str, str]:
    return next((character, style) for limit, character, style in _SHADES if ratio <= limit)
