"""`zslurm logs --errors`: what went wrong in an attempt, over all its ranks, the root first.

As in the supervisor (aegis/core/policy/outcome.py): the rank that it names is the root, ranks that complain
of lost peers are its cascade, others failed on their own later. Ranks with the same message share a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zslurm.aegis.core.root_cause import is_orderly, reports_lost_peer
from zslurm.aegis.fault_kinds import EARLY_EXIT, SLURM_CANCELLED
from zslurm.aegis.types import OF_STEP
from zslurm.cli.terminal.table import Column
from zslurm.core.files import read_json
from zslurm.core.units import show_time
from zslurm.run.events import AttemptEnded, FaultDetected, RanksEnded
from zslurm.run.events.event import select
from zslurm.run.run_dir import AttemptDir, RunDir
from zslurm.slurm.hostlist import compress, compress_ranges
from zslurm.train.jsonl import read_jsonl

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
