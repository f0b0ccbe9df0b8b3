"""Read the answers of squeue and sacct about jobs into records.

Both are asked for named fields between control characters that no job name, path or comment holds in practice, so
that spaces, commas, pipes and line breaks in them do no harm. scontrol's `Key=Value` lines are not used for this:
a job called `x JobState=FAILED` would read as failed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from zslurm.core.errors import SlurmRefused
from zslurm.slurm.states import JobState, parse_state

FIELD_END = "\x1f"
RECORD_END = "\x1e"

QUEUE_FIELDS = (
    "JobArrayID State Reason UserName NodeList NumNodes RestartCnt exit_code "
    "SubmitTime StartTime EndTime TimeLimit Partition Name Comment WorkDir"
).split()
_STEP = re.compile(r"^StepId=(\S+) .*? Name=(.*) Network=", re.MULTILINE)
NO_STEPS = re.compile(r"Job step \S+ not found")
"""What scontrol says, with exit code 1, of a job that has no steps."""
_NO_SUCH_FIELD = re.compile(r"Invalid job format specification: (\w+)")


def queue_format(fields: Sequence[str] = QUEUE_FIELDS) -> str:
    """Return the fields for squeue --Format.

    The separators follow them as suffixes, which squeue knows since 19.05.
    """
    # `:0` is the field's full length: without it, 20 characters are shown.
    return ",".join(f"{field}:0{RECORD_END if field == fields[-1] else FIELD_END}" for field in fields)


QUEUE_FORMAT = queue_format()
"""For squeue --Format, if squeue knows every field."""

# Of sacct, with their names in squeue.
_HISTORY_FIELDS = dict(
    zip(
        "JobID State Reason User NodeList NNodes ExitCode Submit Start End Timelimit Partition JobName Comment "
        "WorkDir".split(),
        (field for field in QUEUE_FIELDS if field != "RestartCnt"),
        strict=True,
    )
)
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
    """For a waiting job, the expected start if the scheduler has planned it."""
    end_time: datetime | None
    """For a running job, when its time limit ends it."""
    time_limit: timedelta | None
    """None is no limit."""
    partition: str
    work_dir: str
    comment: str


def unknown_fields(stderr: str) -> set[str]:
    """Return the fields that this squeue does not know, in lower case, by its own complaint."""
    return {match[1].lower() for match in _NO_SUCH_FIELD.finditer(stderr)}


def parse_queue(text: str, fields: Sequence[str] = QUEUE_FIELDS) -> dict[str, JobRecord]:
    """Read the answer of `squeue --noheader --Format=QUEUE_FORMAT`, by job id.

    `fields` are those that were asked for, if squeue does not know them all; the others are empty.

    Raises:
        SlurmRefused: the fields are not the ones asked for (an unknown one is left out by squeue).
    """
    records = [_record(values) for values in split_records(text, fields, "squeue")]
    return {record.job_id: record for record in records}


def parse_steps(text: str) -> dict[str, str]:
    """Read the answer of `scontrol --oneliner show step JOB`: step id -> step name."""
    return dict(_STEP.findall(text))


def split_records(text: str, fields: Collection[str], program: str) -> Iterator[dict[str, str]]:
    """Yield the values of each record in the answer to a `queue_format`, by field.

    Raises:
        SlurmRefused: the fields are not the ones asked for.
    """
    for record in text.split(RECORD_END):
        if record.strip():
            yield _named(record.removeprefix("\n").split(FIELD_END), fields, program)


def parse_history(text: str) -> dict[str, list[JobRecord]]:
    """Read the answer of `sacct -X -D --parsable2 --format=HISTORY_FORMAT`: the runs of each job, oldest first.

    Raises:
        SlurmRefused: the fields are not the ones asked for.
    """
    runs: dict[str, list[JobRecord]] = {}
    for line in _history_lines(text):
        values = _named(line.split(FIELD_END), _HISTORY_FIELDS, "sacct")
        values = {_HISTORY_FIELDS[name]: value for name, value in values.items()}
        earlier = runs.setdefault(values["JobArrayID"], [])
        earlier.append(_record(values | {"RestartCnt": str(len(earlier))}))
    return runs


def _record(values: Mapping[str, str]) -> JobRecord:
    """Return the record of squeue's fields; one that is not there is empty."""
    fields_of_row = dict.fromkeys(QUEUE_FIELDS, "") | dict(values)
    return JobRecord(
        job_id=fields_of_row["JobArrayID"],
        name=fields_of_row["Name"],
        user=fields_of_row["UserName"],
        state=parse_state(fields_of_row["State"]),
        reason=_or_empty(fields_of_row["Reason"]),
        nodes=_or_empty(fields_of_row["NodeList"]),
        n_nodes=_number(fields_of_row["NumNodes"]),
        restarts=_number(fields_of_row["RestartCnt"]),
        exit_code=_exit_code(fields_of_row["exit_code"]),
        submit_time=parse_time(fields_of_row["SubmitTime"]),
        start_time=parse_time(fields_of_row["StartTime"]),
        end_time=parse_time(fields_of_row["EndTime"]),
        time_limit=parse_duration(fields_of_row["TimeLimit"]),
        partition=fields_of_row["Partition"],
        work_dir=fields_of_row["WorkDir"],
        comment=_or_empty(fields_of_row["Comment"]),
    )


def parse_time(text: str) -> datetime | None:
    """Return a time of a command that ran with TZ=UTC and SLURM_TIME_FORMAT=standard.

    None for N/A and its like.
    """
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=UTC)
    except ValueError:
        return None


def parse_duration(text: str) -> timedelta | None:
    """`1-02:03:04`, `02:03:04` or `03:04` (minutes, seconds); None for UNLIMITED, Partition_Limit and the like."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(digits.isdecimal() for digits in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        return None
    numbers = [int(digits) for digits in parts]
    # With days, the clock is read from hours on; without, from its end.
    hours, minutes, seconds = numbers + [0] * (3 - len(numbers)) if dash else [0] * (3 - len(numbers)) + numbers
    return timedelta(days=int(days or 0), hours=hours, minutes=minutes, seconds=seconds)


def time_limit(text: str) -> timedelta | None:
    """Return a time limit as sbatch takes it: as `parse_duration`, but a bare number is minutes."""
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


def _named(values: Sequence[str], fields: Collection[str], program: str) -> dict[str, str]:
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
