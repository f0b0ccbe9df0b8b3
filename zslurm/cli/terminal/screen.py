"""The terminal: how large it is, which characters it has, and lines of styled text on it.

Colours are rich's: none with NO_COLOR or TERM=dumb. If the output's encoding lacks a character, drawings are
made of ASCII.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from textwrap import wrap
from typing import TextIO

from zslurm.core.console import harmless

Line = list[tuple[str, str]]
"""Pieces of a line, each with its style."""

_WORDS = re.compile(r"\s*\S+\s*$|\s*\S+")
_ASCII = str.maketrans(
    {"─": "-", "│": "|", "├": "|", "└": "`", "…": "~", "█": "#", "░": ".", "▒": "-", "▓": "+", "·": "."}
    | dict(zip("▁▂▃▄▅▆▇", "_..--=+", strict=True))
)


def columns_of_terminal() -> int | None:
    """Return how wide the terminal is; None if the output is no terminal, and lines are as long as they are."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def has_unicode(stream: TextIO | None = None) -> bool:
    """Return whether the characters of bars, sparklines and boxes can be printed."""
    encoding = (stream or sys.stdout).encoding or "ascii"
    try:
        "─…█▁".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def print_styled(lines: Iterable[Line]) -> None:
    """Print lines of (text, style): the styles on a terminal only, which also folds lines that are too long."""
    width = columns_of_terminal()
    if width is None:
        for line in lines:
            print(encodable("".join(text for text, _ in line).rstrip()))
        return
    print_lines(chunk for line in lines for chunk in fold(line, width))


def print_lines(lines: Iterable[Line]) -> None:
    """Print lines on the terminal, with their styles, as long as they are."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in lines:
        pieces = [(encodable(text), style) for text, style in line]
        console.print(Text.assemble(*pieces), no_wrap=True, crop=False, overflow="ignore", soft_wrap=True)


def encodable(text: str) -> str:
    """Return text as the output can show it: drawings of ASCII, `?` for other characters that it lacks."""
    encoding, text = sys.stdout.encoding or "ascii", harmless(text)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
    return text


def shorten_to(text: str, width: int) -> str:
    """Return text in at most `width` columns of one line, with an ellipsis if something is left out."""
    return cut(" ".join(text.split()), width)


def cut(text: str, width: int) -> str:
    """Return a line in at most `width` columns, with an ellipsis if something is left out."""
    return text if len(text) <= width else text[: max(width - 1, 0)].rstrip() + ("…" if has_unicode() else "~")


def paragraph(text: str, width: int | None, *, indent: int = 0, style: str = "") -> list[Line]:
    """Return text as indented lines, broken between words if it is longer than the width; at least one line."""
    text = " ".join(text.split())
    size = max(width - indent, 1) if width is not None else len(text) + 1
    parts = wrap(text, size, break_long_words=False, break_on_hyphens=False) or [""]
    return [[(" " * indent + chunk, style)] for chunk in parts]


def fold(line: Line, width: int) -> Iterator[Line]:
    """Break a line between its pieces or, if a piece is too long, between its words: never inside one."""
    text_of_line = "".join(text for text, _ in line).rstrip()
    if len(text_of_line) <= width:
        yield without_end(line)
        return
    indent = len(text_of_line) - len(text_of_line.lstrip()) + 4
    current: Line = []
    used = 0
    for text, style in line:
        fits = indent + len(text.rstrip()) <= width
        for piece in [text] if fits else _WORDS.findall(text):
            if current and used + len(piece.rstrip()) > width:
                yield without_end(current)
                current, used, piece = [(" " * indent, "")], indent, piece.lstrip()
            current.append((piece, style))
            used += len(piece)
    yield without_end(current)


def without_end(line: Line) -> Line:
    """Return the line without spaces at its end."""
    kept = list(line)
    while kept and not kept[-1][0].strip():
        kept.pop()
    return [*kept[:-1], (kept[-1][0].rstrip(), kept[-1][1])] if kept else []
