"""`zslurm aegis run|notify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zslurm.cli.heavy import Slurm, here_or_as_job
from zslurm.cli.options import Cluster, RunFile, Set

app = typer.Typer(help="The supervisor beside a run.", no_args_is_help=True)


@app.command("run")
def run_(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.", show_default=False)],
) -> None:
    """Supervise a run's job from inside it, as its batch script does.

    Example: zslurm aegis run runs/my-run
    """
    from zslurm.aegis.supervisor import supervise
    from zslurm.launch.run_dir import open_run

    raise typer.Exit(supervise(str(open_run(run_dir).path)))


@app.command()
def notify(run_file: RunFile, cluster: Cluster = None, overrides: Set = None, slurm: Slurm = False) -> None:
    """Send a sample event through the hooks of `aegis.notify`, and say whether they took it.

    With --slurm from a compute node, which may reach less of the network than this machine.

    Example: zslurm aegis notify run.yaml --slurm
    """
    from zslurm.aegis.notify_check import try_hooks
    from zslurm.launch.resolve import resolve_run

    if slurm:
        here_or_as_job(True, workers_option=None)
    for line in try_hooks(resolve_run(run_file, cluster=cluster, overrides=overrides or []).spec):
        print(line)
