"""`zslurm status`: runs as rows, and one run in full."""

from __future__ import annotations

from typing import Annotated

import typer

from zslurm.cli.options import Json, SomeRuns
from zslurm.cli.run.run_details import details, details_as_json
from zslurm.cli.run.run_rows import COLUMNS, as_json, as_row, orphan_as_json, stale_line
from zslurm.core.console import print_json, print_table, say
from zslurm.core.errors import Exit, ZslurmError
from zslurm.run.find import OrphanJob, find
from zslurm.run.index import known_runs
from zslurm.run.run_dir import RunDir
from zslurm.run.state import look_all
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.commands import Retries


def status(
    runs: SomeRuns = None,
    active: Annotated[bool, typer.Option("--active", help="Only runs that are running or waiting.")] = False,
    json: Json = False,
) -> None:
    """Show your runs, or everything about one.

    Exit code 4 where Slurm does not answer; how old the states are is on stderr then.

    Example: zslurm status my-run
    """
    found: dict[RunDir, None] = {}
    orphans: list[OrphanJob] = []
    for reference in runs or ():
        try:
            found[find(reference)] = None
        except OrphanJob as orphan:
            orphans.append(orphan)
    states = look_all(list(found) if runs else known_runs(), cached=True)
    stale = stale_line(states)
    if active:
        states = [state for state in states if state.active]
        orphans = [lost for lost in orphans if lost.job.state.is_active]
    alone = states[0] if runs and len(states) == 1 and not orphans else None
    asks_slurm = alone is not None and alone.active and alone.launcher == "slurm" and not stale
    excluded = _excluded(alone.job_id) if alone is not None and asks_slurm else None
    if json:
        rows = [details_as_json(alone, excluded)] if alone else [as_json(state) for state in states]
        print_json(rows + [orphan_as_json(lost.job, lost.run) for lost in orphans])
    elif alone:
        for line in details(alone, excluded):
            print(line)
    elif states or orphans:
        if states:
            print_table(COLUMNS, [as_row(state) for state in states])
        for lost in orphans:
            print(lost)
    else:
        say("no runs are active" if active else "no runs yet; `zslurm submit run.yaml` starts one")
    if stale:
        say(f"zslurm: {stale}")
        raise typer.Exit(Exit.SLURM_UNAVAILABLE)


def _excluded(job_id: str | None) -> str | None:
    """Ask Slurm for the nodes that a job must not use; None where it does not answer."""
    try:
        return SlurmClient(retries=Retries(attempts=1)).excluded_nodes(job_id or "")
    except ZslurmError:
        return None
