"""Quoting for shells."""

from __future__ import annotations

import shlex


def quote(value: str) -> str:
    """One word for every POSIX shell, and for zsh, where a bare `=eth0` means the path of a program eth0."""
    word = shlex.quote(value)
    return f"'{word}'" if word.startswith("=") else word
