"""What the lint of RCCL's variables finds about one of them, and how its checks read values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Level = Literal["fault", "warning", "note"]
LEVELS: tuple[Level, ...] = ("fault", "warning", "note")


@dataclass(frozen=True)
class RcclFinding:
    """Something about one variable.

    Attributes:
        level: `fault` if the job would fail, hang or leave the fast network; `warning` if something is wrong
            with the variable; `note` if nothing is, but a user may expect something else.
        value: the variable's; None if it is not set at all.
        message: what is wrong, and what to do.
    """

    name: str
    value: str | None
    level: Level
    message: str

    @property
    def line(self) -> str:
        """The finding in one line, such as `NCCL_PXN_DISABLE=1: ...`."""
        shown = self.name if self.value is None else f"{self.name}={self.value}"
        return f"{shown}: {self.message}"


FindingFields = tuple[Level, str, str]
"""What a check yields: level, name and message of a finding."""


def is_on(given: Mapping[str, str], name: str) -> bool:
    """Return whether a variable is set to a number other than 0."""
    return number(given.get(name)) not in (None, 0)


def number(text: str | None) -> int | None:
    """Return a value as the libraries read it, in decimal or with 0x; None if it is no number."""
    try:
        return int(text, 0) if text is not None else None
    except ValueError:
        return None
