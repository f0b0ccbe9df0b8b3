"""Printing: data to stdout, messages to stderr."""

from __future__ import annotations

import json
import re
import shutil
import sys
from textwrap import fill
from typing import Any

# C0 but tab and line feed, DEL and C1, which a terminal obeys; marks that change the direction of text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_OF_LOGS = "\x1b\\[[0-9;:]*m|\r"  # colours, and the return to the start of a line with which progress bars work
_CONTROL_OR_OF_LOGS = re.compile(f"({_OF_LOGS})|({_CONTROL.pattern})")


def harmless(text: str, *, log: bool = False) -> str:
    r"""Return text that a terminal shows and does not obey: control characters are written as `\x1b`.

    Names and log lines come from programs and people. Line feeds and tabs stay; with `log` so do colours and `\r`.
    """
    if text.isprintable():
        return text
    if log:
        return _CONTROL_OR_OF_LOGS.sub(lambda match: match[1] or _written(match[2]), text)
    return _CONTROL.sub(lambda match: _written(match[0]), text)


def _written(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def say(text: str) -> None:
    """Print a message for a person, on stderr; on a terminal it is broken between words."""
    text = harmless(text)
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        text = "\n".join(_wrapped(line, width) for line in text.splitlines())
    print(text, file=sys.stderr)


def _wrapped(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2))
