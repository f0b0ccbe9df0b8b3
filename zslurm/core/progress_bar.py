"""A progress bar for work that is counted in bytes; nothing if no terminal shows it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Bar(Protocol):
    """Shows bytes done, bytes in all, and what is being done."""

    def __call__(self, done: int, total: int, description: str | None = None) -> None:
        """Show the progress."""


@contextmanager
def byte_bar(description: str) -> Iterator[Bar]:
    """Draw a bar on stderr."""
    if not sys.stderr.isatty():
        yield lambda done, total, description=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(description, total=None)
        yield lambda done, total, now=None: bars.update(task, completed=done, total=total, description=now)
