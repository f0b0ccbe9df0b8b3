"""Values as people read them."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from zslurm.errors import ConfigError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def show_value(value: Any) -> str:
    """A configuration value on one line: words bare, everything else as JSON."""
    if value is None:
        return "-"
    return value if isinstance(value, str) and value and value.isprintable() else json.dumps(value)


def show_duration(seconds: float) -> str:
    """`45s`, `12m 03s`, `3h 07m`, `2d 4h`."""
    whole = int(max(0, seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600}h"


def show_count(number: float) -> str:
    """`950`, `12.3k`, `4.5M`, `7.8B`."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def show_bytes(count: int) -> str:
    """`950 B`, `12.3 KiB`, `4.50 MiB`, `16.5 GiB`."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            value = count / size
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return f"{count} B"


def parse_size(text: str) -> int:
    """Bytes of a size as people write it: `5GB`, `16MiB`, `500000`.

    Raises:
        ConfigError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?|)B?", text.strip().upper())
    size = int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0
    if size < 1:
        raise ConfigError(f"{text!r} is not a size; write one such as 5GB, 500MB or 16MiB")
    return size


def show_time(when: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Local time, to the second; `?` for what is no time, as in a damaged file."""
    try:
        return time.strftime(form, time.localtime(when))
    except (OverflowError, OSError, ValueError):
        return "?"
