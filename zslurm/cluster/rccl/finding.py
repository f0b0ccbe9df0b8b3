"""What the lint of RCCL's variables says of one of them, and how its checks read values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from zslurm.config.spec import ClusterSection

Level = Literal["fault", "warning", "note"]
LEVELS: tuple[Level, ...] = ("fault", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """Something about one variable.

    Attributes:
        level: `fault` where the job would fail, hang or leave the fast network; `warning` where something is wrong
            with the variable; `note` where nothing is, but a user may expect something else.
        value: the variable's; None where it is not set at all.
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


Check = Callable[[Mapping[str, str], ClusterSection], Iterator[Finding]]


def fault(given: Mapping[str, str], name: str, message: str) -> Finding:
    """Return a finding that fails the lint."""
    return Finding(name, given.get(name), "fault", message)


def warning(given: Mapping[str, str], name: str, message: str) -> Finding:
    """Return a finding that is shown and fails nothing."""
    return Finding(name, given.get(name), "warning", message)


def note(given: Mapping[str, str], name: str, message: str) -> Finding:
    """Return a finding about no variable."""
    return Finding(name, given.get(name), "note", message)


def is_on(given: Mapping[str, str], name: str) -> bool:
    """Return whether a variable is set to a number other than 0."""
    return number(given.get(name)) not in (None, 0)


def number(text: str | None) -> int | None:
    """Return a value as the libraries read it, in decimal or with 0x; None where it is no number."""
    try:
        return int(text, 0) if text is not None else None
    except ValueError:
        return None
