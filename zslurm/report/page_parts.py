"""What a report is made of, apart from how it is written: the HTML page and the Markdown show the same parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    items: Sequence[str]


@dataclass(frozen=True)
class PageTable:
    """A table; columns whose names are in `numbers` are aligned at their right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[str] = ()
    looks: Sequence[str] = ()
    """A class of the page's style for each row, or none at all."""


@dataclass(frozen=True)
class Drawing:
    """A plot: as HTML, and what Markdown has in its place (empty: nothing)."""

    html: Markup
    text: str = ""


@dataclass(frozen=True)
class Fold:
    """A long text that a reader opens."""

    name: str
    text: str


Item = Text | Bullets | PageTable | Drawing | Fold


@dataclass(frozen=True)
class PageSection:
    """A part with a heading."""

    name: str
    items: Sequence[Item]


@dataclass(frozen=True)
class Tile:
    """A figure at the top of the page; `look` is `good`, `bad` or empty."""

    name: str
    value: str
    look: str = ""


@dataclass(frozen=True)
class RunPart:
    """Everything about one run."""

    name: str
    state: str
    look: str
    cause: str
    tiles: Sequence[Tile]
    notes: Sequence[str]
    sections: Sequence[PageSection]


@dataclass(frozen=True)
class ReportPage:
    """A whole report."""

    title: str
    made: str
    together: Sequence[PageSection]
    runs: Sequence[RunPart]
