"""`zslurm exec`."""

from __future__ import annotations

from typing import Annotated

import typer

from zslurm.cli.options import Run
from zslurm.job.exec_command import exec_on_nodes
from zslurm.run.find import find


def exec_command(
    run: Run,
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="Program and arguments.", show_default=False)
    ],
    node: Annotated[
        str | None, typer.Option("--node", metavar="NODES", help="Only on these nodes of the job; a hostlist.")
    ] = None,
) -> None:
    """Run a command once on each node of a running run, beside its ranks.

    Its exit code is the worst of them.

    Example: zslurm exec my-run --node node3 -- rocm-smi --showuse
    """
    raise typer.Exit(exec_on_nodes(find(run), command, node))
