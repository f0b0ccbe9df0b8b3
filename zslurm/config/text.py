"""Text in a configuration: words and lines that are safe in a script."""

from __future__ import annotations

import json
import re
from typing import Any

# Control characters, everything that some program takes for the end of a line, and what UTF-8 cannot write.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def one_line(value: str) -> str:
    """Refuse control characters: no value may smuggle a line into a script."""
    if CONTROL.search(value):
        raise ValueError(f"must be one line without control characters, got {value!a}")
    return value


def as_word(value: object) -> object:
    """Take numbers that are names (an account `123`) as they were typed."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def shown_json(value: Any) -> str:
    """Return a value as JSON for a message: letters as they are, unless one of them cannot be printed."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value, default=str)
