"""Printing: data to stdout, messages to stderr."""

from __future__ import annotations

import json
import shutil
import sys
from textwrap import fill
from typing import Any


def say(text: str) -> None:
    """A message for a person, on stderr; on a terminal it is broken between words."""
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
