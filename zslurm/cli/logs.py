"""`zslurm logs`."""

from __future__ import annotations

from typing import Annotated

import typer

from zslurm.cli.options import Run


def logs(
    run: Run,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on printing until the run has ended.")
    ] = False,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Which rank's output.")] = 0,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="Which attempt; default: the newest.")
    ] = None,
    supervisor: Annotated[
        bool, typer.Option("--supervisor", help="The job's own output (batch script and supervisor) instead.")
    ] = False,
    lines: Annotated[int | None, typer.Option("-n", "--lines", min=0, help="Only the last N lines.")] = None,
) -> None:
    """Print a rank's output.

    Example: zslurm logs -f my-run --rank 3
    """
    from zslurm.launch.index import find_run
    from zslurm.report.logs import print_logs

    print_logs(find_run(run), rank=rank, attempt=attempt, supervisor=supervisor, last_lines=lines, follow=follow)
