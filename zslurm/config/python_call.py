"""What a command that starts a Python program consists of, read as Python itself reads it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_SWITCH = re.compile(r"-[uBOEsPIqvbS]+")
_WITH_VALUE = ("-X", "-W")


@dataclass(frozen=True)
class PythonCall:
    """A Python program.

    Attributes:
        interpreter: the Python, and its options.
        kind: whether `target` is the path of a script or, after `-m`, the name of a module.
        target: the script or module.
        arguments: of the program.
    """

    interpreter: tuple[str, ...]
    kind: Literal["script", "module"]
    target: str
    arguments: tuple[str, ...]


def python_call(command: Sequence[str]) -> PythonCall | None:
    """Return a command as a call of Python; None if it runs another program, or no script and no module."""
    if not command or not _PYTHON.fullmatch(PurePath(command[0]).name):
        return None
    position = 1
    while position < len(command):
        word = command[position]
        interpreter, following = tuple(command[:position]), tuple(command[position + 1 :])
        if word == "-m" and following:
            return PythonCall(interpreter, "module", following[0], following[1:])
        if word in _WITH_VALUE:
            position += 2
        elif _SWITCH.fullmatch(word) or word.startswith(_WITH_VALUE):
            position += 1
        elif word.startswith("-"):
            return None
        else:
            return PythonCall(interpreter, "script", word, following)
    return None
