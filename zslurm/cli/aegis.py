"""`zslurm aegis run`, `notify`, `replay`, `classify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zslurm.cli.heavy import Slurm, here_or_as_job
from zslurm.cli.options import Cluster, Json, RunFile, Set

app = typer.Typer(help="The supervisor beside a run: what it does, and would do.", no_args_is_help=True)


@app.command("run")
def run_(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.", show_default=False)],
) -> None:
    """Supervise a run's job from inside it, as its batch script does.

    Example: zslurm aegis run runs/my-run
    """
    from zslurm.aegis.supervisor.supervisor import supervise
    from zslurm.run.run_dir import open_run

    raise typer.Exit(supervise(str(open_run(run_dir).path)))


@app.command()
def notify(run_file: RunFile, cluster: Cluster = None, overrides: Set = None, slurm: Slurm = False) -> None:
    """Send a sample event through the hooks of `aegis.notify`, and say whether they took it.

    With --slurm from a compute node, which may reach less of the network than this machine.

    Example: zslurm aegis notify run.yaml --slurm
    """
    from zslurm.aegis.notify.check import try_hooks
    from zslurm.submit.resolve import resolve_run

    if slurm:
        here_or_as_job(True, workers_option=None)
    for line in try_hooks(resolve_run(run_file, cluster=cluster, overrides=overrides or []).spec):
        print(line)


@app.command()
def replay(
    events: Annotated[
        str,
        typer.Argument(
            metavar="EVENTS_OR_RUN",
            help="An events.jsonl, or a run's name, directory or job id.",
            show_default=False,
        ),
    ],
    overrides: Set = None,
    json: Json = False,
) -> None:
    """Show what was done about each attempt of a run, and what another policy would have done.

    The policy is that of the run, changed by --set aegis.KEY=VALUE. Each attempt is judged with the history that
    it really had.

    Example: zslurm aegis replay my-run --set aegis.retries=1
    """
    from zslurm.aegis.policy.replay import read_events, replay, settings_of
    from zslurm.core.console import print_json, print_table
    from zslurm.report.replay import COLUMNS, as_json, as_row
    from zslurm.run.find import find

    given = Path(events)
    path = given if given.is_file() else find(events).events
    settings = settings_of(path.with_name("config.json"), overrides or [])
    found = replay(read_events(path), settings)
    if json:
        print_json(as_json(path, settings, found))
    else:
        print_table(COLUMNS, [as_row(one) for one in found])


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
    from zslurm.core.console import print_json, print_table
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
