"""Options that several commands share."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from zslurm.core.errors import ConfigError
from zslurm.run.index import jobs
from zslurm.train.niceness import BACKGROUND, in_slurm_job, lower_process

_HIGHEST_NICENESS = 19


def complete_runs(incomplete: str) -> list[tuple[str, str]]:
    """Names of this user's runs with their job ids; job ids, once a digit is typed, with the run's name."""
    try:
        known = jobs()
    except OSError:
        return []
    names = {job.run_dir.name: f"job {job.job_id}" for job in reversed(known)}
    ids = {job.job_id: job.run_dir.name for job in known} if incomplete[:1].isdigit() else {}
    return sorted((word, about) for word, about in (names | ids).items() if word.startswith(incomplete))


def complete_clusters(incomplete: str) -> list[str]:
    """Names of cluster profiles."""
    from zslurm.cluster.profile import LOCAL, profile_files  # YAML and pydantic, which few commands need

    try:
        names = {*profile_files(), LOCAL}
    except OSError:
        return []
    return sorted(name for name in names if name.startswith(incomplete))


RunFile = Annotated[Path, typer.Argument(metavar="RUN_FILE", help="The YAML run file.", show_default=False)]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run's name, its directory, or a job id.",
        show_default=False,
        autocompletion=complete_runs,
    ),
]
Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...",
        help="Names, directories or job ids.",
        show_default=False,
        autocompletion=complete_runs,
    ),
]
SomeRuns = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN]...",
        help="Names, directories or job ids; default: all your runs.",
        autocompletion=complete_runs,
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME",
        help="Cluster profile; `local` trains on this machine.",
        autocompletion=complete_clusters,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value, e.g. phases[0].lr=3e-4 (repeatable)."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TokenizerFile = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="FILE", help="A tokenizer.json to use instead of the weights' own."),
]
NoTokenizer = Annotated[bool, typer.Option("--no-tokenizer", help="Leave the tokenizer out.")]
RopeBase = Annotated[
    float | None,
    typer.Option(
        "--rope-base", metavar="BASE", min=1, help="Base of the rotary embedding; default: that of the run."
    ),
]
Context = Annotated[
    int | None,
    typer.Option("--context", metavar="TOKENS", min=1, help="Longest sequence; default: that of the run."),
]


Slurm = Annotated[bool, typer.Option("--slurm", help="Run it as a Slurm job of one node, and follow it.")]


def run_locally_or_as_job(slurm: bool, *, workers_option: str | None = "--workers") -> None:
    """Continue in this process, with a lower priority; or run this command line as a job, and leave.

    Raises:
        typer.Exit: the job is over; with its exit code.
        ConfigError: $ZSLURM_NICE is no niceness.
    """
    if slurm:
        from zslurm.submit.as_job import run_as_job  # all that a submission needs, as few commands do

        raise typer.Exit(run_as_job(sys.argv[1:], workers_option=workers_option))
    lower_priority()


def lower_priority() -> None:
    """Lower this process's priority to $ZSLURM_NICE (default: 10), unless it runs in a Slurm job.

    Raises:
        ConfigError: $ZSLURM_NICE is no niceness.
    """
    wanted = os.environ.get("ZSLURM_NICE", "")
    if wanted and (not re.fullmatch("[0-9]{1,2}", wanted) or int(wanted) > _HIGHEST_NICENESS):
        raise ConfigError(f"ZSLURM_NICE={wanted}: expected a niceness from 0 to {_HIGHEST_NICENESS}")
    if not in_slurm_job():
        lower_process(int(wanted) if wanted else BACKGROUND)


Options = TypeVar("Options")


def command_of(kind: type[Options], run: Callable[[Options], None]) -> Callable[..., None]:
    """Return a command of Typer whose options are the fields of the dataclass that `run` takes."""
    hints = get_type_hints(kind, include_extras=True)

    def command(**values: Any) -> None:
        run(kind(**values))

    command.__doc__ = run.__doc__
    command.__annotations__ = hints
    parameters = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(kind)  # type: ignore[arg-type]
    ]
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return command
