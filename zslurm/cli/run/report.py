"""`zslurm report`: runs as one page, HTML or Markdown, and how two of them differ."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cli.options import Runs
from zslurm.cli.terminal.screen import print_styled
from zslurm.cli.terminal.table import Column, print_table
from zslurm.core.console import print_json, say
from zslurm.core.errors import ConfigError
from zslurm.core.files import write_atomically
from zslurm.core.units import show_value
from zslurm.report.comparison import CurveDifference, FigureDifference, RunComparison
from zslurm.run.find import find_all

if TYPE_CHECKING:
    from zslurm.report.run_facts import RunFacts

_MOST_FAULTS = 10


class ReportFormat(StrEnum):
    """How a report is written."""

    HTML = "html"
    MARKDOWN = "md"


_ENDINGS = {
    ".html": ReportFormat.HTML,
    ".htm": ReportFormat.HTML,
    ".md": ReportFormat.MARKDOWN,
    ".markdown": ReportFormat.MARKDOWN,
}


def report(
    runs: Runs,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="FILE", help="The file to write, `-` for stdout; default: RUN-report.html."
        ),
    ] = None,
    format: Annotated[
        ReportFormat | None, typer.Option("--format", help="html or md; default: by the ending of --out.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print how two runs differ as JSON; no page without --out.")
    ] = False,
) -> None:
    """Write one page about a run, or compare runs.

    The page has curves, where the time went, faults and actions, checkpoints, configuration, and what the job used
    of what it asked for. It needs no network and opens from a file, on a phone too.

    Of two runs the terminal shows how they differ: in configuration, curves, throughput and faults. Curves are
    compared at the steps that both runs kept, or by tokens if their batches differ.

    Example: zslurm report my-run --out my-run.html

    Example: zslurm report my-run other-run
    """
    run_dirs = find_all(runs)
    if json and len(run_dirs) != 2:
        raise ConfigError("--json prints how two runs differ: name two")
    chosen = format or _by_ending(out)
    from zslurm.report.run_facts import read_runs

    facts = read_runs(run_dirs)
    if len(run_dirs) == 2 and str(out) != "-":
        _show_difference(facts, [run.name for run in run_dirs], as_json=json)
    if not json or out is not None:
        _write_page(facts, [run.name for run in run_dirs], out, chosen)


def _write_page(facts: Sequence[RunFacts], names: Sequence[str], out: Path | None, format: ReportFormat) -> None:
    """Write the page, or print it if `out` is `-`.

    Raises:
        ConfigError: it cannot be written.
    """
    from zslurm.report.markdown import as_markdown
    from zslurm.report.page import as_html
    from zslurm.report.sections import build

    name = names[0] if len(names) == 1 else f"{names[0]}-and-{len(names) - 1}-more"
    path = out if out is not None else Path(f"{name}-report.{format}")
    if path.is_dir():
        path = path / f"{name}-report.{format}"
    built = build(facts)
    text = as_html(built) if format is ReportFormat.HTML else as_markdown(built)
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


def _show_difference(facts: Sequence[RunFacts], given: Sequence[str], *, as_json: bool) -> None:
    """Print how two runs differ."""
    from zslurm.report import comparison

    difference = comparison.compare(*facts)
    if as_json:
        print_json(difference.to_json())
        return
    names = [_distinct(given[0], given[1], index) for index in (0, 1)]
    if difference.config:
        rows = [[row.key, show_value(row.first), show_value(row.second)] for row in difference.config]
        print_table([Column("configuration"), *(Column(name, "text") for name in names)], rows)
        print()
    else:
        say("the configurations are the same")
    print_table(["figure", *names, "ratio"], [_figure_row(row) for row in difference.figures])
    print()
    print_styled([(line, "")] for line in (*_curve_lines(difference), *_fault_lines(difference, names)))
    for facts_of_run in facts:
        if facts_of_run.metrics.damaged:
            damaged = counted(facts_of_run.metrics.damaged, "damaged line was", "damaged lines were")
            say(f"{facts_of_run.metrics.path}: {damaged} left out")


def _by_ending(out: Path | None) -> ReportFormat:
    """Return the format that a file's name means.

    Raises:
        ConfigError: it means none.
    """
    if out is None or str(out) == "-" or out.is_dir():
        return ReportFormat.HTML
    if out.suffix.lower() not in _ENDINGS:
        raise ConfigError(f"--out {out}: end it with .html or .md, or add --format")
    return _ENDINGS[out.suffix.lower()]


def _distinct(first: str, second: str, index: int) -> str:
    """Return a column's name: two runs may have the same one, in other directories."""
    return (first, second)[index] if first != second else f"{first} ({index + 1})"


def _figure_row(row: FigureDifference) -> list[str]:
    ratio = "-" if row.ratio is None else f"{row.ratio:.3g}"
    return [row.name, *("-" if value is None else f"{value:.5g}" for value in (row.first, row.second)), ratio]


def _curve_lines(found: RunComparison) -> Iterator[str]:
    if not found.curves:
        yield "no step is in both runs, so no curve can be compared"
    for curve in found.curves:
        yield f"{curve.name}: {describe(curve)}"


def describe(curve: CurveDifference) -> str:
    """Return how a curve differs, in one sentence."""
    unit = curve.by if curve.by == "step" else "token"
    at = f"{unit} {curve.at}"
    if curve.is_same:
        return f"the same bit for bit up to {at}"
    same = "" if curve.same_until is None else f"the same up to {unit} {curve.same_until}, then "
    return (
        f"{same}{curve.first:.5g} and {curve.second:.5g} at {at} (smoothed), "
        f"largest difference {curve.largest:+.3g} at {unit} {curve.largest_at}"
    )


def _fault_lines(found: RunComparison, names: list[str]) -> Iterator[str]:
    for name, faults in zip(names, found.faults, strict=True):
        if not faults:
            yield f"faults of {name}: none"
            continue
        yield f"faults of {name}: {len(faults)}"
        yield from (f"  {text}" for text in faults[-_MOST_FAULTS:])
        if len(faults) > _MOST_FAULTS:
            yield f"  and {len(faults) - _MOST_FAULTS} earlier; `zslurm logs --events` shows all"
