"""`zslurm aegis`: the supervisor, which scripts start, and a trial of its notifications."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zslurm.aegis.notify.hook_check import try_hooks
from zslurm.aegis.supervisor.supervisor import supervise
from zslurm.cli.options import Cluster, RunFile, Set, Slurm, run_locally_or_as_job
from zslurm.run.run_dir import open_run
from zslurm.submit.resolve import resolve_run

app = typer.Typer(help="The supervisor of a run: try its notifications.", no_args_is_help=True)


@app.command(hidden=True)
def run(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.")],
) -> None:
    """Supervise a run's job from inside it, as its batch script does.

    Example: zslurm aegis run runs/my-run
    """
    raise typer.Exit(supervise(str(open_run(run_dir).path)))


@app.command()
def notify(run_file: RunFile, cluster: Cluster = None, overrides: Set = None, slurm: Slurm = False) -> None:
    """Send a sample event through the hooks of `aegis.notify`. Prints whether each of them took it.

    With --slurm from a compute node, which may reach less of the network than this machine.

    Example: zslurm aegis notify run.yaml --slurm
    """
    if slurm:
        run_locally_or_as_job(True, workers_option=None)
    for line in try_hooks(resolve_run(run_file, cluster=cluster, overrides=overrides or []).spec):
        print(line)
