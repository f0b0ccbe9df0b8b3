"""Quoting for shells."""

from __future__ import annotations

import shlex


class ShellWord(str):
    """A word that is quoted already: a shell may expand what is in it."""

    __slots__ = ()


def quote(value: str) -> str:
    """Quote one word for every POSIX shell, and for zsh, in which a bare `=eth0` means the path of a program."""
    if isinstance(value, ShellWord):
        return value
    word = shlex.quote(value)
    return f"'{word}'" if word.startswith("=") else word
