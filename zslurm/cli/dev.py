"""`zslurm dev`: commands for developers of zslurm and of its kernels.

`replay` shows what was done about each attempt of a run, and what another policy would have done.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from zslurm.aegis import replay as policy
from zslurm.aegis.replay import Replayed
from zslurm.checkpoint_tools.quantities import show_duration
from zslurm.cli import kernels
from zslurm.cli.options import Json, Set
from zslurm.cli.terminal.table import Column, print_table
from zslurm.core.console import print_json
from zslurm.core.units import show_time
from zslurm.run.find import find

app = typer.Typer(help="For developers: kernels, and replay of Aegis's decisions.", no_args_is_help=True)
app.add_typer(kernels.app, name="kernels")


_COLUMNS = (
    Column("attempt"),
    Column("ended", drop=1),
    Column("outcome", "state"),
    Column("done", "text"),
    Column("policy", "text"),
    Column("differs"),
)


@app.command()
def replay(
    events: Annotated[
        str, typer.Argument(metavar="EVENTS_OR_RUN", help="An events.jsonl, or a run's name, directory or job id.")
    ],
    policy_file: Annotated[
        Path | None,
        typer.Option("--policy", metavar="FILE", help="A YAML file whose section `aegis` is laid over the run's."),
    ] = None,
    overrides: Set = None,
    json: Json = False,
) -> None:
    """Show what was done about each attempt of a run, and what the present or another policy would have done.

    The policy is the run's, changed by a file (--policy) and by --set aegis.KEY=VALUE. It gets each attempt
    with the history that the run really had.

    Example: zslurm dev replay my-run --set aegis.retries=1
    """
    events_path = Path(events)
    path = events_path if events_path.is_file() else find(events).events
    settings = policy.settings_of(path.with_name("config.json"), overrides or [], policy_file)
    replayed = policy.replay(policy.read_events(path), settings)
    if json:
        attempts = [
            {
                "attempt": replayed_attempt.attempt,
                "ended": replayed_attempt.ended,
                "outcome": replayed_attempt.outcome,
                "done": asdict(replayed_attempt.done) if replayed_attempt.done is not None else None,
                "policy": replayed_attempt.policy.fields(),
                "gives_up_after_s": replayed_attempt.gives_up_after,
                "goes_on": replayed_attempt.goes_on,
                "assumed": replayed_attempt.assumed,
                "differs": replayed_attempt.differs,
            }
            for replayed_attempt in replayed
        ]
        print_json({"events": str(path), "settings": settings.model_dump(mode="json"), "attempts": attempts})
    else:
        print_table(_COLUMNS, [_row(replayed_attempt) for replayed_attempt in replayed])


def _row(one: Replayed) -> list[str]:
    differs = "yes" if one.differs else "" if one.done is not None else "?"
    return [str(one.attempt), show_time(one.ended), one.outcome, _done(one), _policy(one), differs]


def _done(one: Replayed) -> str:
    if one.done is None:
        return "nothing was decided"
    watched = "" if one.done.mode == "act" else f" (mode {one.done.mode}: not done)"
    return f"{one.done.action}{watched}: {one.done.reason}"


def _policy(one: Replayed) -> str:
    if one.goes_on:
        return "let the attempt continue"
    early = "" if one.gives_up_after is None else f"end it after {show_duration(one.gives_up_after)}, "
    assumed = "; which nodes there were is assumed" if one.assumed else ""
    return f"{early}{one.policy.action}: {one.policy.reason}{assumed}"
