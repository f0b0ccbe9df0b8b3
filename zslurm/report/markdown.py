"""The report as Markdown, for a merge request, a wiki or a terminal: tables, and curves as lines of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zslurm.core.console import harmless
from zslurm.report.page_parts import (
    Bullets,
    Drawing,
    Fold,
    Item,
    PageSection,
    PageTable,
    ReportPage,
    RunPart,
    Text,
    Tile,
)


def as_markdown(report: ReportPage) -> str:
    """Return the report as GitHub's Markdown."""
    return harmless("\n".join(_lines(report)) + "\n")


def _lines(report: ReportPage) -> Iterator[str]:
    yield f"# {_escaped(report.title)}"
    yield ""
    yield f"Made {report.made} by `zslurm report`."
    yield ""
    for section in report.together:
        yield from _section(section, 2)
    for run in report.runs:
        yield from _run(run, alone=len(report.runs) == 1)


def _run(run: RunPart, *, alone: bool) -> Iterator[str]:
    if not alone:
        yield f"## {_escaped(run.name)}"
        yield ""
    yield f"**{run.state}**" + (f": {_escaped(run.cause)}" if run.cause else "")
    yield ""
    if run.tiles:
        yield from _tiles(run.tiles)
        yield ""
    for note in run.notes:
        yield f"> {_escaped(note)}"
    if run.notes:
        yield ""
    for section in run.sections:
        yield from _section(section, 2 if alone else 3)


def _tiles(tiles: Sequence[Tile]) -> Iterator[str]:
    yield from _table(PageTable([tile.name for tile in tiles], [[tile.value for tile in tiles]]))


def _section(section: PageSection, level: int) -> Iterator[str]:
    yield f"{'#' * level} {section.name}"
    yield ""
    for item in section.items:
        lines = list(_item(item))
        yield from lines
        if lines:
            yield ""


def _item(item: Item) -> Iterator[str]:
    if isinstance(item, Text):
        yield _escaped(item.text)
    elif isinstance(item, Bullets):
        yield from (f"- {_escaped(text, code=True)}" for text in item.items)
    elif isinstance(item, PageTable):
        yield from _table(item)
    elif isinstance(item, Drawing):
        yield from [item.text] if item.text else []
    elif isinstance(item, Fold):
        yield f"<details><summary>{item.name}</summary>"
        yield ""
        yield "```json"
        yield item.text.replace("```", "'''")
        yield "```"
        yield ""
        yield "</details>"


def _table(table: PageTable) -> Iterator[str]:
    rule = ["---:" if name in table.numbers else "---" for name in table.columns]
    for row in (table.columns, rule, *table.rows):
        cells = row if row is rule else [_escaped(" ".join(cell.split())) for cell in row]
        yield f"| {' | '.join(cells)} |"


_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\`*_<>|[]#"})
_IN_CODE = str.maketrans({"|": "\\|", "<": "&lt;"})


def _escaped(text: str, *, code: bool = False) -> str:
    """Return text that no renderer takes for markup; with `code`, words between backticks stay code."""
    return text.translate(_IN_CODE if code else _SPECIAL)
