"""`zslurm status`."""

from __future__ import annotations

from typing import Annotated

import typer

from zslurm.cli.options import Json


def status(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Names, directories or job ids; default: all your runs."),
    ] = None,
    json: Json = False,
) -> None:
    """Show your runs, or everything about one.

    Example: zslurm status my-run
    """
    from zslurm.cli.output import print_json, print_table, say
    from zslurm.launch.index import find_run, known_runs
    from zslurm.launch.run_state import look_all
    from zslurm.report.status import COLUMNS, as_json, as_row, details

    chosen = [find_run(name) for name in runs] if runs else known_runs()
    states = look_all(chosen)
    if json:
        print_json([as_json(state) for state in states])
    elif runs and len(states) == 1:
        for line in details(states[0]):
            print(line)
    elif states:
        print_table(COLUMNS, [as_row(state) for state in states])
    else:
        say("no runs yet; `zslurm submit run.yaml` starts one")
