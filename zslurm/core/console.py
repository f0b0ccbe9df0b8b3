"""Printing: data to stdout, messages to stderr."""

from __future__ import annotations

import json
import sys
from typing import Any


def say(text: str) -> None:
    """A message for a person, on stderr."""
    print(text, file=sys.stderr)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2))
