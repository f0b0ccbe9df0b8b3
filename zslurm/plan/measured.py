"""Measure in the metrics and events of a run what a plan needs: the times of its steps, saves and restarts."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from zslurm.checkpoint_tools.quantities import counted
from zslurm.core.errors import ZslurmError
from zslurm.run.events import AttemptStarted
from zslurm.run.events.event import select
from zslurm.train.jsonl import read_jsonl

_FEWEST_STEPS = 10


@dataclass(frozen=True)
class Measured:
    """Seconds, as a run had them.

    Attributes:
        step_s: of a step without stalls, on average.
        stall_s: that a save made training stand still, on average; None if nothing was saved.
        write_s: from its request until a checkpoint was committed, the median; None likewise.
        down_s: from the last step before a fault to the start of the first step after it, in the same job, the
            median: detection and restart together; None if no attempt followed another in one job.
        steps: that were measured.
        restarts: that were measured.
    """

    step_s: float | None
    stall_s: float | None
    write_s: float | None
    down_s: float | None
    steps: int
    restarts: int


def measure(run_dir: Path) -> Measured:
    """Return what the metrics and events of a run have.

    The first step of an attempt is left out of the mean: it is slower, and counts as a part of the restart.

    Raises:
        ZslurmError: there are too few steps to measure anything.
    """
    rows: list[dict[str, Any]] = []
    saves: list[dict[str, Any]] = []
    for row in read_jsonl(run_dir / "metrics.jsonl"):
        if row.get("kind") == "step" and row.get("step_time_s"):
            rows.append(row)
        elif row.get("kind") == "checkpoint" and row.get("state") == "COMMITTED":
            saves.append(row)
    usual = [row for before, row in pairwise(rows) if before["attempt"] == row["attempt"]]
    if len(usual) < _FEWEST_STEPS:
        raise ZslurmError(
            f"{run_dir}: it has {counted(len(usual), 'step')} to measure, and at least {_FEWEST_STEPS} are needed"
        )
    job_of = {
        event.attempt: event.job_id for event in select(read_jsonl(run_dir / "events.jsonl"), AttemptStarted)
    }
    step_s = statistics.fmean(row["step_time_s"] - _stall(row) for row in usual)
    downs = list(_downs(rows, job_of, step_s))
    return Measured(
        step_s,
        statistics.fmean(_number(row, "stall_s") for row in saves) if saves else None,
        statistics.median(_number(row, "seconds") for row in saves) if saves else None,
        statistics.median(downs) if downs else None,
        len(usual),
        len(downs),
    )


def _stall(row: Mapping[str, Any]) -> float:
    split = row.get("time_split_s")
    return _number(split, "checkpoint") if isinstance(split, dict) else 0.0


def _number(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _downs(rows: list[dict[str, Any]], job_of: Mapping[int, str], step_s: float) -> Iterable[float]:
    """Yield the seconds without training between two attempts of one job."""
    for before, row in pairwise(rows):
        first, second = before["attempt"], row["attempt"]
        if first != second and job_of.get(first) is not None and job_of.get(first) == job_of.get(second):
            yield max(0.0, row["time"] - before["time"] - step_s)
