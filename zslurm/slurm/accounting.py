"""Read what Slurm's accounting (sacct) knows of the resources that the steps of a job used.

Accounting is optional on a site, and so is each figure in it: `JobAcctGatherType` measures processor time and
memory, `AcctGatherEnergyType` energy. A figure that was not gathered is 0 here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from zslurm.core.errors import SlurmRefused
from zslurm.slurm.jobs import FIELD_END

FIELDS = "JobID JobName ElapsedRaw TotalCPU MaxRSS NTasks AllocCPUS NNodes ConsumedEnergyRaw".split()
FORMAT = ",".join(FIELDS)
"""For sacct --format, with --noconvert."""

_CPU_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+(?:\.\d+)?)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)")
_NOT_GATHERED = (1 << 32, 1 << 64)
"""What Slurm stores for energy that it cannot read, less 2: NO_VAL and NO_VAL64."""


@dataclass(frozen=True)
class StepUsage:
    """What one step of a job used; a job that was requeued has steps of the same name again.

    Attributes:
        job_id: the job, `123` or `123_4`.
        name: the step's, or the job's if `step` is empty.
        step: `0`, `1`, `batch`, `extern`; empty for the whole allocation.
        elapsed_s: wall time.
        cpu_s: processor time of all tasks, user and system.
        max_rss: bytes of the largest task.
        tasks: how many there were.
        cores: of its allocation.
        nodes: of its allocation.
        energy_j: joules.
    """

    job_id: str
    name: str
    step: str
    elapsed_s: float
    cpu_s: float
    max_rss: int
    tasks: int
    cores: int
    nodes: int
    energy_j: float


def parse_usage(text: str) -> list[StepUsage]:
    """Return the records of `sacct --duplicates --noconvert --parsable2 --format=FORMAT`, in its order.

    Raises:
        SlurmRefused: the fields are not the ones asked for.
    """
    return list(_records(text))


def _records(text: str) -> Iterator[StepUsage]:
    for line in text.splitlines():
        if not line.strip():
            continue
        values = line.split(FIELD_END)
        if len(values) != len(FIELDS):
            shown = line.replace(FIELD_END, "|")
            raise SlurmRefused(f"sacct: expected {len(FIELDS)} fields, got {len(values)}: {shown[:200]}")
        fields_of_row = dict(zip(FIELDS, values, strict=True))
        job_id, _, step = fields_of_row["JobID"].partition(".")
        yield StepUsage(
            job_id=job_id,
            name=fields_of_row["JobName"],
            step=step,
            elapsed_s=_number(fields_of_row["ElapsedRaw"]),
            cpu_s=_seconds(fields_of_row["TotalCPU"]),
            max_rss=_bytes(fields_of_row["MaxRSS"]),
            tasks=int(_number(fields_of_row["NTasks"])),
            cores=int(_number(fields_of_row["AllocCPUS"])),
            nodes=int(_number(fields_of_row["NNodes"])),
            energy_j=_energy(fields_of_row["ConsumedEnergyRaw"]),
        )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _energy(text: str) -> float:
    joules = _number(text)
    return 0.0 if any(no_value - 2 <= joules <= no_value for no_value in _NOT_GATHERED) else joules


def _seconds(text: str) -> float:
    """Return the seconds of sacct's `[DD-[HH:]]MM:SS[.mmm]`; 0 if it is something else."""
    match = _CPU_TIME.fullmatch(text)
    if match is None:
        return 0.0
    days, hours, minutes = (int(match[name] or 0) for name in ("days", "hours", "minutes"))
    return 86400 * days + 3600 * hours + 60 * minutes + float(match["seconds"])


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text)
    return int(float(match[1]) * (1 << 10 * "_KMGTP".index(match[2] or "_"))) if match else 0
