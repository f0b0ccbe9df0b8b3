"""Printing: data to stdout, messages to stderr; tables and colour on a terminal only."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_WORDS = re.compile(r"\s*\S+\s*$|\s*\S+")


def say(text: str) -> None:
    """A message for a person, on stderr."""
    print(text, file=sys.stderr)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on a terminal; elsewhere lines of tab-separated cells below a header, for cut and awk."""
    if not sys.stdout.isatty():
        for row in [columns, *rows]:
            print("\t".join(" ".join(cell.split()) for cell in row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(highlight=False).print(table)


Line = list[tuple[str, str]]
"""Pieces of a line, each with its style."""

_PLAIN = str.maketrans("─│├└", "-||`")


def columns_of_terminal() -> int | None:
    """Return how wide the terminal is; None where the output is no terminal, and lines are as long as they are."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_styled(lines: Iterable[Line]) -> None:
    """Lines of (text, style): the styles on a terminal only, where a line that is too long is folded.

    Where the output's encoding has no characters for boxes, they are drawn with those of ASCII.
    """
    width = columns_of_terminal()
    if width is None:
        for line in lines:
            print(_encodable("".join(text for text, _ in line).rstrip()))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in lines:
        for part in fold(line, width):
            pieces = [(_encodable(text), style) for text, style in part]
            console.print(Text.assemble(*pieces), no_wrap=True, crop=False, overflow="ignore", soft_wrap=True)


def _encodable(text: str) -> str:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return text.translate(_PLAIN)
    return text


def fold(line: Line, width: int) -> Iterator[Line]:
    """Break a line between its pieces, and where a piece is too long, between its words: never inside one."""
    whole = "".join(text for text, _ in line)
    indent = len(whole) - len(whole.lstrip()) + 4
    current: Line = []
    used = 0
    for text, style in line:
        fits = indent + len(text.rstrip()) <= width
        for piece in [text] if fits else _WORDS.findall(text):
            if current and used + len(piece.rstrip()) > width:
                yield _without_end(current)
                current, used, piece = [(" " * indent, "")], indent, piece.lstrip()
            current.append((piece, style))
            used += len(piece)
    yield _without_end(current)


def _without_end(line: Line) -> Line:
    """Return the line without spaces at its end."""
    kept = list(line)
    while kept and not kept[-1][0].strip():
        kept.pop()
    return [*kept[:-1], (kept[-1][0].rstrip(), kept[-1][1])] if kept else []
