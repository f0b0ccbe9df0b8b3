"""`zslurm logs`: one rank's log as it is, several merged by the time of their lines, or the events of runs."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from zslurm.checkpoint_tools.plain import shorten
from zslurm.cli.logs.events import MOST, print_events
from zslurm.cli.logs.log_errors import COLUMNS, attempt_with_errors, details_of_root, rank_errors
from zslurm.cli.logs.merged_logs import print_merged
from zslurm.cli.logs.rank_log import chosen_attempt, no_log, previous_attempt, print_logs
from zslurm.cli.options import TIMES, Follow, Json, complete_runs, parse_since
from zslurm.cli.terminal.table import print_table
from zslurm.core.console import harmless, print_json, say
from zslurm.core.errors import ConfigError
from zslurm.run.find import find
from zslurm.run.run_dir import RunDir
from zslurm.slurm.hostlist import HostlistError, expand_ranges


def logs(
    runs: Annotated[
        list[str] | None,
        Argument(
            metavar="[RUN]...",
            help="A run's name, its directory or a job id; with --events several, or none for all of yours.",
            autocompletion=complete_runs,
        ),
    ] = None,
    follow: Follow = False,
    rank: Annotated[
        str, Option(metavar="RANKS", help="Whose output: 3, or several such as 0,8-15 or all, merged by time.")
    ] = "0",
    attempt: Annotated[
        int | None, Option(min=1, help="Which attempt; default: the newest (with --errors: that has errors).")
    ] = None,
    errors: Annotated[
        bool, Option("--errors", help="What went wrong, over all ranks: the root and its traceback first.")
    ] = False,
    supervisor: Annotated[
        bool, Option("--supervisor", help="The job's own output (batch script and supervisor) instead.")
    ] = False,
    events: Annotated[
        bool, Option("--events", help="What happened to runs, and who did what; without RUN: to all of yours.")
    ] = False,
    every: Annotated[
        bool, Option("--all", help=f"With --events: all of them, not only the last {MOST:,}.")
    ] = False,
    tail: Annotated[int | None, Option("-n", "--tail", metavar="N", min=0, help="Only the last N lines.")] = None,
    since: Annotated[str | None, Option(metavar="TIME", help=f"Only lines or events since: {TIMES}.")] = None,
    previous: Annotated[bool, Option("--previous", help="The attempt before the newest.")] = False,
    json: Json = False,
) -> None:
    """Print the output of ranks, or what happened to runs.

    The output of one rank is printed as it is, that of several with time and rank. With --json a line of JSON for
    each line, with its time, attempt and rank; with --events one for each event.

    Example: zslurm logs -f my-run --rank 0,8-15

    Example: zslurm logs --events my-run --since 12h
    """
    if events:
        if rank != "0" or attempt is not None or errors or supervisor or previous:
            raise ConfigError("--events: leave --rank, --attempt, --previous, --errors and --supervisor out")
        print_events(runs or [], follow=follow, tail=tail, every=every, since=since, json=json)
        return
    if every:
        raise ConfigError("--all shows all events; add --events")
    if not runs or len(runs) > 1:
        raise ConfigError("name one run: zslurm logs RUN; with --events several, or none for all of yours")
    ranks = parse_ranks(rank)
    earliest = None if since is None else parse_since(since)
    run_dir = find(runs[0])
    if previous:
        if attempt is not None or follow or supervisor:
            raise ConfigError("--previous is an attempt that is over; leave --attempt, -f and --supervisor out")
        attempt = previous_attempt(run_dir).number
    if errors:
        if follow or supervisor:
            raise ConfigError("--errors looks at an attempt as it is; leave -f and --supervisor out")
        _print_errors(run=run_dir, attempt=attempt, as_json=json)
    elif supervisor and earliest is not None:
        raise ConfigError("--supervisor: the job's own output has no times; leave --since out")
    elif supervisor and json:
        raise ConfigError("--supervisor: the job's own output has no ranks and no times; leave --json out")
    elif supervisor or (ranks is not None and len(ranks) == 1 and not json):
        rank_shown = ranks[0] if ranks else 0
        print_logs(
            run_dir,
            rank=rank_shown,
            attempt=attempt,
            supervisor=supervisor,
            last_lines=tail,
            since=earliest,
            follow=follow,
        )
    else:
        print_merged(
            run_dir, ranks=ranks, attempt=attempt, last_lines=tail, since=earliest, follow=follow, as_json=json
        )


def _print_errors(run: RunDir, attempt: int | None, as_json: bool) -> None:
    newest = chosen_attempt(run, attempt)
    if newest is None:
        raise no_log(run)
    chosen = attempt_with_errors(run) or newest if attempt is None else newest
    errors = rank_errors(run, chosen)
    if as_json:
        print_json([vars(error) | {"attempt": chosen.number} for error in errors])
    elif errors:
        if chosen != newest:
            say(f"{run.name}: attempt {chosen.number}; no rank of a later one recorded an error")
        print_table(COLUMNS, [error.as_row() for error in errors])
        for line in details_of_root(errors):
            print(harmless(line))
    else:
        which = "any attempt" if attempt is None and chosen.number > 1 else f"attempt {chosen.number}"
        say(f"{run.name}: no rank of {which} recorded an error")


def parse_ranks(text: str) -> list[int] | None:
    """Return the ranks of `0,8-15`, each once; None for `all`.

    Raises:
        ConfigError: neither.
    """
    if text.strip() == "all":
        return None
    try:
        return sorted(set(expand_ranges(text)))
    except HostlistError as error:
        raise ConfigError(f"--rank {shorten(text)}: expected ranks such as 0,8-15, or `all`") from error
