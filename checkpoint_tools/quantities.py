"""Sizes, counts and durations as messages write them; docs/everyday.md states the rule.

It is here because checkpoint_tools is usable by itself: train and zslurm import it from here.

sizes       binary units, three significant digits: `950 B`, `12.3 KiB`, `4.50 MiB`, `16.5 GiB`
counts      `950`, `12.3k`, `4.5M`, `7.8B` where they are rounded; with a noun, `1 node` and `2 nodes`
durations   the two largest units: `45s`, `12m 03s`, `3h 07m`, `2d 4h`
"""

from __future__ import annotations

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNTS = ("", "k", "M", "B", "T")


def show_bytes(count: float) -> str:
    """Show a size: `950 B`, `12.3 KiB`, `4.50 MiB`, `16.5 GiB`."""
    value, unit = float(count), 0
    while abs(value) >= (1023.5 if unit else 1024) and unit < len(_SIZES) - 1:
        value, unit = value / 1024, unit + 1
    if unit == 0:
        return f"{value:.0f} B"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {_SIZES[unit]}"


def show_count(number: float) -> str:
    """Show a number in three digits: `950`, `12.3k`, `4.5M`, `7.8B`."""
    value, unit = float(number), 0
    while abs(value) >= 999.5 and unit < len(_COUNTS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g}{_COUNTS[unit]}"


def show_duration(seconds: float) -> str:
    """Show a span of time: `45s`, `12m 03s`, `3h 07m`, `2d 4h`."""
    total = int(max(0, seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m {total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h {total % 3600 // 60:02d}m"
    return f"{total // 86400}d {total % 86400 // 3600}h"


def counted(number: float, one: str, many: str | None = None, *, shown: str | None = None) -> str:
    """Show a number with its noun: `1 node`, `2 nodes`, `0 nodes`.

    Args:
        number: decides between singular and plural.
        one: the singular, as `node`, or more of the sentence, as `process is left`.
        many: the plural, if it is not the regular one of a single noun: `processes are left`.
        shown: what to write instead of the number itself, as `12.3k`.
    """
    return f"{number if shown is None else shown} {one if number == 1 else many or _plural(one)}"


def _plural(noun: str) -> str:
    """Return the regular plural: nodes, processes, retries."""
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2:-1] not in set("aeiou"):
        return f"{noun[:-1]}ies"
    return f"{noun}s"
