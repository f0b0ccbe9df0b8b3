"""Tables: on a terminal as wide as it is, elsewhere lines of tab-separated cells for cut and awk.

A terminal's width is kept in four steps, each only if the one before is not enough:

1. Columns that may be dropped are left out, the highest `drop` first, and before them
   those without any value.
2. Text is wrapped between its words, in a column of at least `_LEAST_TEXT` characters.
3. Text moves below its row.
4. Columns that still do not fit are continued in a second block, which repeats the first column.

Names, numbers and states are never broken. What is dropped is in the piped table and in `--json`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Literal

from zslurm.cli.terminal.screen import Line, columns_of_terminal, print_lines, shorten_to, without_end
from zslurm.core.console import harmless

_GAP = "  "
_LEAST_TEXT = 48
_INDENT = 4
_NUMBER = re.compile(r"[-+~]?\d[\d.,]*(e[-+]?\d+)?[\d./?]*( ?[%A-Za-z][A-Za-z/]{0,4}){0,2}( \d+[smhd])?|-|\?|")

GOOD, BAD, WAITS, QUIET, HEAD = "green", "bold red", "yellow", "dim", "bold"
"""Styles: what is well, what has failed, what waits or needs a look, what is secondary, titles."""

_STATES = {
    GOOD: "running completed complete completing pass ok recovered yes built active finish",
    BAD: "failed fail node-failed timeout out-of-memory lost damaged root error down stop refused",
    WAITS: "pending requeued held stopping suspended interrupted preempted cancelled unknown "
    "warn warning skip cascade requeue",
    QUIET: "prepared copied advisory benign teardown skipped",
}
STATE_STYLES = {state: style for style, states in _STATES.items() for state in states.split()}
"""The style of each word that is a state: of runs, checks, attempts, checkpoints and faults."""


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        title: its heading.
        kind: `cell` is never broken; `state` is coloured as well; `text` is wrapped between words; `below` is no
            column on a terminal, but one line below the row, cut to its width.
        drop: columns of the highest number are left out first if the terminal is narrow; 0: never.
        most: characters of a cell on a terminal; a longer one is cut.
    """

    title: str
    kind: Literal["cell", "state", "text", "below"] = "cell"
    drop: int = 0
    most: int | None = None


def print_table(columns: Sequence[str | Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on a terminal; elsewhere lines of tab-separated cells below a header, all of them."""
    typed = [column if isinstance(column, Column) else Column(column) for column in columns]
    width = columns_of_terminal()
    if width is None:
        for row in [[column.title for column in typed], *rows]:
            print("\t".join(" ".join(harmless(cell).split()) for cell in row))
        return
    sys.stdout.flush()
    print_lines(table_lines(typed, rows, width))


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> list[Line]:
    """Lay a table out for a terminal of `width` columns; None: as wide as it is."""
    if width is None:
        width = sys.maxsize
    shown = [
        _Shown(column, [_one_line(row[index], column) for row in rows]) for index, column in enumerate(columns)
    ]
    row_columns = [fitted for fitted in shown if fitted.column.kind != "below"]
    below = [fitted for fitted in shown if fitted.column.kind == "below"]
    fitting = _drop(row_columns, width)
    if _least(fitting) > width and any(fitted.column.kind == "text" for fitted in row_columns):
        below = [*(fitted for fitted in row_columns if fitted.column.kind == "text"), *below]
        fitting = _drop([fitted for fitted in row_columns if fitted.column.kind != "text"], width)
    lines: list[Line] = []
    blocks = _blocks(fitting, width)
    for number, block in enumerate(blocks):
        lines += _block(block, below if number + 1 == len(blocks) else [], len(rows), width)
    return lines


@dataclass(frozen=True)
class _Shown:
    """A column with its cells as they are shown."""

    column: Column
    cells: list[str]

    @property
    def natural(self) -> int:
        return max(map(len, [self.column.title, *self.cells]))

    @property
    def least(self) -> int:
        return min(self.natural, _LEAST_TEXT) if self.column.kind == "text" else self.natural

    @property
    def empty(self) -> bool:
        return not any(cell not in ("", "-") for cell in self.cells)

    @property
    def right(self) -> bool:
        return self.column.kind == "cell" and not self.empty and all(map(_NUMBER.fullmatch, self.cells))


def _one_line(cell: str, column: Column) -> str:
    text = " ".join(cell.split()) if column.kind in ("text", "below") else cell.replace("\n", " ")
    return text if column.most is None else shorten_to(text, column.most)


def _least(shown: Sequence[_Shown]) -> int:
    return sum(fitted.least for fitted in shown) + len(_GAP) * max(len(shown) - 1, 0)


def _drop(shown: Sequence[_Shown], width: int) -> list[_Shown]:
    """Leave columns out until the others fit, or until none is left that may be."""
    kept = list(shown)
    while _least(kept) > width:
        droppable = [fitted for fitted in kept if fitted.column.drop]
        if not droppable:
            break
        kept.remove(max(droppable, key=lambda fitted: (fitted.empty, fitted.column.drop)))
    for fitted in sorted(shown, key=lambda fitted: (fitted.empty, fitted.column.drop)):
        more = [earlier for earlier in shown if earlier is fitted or earlier in kept]
        if fitted not in kept and _least(more) <= width:  # narrower than one that had to go
            kept = more
    return kept


def _blocks(shown: Sequence[_Shown], width: int) -> list[list[_Shown]]:
    """Divide columns into blocks that fit, each with the first column at its left."""
    blocks: list[list[_Shown]] = [list(shown[:1])]
    for fitted in shown[1:]:
        if len(blocks[-1]) > 1 and _least([*blocks[-1], fitted]) > width:
            blocks.append(list(shown[:1]))
        blocks[-1].append(fitted)
    return blocks


def _block(shown: Sequence[_Shown], below: Sequence[_Shown], rows: int, width: int) -> list[Line]:
    widths = _widths(shown, width)
    lines: list[Line] = []
    if any(fitted.column.title for fitted in shown):
        lines.append(
            _line([_pad(e.column.title, w, right=e.right) for e, w in zip(shown, widths, strict=True)], HEAD)
        )
    labelled = sum(fitted.column.kind == "text" for fitted in below) > 1
    for row in range(rows):
        wrapped = [
            wrap(fitted.cells[row], size, break_long_words=False, break_on_hyphens=False) or [""]
            if fitted.column.kind == "text"
            else [fitted.cells[row]]
            for fitted, size in zip(shown, widths, strict=True)
        ]
        for line_number in range(max(map(len, wrapped), default=0)):
            line: Line = []
            for fitted, size, cell in zip(shown, widths, wrapped, strict=True):
                text = cell[line_number] if line_number < len(cell) else ""
                style = _style(fitted, row)
                line += [(_pad(text, size, right=fitted.right), style), (_GAP, "")]
            lines.append(without_end(line))
        style = next((_state_style(fitted.cells[row]) for fitted in shown if fitted.column.kind == "state"), "")
        for fitted in below:
            lines += _below(fitted, row, width, labelled=labelled, style=style)
    return lines


def _style(shown: _Shown, row: int) -> str:
    """Return the style of a state, by its first word, and of text that is nothing but a state."""
    cell = shown.cells[row]
    if shown.column.kind == "state":
        cell = cell.split(" ")[0]
    return STATE_STYLES.get(cell, "") if shown.column.kind in ("state", "text") else ""


def _state_style(cell: str) -> str:
    style = STATE_STYLES.get(cell.split(" ")[0], "")
    return "red" if style == BAD else QUIET


def _below(shown: _Shown, row: int, width: int, *, labelled: bool, style: str) -> list[Line]:
    """Return what stands below a row: one line, or the whole text."""
    text, indent = shown.cells[row], " " * _INDENT
    if not text:
        return []
    if shown.column.kind == "below":
        return [[(indent, ""), (shorten_to(text, width - _INDENT), style)]]
    if labelled:
        text = f"{shown.column.title}: {text}"
    room = max(width - _INDENT, 1)
    return [[(indent + chunk, "")] for chunk in wrap(text, room, break_long_words=False, break_on_hyphens=False)]


def _widths(shown: Sequence[_Shown], width: int) -> list[int]:
    """Return the width of each column; columns of text share what the others leave."""
    texts = [fitted for fitted in shown if fitted.column.kind == "text"]
    room = width - sum(e.natural for e in shown if e.column.kind != "text") - len(_GAP) * (len(shown) - 1)
    if sum(fitted.natural for fitted in texts) <= room:
        return [fitted.natural for fitted in shown]
    sizes: dict[int, int] = {}
    for count, fitted in enumerate(sorted(texts, key=lambda fitted: fitted.natural)):
        sizes[id(fitted)] = max(1, min(fitted.natural, room // (len(texts) - count)))
        room -= sizes[id(fitted)]
    return [sizes.get(id(fitted), fitted.natural) for fitted in shown]


def _pad(text: str, width: int, *, right: bool) -> str:
    return text.rjust(width) if right else text.ljust(width)


def _line(cells: Sequence[str], style: str) -> Line:
    return without_end([piece for cell in cells for piece in ((cell, style), (_GAP, ""))])
