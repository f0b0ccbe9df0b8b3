"""`zslurm report`: runs as one page, HTML or Markdown."""

from __future__ import annotations

import io
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from zslurm.cli.options import Runs
from zslurm.core.console import say
from zslurm.core.errors import ConfigError
from zslurm.core.files import write_atomically
from zslurm.run.find import find_all


class Format(StrEnum):
    """How a report is written."""

    HTML = "html"
    MARKDOWN = "md"


_ENDINGS = {".html": Format.HTML, ".htm": Format.HTML, ".md": Format.MARKDOWN, ".markdown": Format.MARKDOWN}


def report(
    runs: Runs,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="FILE", help="The file to write, `-` for stdout; default: RUN-report.html."
        ),
    ] = None,
    format: Annotated[
        Format | None, typer.Option("--format", help="html or md; default: by the ending of --out.")
    ] = None,
) -> None:
    """Write one page about a run, or several side by side.

    Curves, where the time went, faults and actions, checkpoints, configuration, and what the job used of what it
    asked for. The page needs no network and opens from a file, on a phone too.

    Example: zslurm report my-run --out my-run.html
    """
    found = find_all(runs)
    chosen = format or _by_ending(out)
    name = found[0].name if len(found) == 1 else f"{found[0].name}-and-{len(found) - 1}-more"
    path = out if out is not None else Path(f"{name}-report.{chosen}")
    if path.is_dir():
        path = path / f"{name}-report.{chosen}"
    from zslurm.report.markdown import as_markdown
    from zslurm.report.page import as_html
    from zslurm.report.run_facts import read_runs
    from zslurm.report.sections import build

    built = build(read_runs(found))
    text = as_html(built) if chosen is Format.HTML else as_markdown(built)
    if str(path) == "-":
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # as a file has it, whatever the locale
        print(text, end="")
        return
    try:
        write_atomically(path, text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}; name another --out") from error
    say(f"wrote {path.absolute()}")


def _by_ending(out: Path | None) -> Format:
    """Return the format that a file's name means.

    Raises:
        ConfigError: it means none.
    """
    if out is None or str(out) == "-" or out.is_dir():
        return Format.HTML
    if out.suffix.lower() not in _ENDINGS:
        raise ConfigError(f"--out {out}: end it with .html or .md, or add --format")
    return _ENDINGS[out.suffix.lower()]
