"""What squeue and sacct say about jobs, as records.

Both are asked for named fields between control characters that no job name, path or comment holds in practice, so
that spaces, commas, pipes and line breaks in them do no harm. scontrol's `Key=Value` lines are not used for this:
a job called `x JobState=FAILED` would read as failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from zslurm.core.errors import SlurmRefused
from zslurm.slurm.states import JobState, parse_state

FIELD_END = "\x1f"
RECORD_END = "\x1e"

QUEUE_FIELDS = (
    "JobArrayID State Reason UserName NodeList NumNodes RestartCnt exit_code "
    "SubmitTime StartTime EndTime TimeLimit Partition Name Comment WorkDir"
).split()
_NO_SUCH_FIELD = re.compile(r"Invalid job format specification: (\w+)")


def queue_format(fields: Sequence[str] = QUEUE_FIELDS) -> str:
    """The fields for squeue --Format; the separators follow them as suffixes, which squeue knows since 19.05."""
    # `:0` is squeue's word for the field's own length: without it, 20 characters are shown.
    return ",".join(f"{field}:0{RECORD_END if field == fields[-1] else FIELD_END}" for field in fields)


QUEUE_FORMAT = queue_format()
"""For squeue --Format, where squeue knows every field."""

_HISTORY_FIELDS = (
    "JobID State Reason User NodeList NNodes ExitCode Submit Start End Timelimit Partition JobName Comment WorkDir"
).split()
HISTORY_FORMAT = ",".join(_HISTORY_FIELDS)
"""For sacct --format; records end with a line break there."""

_NOTHING = {"", "(null)", "N/A", "None", "None assigned", "Unknown", "Invalid"}


class ExitCode(NamedTuple):
    """How a job ended: the batch script's exit code, or the signal that killed it."""

    code: int
    signal: int


@dataclass(frozen=True)
class JobRecord:
    """One job, or one run of a job that was requeued. Times are in UTC; None is what Slurm does not know (yet)."""

    job_id: str
    name: str
    user: str
    state: JobState
    reason: str
    """Why it waits or failed, in Slurm's word; empty if there is none."""
    nodes: str
    """Its nodes as a hostlist; empty while it has none."""
    n_nodes: int
    restarts: int
    exit_code: ExitCode
    submit_time: datetime | None
    start_time: datetime | None
    """For a waiting job, the expected start where the scheduler has planned it."""
    end_time: datetime | None
    """For a running job, when its time limit ends it."""
    time_limit: timedelta | None
    """None is no limit."""
    partition: str
    work_dir: str
    comment: str

    def as_json(self) -> dict[str, Any]:
        """The record for a file; `from_json` reads it."""
        times = {name: getattr(self, name) for name in ("submit_time", "start_time", "end_time")}
        shown = {name: when.isoformat() if when else None for name, when in times.items()}
        limit = self.time_limit.total_seconds() if self.time_limit is not None else None
        return asdict(self) | shown | {"state": str(self.state), "time_limit": limit}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> JobRecord:
        """The record in what `as_json` gave.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        times = {name: body[name] for name in ("submit_time", "start_time", "end_time")}
        read = {name: datetime.fromisoformat(text) if text else None for name, text in times.items()}
        limit = body["time_limit"]
        fields: dict[str, Any] = {**body, **read, "state": JobState(body["state"])}
        fields["time_limit"] = None if limit is None else timedelta(seconds=limit)
        return cls(**fields | {"exit_code": ExitCode(*body["exit_code"])})


def unknown_fields(stderr: str) -> set[str]:
    """The fields that squeue of an older or newer Slurm does not know, in lower case, by its own complaint."""
    return {match[1].lower() for match in _NO_SUCH_FIELD.finditer(stderr)}


def parse_queue(text: str, fields: Sequence[str] = QUEUE_FIELDS) -> dict[str, JobRecord]:
    """The answer of `squeue --noheader --Format=QUEUE_FORMAT`, by job id.

    Args:
        text: the answer.
        fields: what was asked for, where squeue does not know them all; the others are empty in the records.

    Raises:
        SlurmRefused: the fields are not the ones asked for (an unknown one is left out by squeue).
    """
    nothing = dict.fromkeys(QUEUE_FIELDS, "")
    records: dict[str, JobRecord] = {}
    for line in text.split(RECORD_END):
        if line.strip():
            values = nothing | _named(line.removeprefix("\n").split(FIELD_END), fields, "squeue")
            record = JobRecord(
                job_id=values["JobArrayID"],
                name=values["Name"],
                user=values["UserName"],
                state=parse_state(values["State"]),
                reason=_or_empty(values["Reason"]),
                nodes=_or_empty(values["NodeList"]),
                n_nodes=_number(values["NumNodes"]),
                restarts=_number(values["RestartCnt"]),
                exit_code=_exit_code(values["exit_code"]),
                submit_time=parse_time(values["SubmitTime"]),
                start_time=parse_time(values["StartTime"]),
                end_time=parse_time(values["EndTime"]),
                time_limit=parse_duration(values["TimeLimit"]),
                partition=values["Partition"],
                work_dir=values["WorkDir"],
                comment=_or_empty(values["Comment"]),
            )
            records[record.job_id] = record
    return records


def parse_history(text: str) -> dict[str, list[JobRecord]]:
    """The answer of `sacct -X -D --parsable2 --format=HISTORY_FORMAT`: the runs of each job, oldest first.

    Raises:
        SlurmRefused: the fields are not the ones asked for.
    """
    runs: dict[str, list[JobRecord]] = {}
    for line in _history_lines(text):
        values = _named(line.split(FIELD_END), _HISTORY_FIELDS, "sacct")
        earlier = runs.setdefault(values["JobID"], [])
        earlier.append(
            JobRecord(
                job_id=values["JobID"],
                name=values["JobName"],
                user=values["User"],
                state=parse_state(values["State"]),
                reason=_or_empty(values["Reason"]),
                nodes=_or_empty(values["NodeList"]),
                n_nodes=_number(values["NNodes"]),
                restarts=len(earlier),
                exit_code=_exit_code(values["ExitCode"]),
                submit_time=parse_time(values["Submit"]),
                start_time=parse_time(values["Start"]),
                end_time=parse_time(values["End"]),
                time_limit=parse_duration(values["Timelimit"]),
                partition=values["Partition"],
                work_dir=values["WorkDir"],
                comment=_or_empty(values["Comment"]),
            )
        )
    return runs


def parse_time(text: str) -> datetime | None:
    """A time of a command that ran with TZ=UTC and SLURM_TIME_FORMAT=standard; None for N/A and its like."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=UTC)
    except ValueError:
        return None


def parse_duration(text: str) -> timedelta | None:
    """`1-02:03:04`, `02:03:04` or `03:04` (minutes, seconds); None for UNLIMITED, Partition_Limit and the like."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    # With days, the clock is read from hours on; without, from its end.
    hours, minutes, seconds = numbers + [0] * (3 - len(numbers)) if dash else [0] * (3 - len(numbers)) + numbers
    return timedelta(days=int(days or 0), hours=hours, minutes=minutes, seconds=seconds)


def time_limit(text: str) -> timedelta | None:
    """A time limit as sbatch takes it: as `parse_duration`, but a number alone is minutes."""
    return timedelta(minutes=int(text)) if text.isdecimal() else parse_duration(text)


def _history_lines(text: str) -> Iterator[str]:
    """Return the records of sacct; a comment or path with a line break continues its record on the next line."""
    pending = ""
    for line in text.split("\n"):
        pending = f"{pending}\n{line}" if pending else line
        if pending.count(FIELD_END) >= len(_HISTORY_FIELDS) - 1:
            yield pending
            pending = ""
    if pending.strip():
        yield pending


def _named(values: Sequence[str], fields: Sequence[str], program: str) -> dict[str, str]:
    if len(values) != len(fields):
        shown = FIELD_END.join(values).replace(FIELD_END, "|")
        raise SlurmRefused(f"{program}: expected {len(fields)} fields, got {len(values)}: {shown[:200]}")
    return dict(zip(fields, values, strict=True))


def _or_empty(text: str) -> str:
    return "" if text in _NOTHING else text


def _number(text: str) -> int:
    # A pending job's node count may be a range, `4-8`: the least is what it needs.
    digits = text.partition("-")[0]
    return int(digits) if digits.isdecimal() else 0


def _exit_code(text: str) -> ExitCode:
    """Parse an exit code: sacct writes CODE:SIGNAL, squeue the wait status as wait(2) gives it."""
    code, colon, signal = text.partition(":")
    if colon:
        return ExitCode(_number(code), _number(signal))
    status = _number(text)
    return ExitCode(status >> 8, status & 0x7F)
