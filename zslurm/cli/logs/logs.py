"""`zslurm logs`: one rank's log as it is, several merged by the time of their lines, or the events of runs.

`--errors` shows what went wrong in an attempt, over all its ranks, the root first. As in the supervisor
(aegis/core/policy/outcome.py) the rank that it names is the root, ranks that complain of lost peers are its
cascade, others failed on their own later. Ranks with the same message share a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from typer import Argument, Option

from zslurm.aegis.core.root_cause import is_orderly, reports_lost_peer
from zslurm.aegis.fault_kinds import EARLY_EXIT, SLURM_CANCELLED
from zslurm.aegis.types import OF_STEP
from zslurm.checkpoint_tools.plain import shorten
from zslurm.cli.logs.events import MOST, print_events
from zslurm.cli.logs.rank_log import chosen_attempt, no_log, previous_attempt, print_logs, print_merged
from zslurm.cli.options import TIMES, Follow, Json, complete_runs, parse_since
from zslurm.cli.terminal.table import Column, print_table
from zslurm.core.console import harmless, print_json, say
from zslurm.core.errors import ConfigError
from zslurm.core.files import read_json
from zslurm.core.units import show_time
from zslurm.run.events import AttemptEnded, FaultDetected, RanksEnded
from zslurm.run.events.event import select
from zslurm.run.find import find
from zslurm.run.run_dir import AttemptDir, RunDir
from zslurm.slurm.hostlist import HostlistError, compress, compress_ranges, expand_ranges
from zslurm.train.jsonl import read_jsonl


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

    The output of one rank is printed as it is, the output of several with time and rank. With --json a line of
    JSON for each line, with its time, attempt and rank; with --events one for each event.

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


COLUMNS = (
    Column("role", "state"),
    Column("ranks", most=24),
    Column("node", most=24, drop=3),
    Column("time", drop=2),
    Column("step", drop=1),
    Column("first line", "text"),
)
_LAST_LINES = 5
_TAIL = 1 << 16

Role = Literal["root", "cascade", "failed"]
_ORDER: dict[Role, int] = {"root": 0, "failed": 1, "cascade": 2}


@dataclass(frozen=True)
class RankError:
    """Ranks that ended badly in the same way.

    Attributes:
        when: of the first of them (UNIX seconds); None if none of them could record it.
        details: the traceback, or the last lines of the log, of the first of them.
        details_are_log: whether `details` are lines of the log, which need not have to do with the end.
    """

    role: Role
    ranks: tuple[int, ...]
    nodes: str
    when: float | None
    step: int | None
    line: str
    details: str
    details_are_log: bool = False

    def as_row(self) -> list[str]:
        """Return one line of the table."""
        when = show_time(self.when, "%m-%d %H:%M:%S") if self.when else "-"
        step = str(self.step) if self.step is not None and self.step >= 0 else "-"
        return [self.role, compress_ranges(self.ranks) or "-", self.nodes, when, step, self.line]


def attempt_with_errors(run: RunDir) -> AttemptDir | None:
    """Return the newest attempt in which something went wrong; None if nothing did in any."""
    return next((attempt for attempt in reversed(run.attempt_dirs()) if rank_errors(run, attempt)), None)


def rank_errors(run: RunDir, attempt: AttemptDir) -> list[RankError]:
    """Return what went wrong in an attempt: the root, what failed independently, the cascade; each by time."""
    rows = [row for row in read_jsonl(run.events) if row.get("attempt") == attempt.number]
    ended = max(select(rows, AttemptEnded), key=lambda event: event.time, default=None)
    cause = (ended.cause if ended is not None else None) or {}
    ends = {int(end["rank"]): end for path in attempt.ranks.glob("*.json") if (end := read_json(path)) is not None}
    groups: dict[tuple[Role, str], list[dict[str, Any]]] = {}
    faults = [event for event in select(rows, FaultDetected) if event.source in OF_STEP]
    cancelled = any(event.kind == SLURM_CANCELLED for event in faults)
    unrecorded = _unrecorded(faults, list(select(rows, RanksEnded)), ends)
    for rank_end in [*_recorded(ends), *({**rank_end, "cascade": cancelled} for rank_end in unrecorded)]:
        role = _role(rank_end, cause)
        groups.setdefault((role, rank_end["line"]), []).append(rank_end)
    errors = [_group(attempt, role, line, members) for (role, line), members in groups.items()]
    if cause and not any(error.role == "root" for error in errors):  # no rank's: a node, or unknown
        line, node = str(cause["message"]), cause.get("node") or "-"
        errors.append(RankError("root", (), node, ended.time if ended is not None else None, None, line, ""))
    return sorted(errors, key=lambda error: (_ORDER[error.role], error.when or float("inf")))


def _recorded(ends: dict[int, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what ranks recorded about their end."""
    for rank, end in ends.items():
        if not is_orderly(end):
            message = f"{end['error']}: {end['message']}" if end.get("error") else f"exit code {end['exit_code']}"
            yield {**end, "rank": rank, "line": message, "cascade": reports_lost_peer(end)}


def _unrecorded(
    faults: Sequence[FaultDetected], ended: Sequence[RanksEnded], ends: dict[int, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield ranks that recorded nothing: they exited with 0 too early, or a signal ended them, as srun reports."""
    for fault in faults:
        if fault.kind == EARLY_EXIT and fault.rank is not None:
            yield {name: fault.row.get(name) for name in ("rank", "node", "line", "time", "step")}
    for event in ended:
        for rank in event.ranks:
            if rank not in ends:
                yield {"rank": rank, "node": event.node, "line": event.what, "time": event.time}


def _role(found: dict[str, Any], cause: dict[str, Any]) -> Role:
    if "rank" in cause and (found["rank"] == cause["rank"] or found["line"] == cause["message"]):
        return "root"
    return "cascade" if found.get("cascade") else "failed"


def _group(attempt: AttemptDir, role: Role, line: str, members: list[dict[str, Any]]) -> RankError:
    members.sort(key=lambda member: member["time"])
    first = members[0]
    return RankError(
        role,
        tuple(sorted(member["rank"] for member in members)),
        compress({str(member["node"]) for member in members}),
        float(first["time"]),
        first.get("step"),
        line,
        first.get("traceback") or _last_lines(attempt, first["rank"]),
        details_are_log=not first.get("traceback"),
    )


def _last_lines(attempt: AttemptDir, rank: int) -> str:
    """Return the end of a rank's log: all that is left of one that was killed."""
    try:
        with attempt.rank_log(rank).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join([line for line in lines if line.strip()][-_LAST_LINES:])


def details_of_root(errors: Sequence[RankError]) -> Iterator[str]:
    """Yield what the root rank left to read: its traceback, or the end of its log."""
    for error in errors[:1]:
        if error.role == "root" and error.details:
            where = f" on {error.nodes}" if len(error.ranks) == 1 else ""
            of_log = ", the end of its log" if error.details_are_log else ""
            yield f"rank {error.ranks[0]}{where}{of_log}:"
            yield from (f"  {line}" for line in error.details.rstrip().splitlines())
