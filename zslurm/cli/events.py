"""`zslurm events`."""

from __future__ import annotations

from typing import Annotated

import typer

from zslurm.cli.options import Json, SomeRuns


def events(
    runs: SomeRuns = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on printing until the runs have ended.")
    ] = False,
    lines: Annotated[int | None, typer.Option("-n", "--lines", min=0, help="Only the last N events.")] = None,
    json: Json = False,
) -> None:
    """Show what happened to runs, and who did what: starts, failures, requeues.

    With --json a line of JSON for each event.

    Example: zslurm events my-run -f
    """
    from json import dumps

    from zslurm.core.console import print_table
    from zslurm.report.events import COLUMNS, all_events, as_json, as_row, follow_events
    from zslurm.run.find import find_all
    from zslurm.run.index import known_runs

    chosen = find_all(runs) if runs else known_runs()
    if not follow:
        found = all_events(chosen)
        found = found if lines is None else found[len(found) - min(lines, len(found)) :]
        if not json:
            print_table(COLUMNS, [as_row(*pair) for pair in found])
            return
    for run, event in follow_events(chosen, lines) if follow else found:
        print(dumps(as_json(run, event)) if json else "\t".join(as_row(run, event)), flush=True)
