"""Printing: data to stdout, messages to stderr; tables and colour on a terminal only."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any


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


def print_styled(lines: Iterable[Sequence[tuple[str, str]]]) -> None:
    """Lines of (text, style); the styles on a terminal only, where a line is never broken."""
    if not sys.stdout.isatty():
        for line in lines:
            print("".join(text for text, _ in line).rstrip())
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in lines:
        console.print(Text.assemble(*line), no_wrap=True, crop=False, overflow="ignore", soft_wrap=True)
