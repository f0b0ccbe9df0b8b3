"""Paths as a user writes them."""

from __future__ import annotations

from pathlib import Path

LONGEST_NAME = 100
"""Characters of a run's name, or of a profile's, at most: it becomes the name of a directory and of a job."""


def home() -> Path:
    """Return the user's home directory; the root directory if there is none, as in a container without accounts.

    An ordinary user cannot write there, so what is kept in a home is then reported as not kept.
    """
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def expand(text: str) -> Path:
    """Return a path with `~` and `~name` replaced by home directories; a name that no user has stays as it is."""
    path = Path(text)
    try:
        return path.expanduser()
    except RuntimeError:
        return path
