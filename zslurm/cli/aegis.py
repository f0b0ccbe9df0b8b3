"""`zslurm aegis run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
