"""A progress bar for work that is counted in bytes; nothing where no terminal shows it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """A function that takes bytes done and bytes in all, and shows them on stderr."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(description, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
