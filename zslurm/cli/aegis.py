"""`zslurm aegis run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zslurm.cli.options import Json

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


@app.command("classify")
def classify(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILES... | -", help="Logs of one job, also packed ones.", show_default=False),
    ],
    json: Json = False,
) -> None:
    """Tell from logs what went wrong: the root, what followed from it, who is suspect and what to do.

    Works on the logs of any job: output of ranks and of srun, dmesg, journalctl, other trainers' logs.

    Example: zslurm aegis classify slurm-4242.out dmesg.txt
    """
    from zslurm.cli.output import print_json, print_table
    from zslurm.report.classify import COLUMNS, as_json, headline, rows, story_of

    story = story_of(files)
    if json:
        print_json(as_json(story))
        return
    for line in headline(story):
        print(line)
    if story.lines:
        print()
        print_table(COLUMNS, rows(story))
