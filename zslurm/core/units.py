"""Values as people read and write them; checkpoint_tools/quantities.py shows sizes, counts and durations."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from zslurm.checkpoint_tools.plain import shorten
from zslurm.core.errors import ConfigError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def show_value(value: Any) -> str:
    """Return a configuration value on one line: words bare, everything else as JSON."""
    if value is None:
        return "-"
    return value if isinstance(value, str) and value and value.isprintable() else json.dumps(value)


def parse_size(text: str) -> int:
    """Return bytes of a size as people write it: `5GB`, `16MiB`, `500000`.

    Raises:
        ConfigError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?|)B?", text.strip().upper())
    size = float(match[1]) * _UNITS.get(match[2], 0) if match else 0.0
    if not 1 <= size < 2**63:  # no file is larger, and a float of very many digits is infinite
        raise ConfigError(f"{shorten(text)!r} is not a size; write one such as 5GB, 500MB or 16MiB")
    return int(size)


def show_time(when: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Local time, to the second; `?` for what is no time, as in a damaged file."""
    try:
        return time.strftime(form, time.localtime(when))
    except (OverflowError, OSError, ValueError):
        return "?"
