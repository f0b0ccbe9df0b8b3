"""Paths as a user writes them."""

from __future__ import annotations

from pathlib import Path


def expand(text: str) -> Path:
    """A path with `~` and `~name` replaced by home directories; a name that nobody has stays as it is."""
    path = Path(text)
    try:
        return path.expanduser()
    except RuntimeError:
        return path
