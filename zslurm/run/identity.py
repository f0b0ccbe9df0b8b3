"""Whose job a submission is, after a run directory was copied or moved.

Each submission records the directory that its job works in: its path, and its inode. A directory that was moved
(`mv`) keeps the inode and its jobs. A copy (`cp -a`) takes the records along, but the jobs, process ids and locks
in them are the original's: a copy never acts on them. Submitted under its new name, it continues from the copied
checkpoints as a run with its own jobs.

    the recorded path leads here                                    the job is ours
    same inode, and the recorded path does not hold this run        moved: the job is ours
    anything else                                                   a copy: the job is the original's

A directory that is moved to another file system gets a new inode, so it counts as a copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

from zslurm.core.files import read_json
from zslurm.run.events import Submitted, SuccessorSubmitted
from zslurm.run.events.event import select
from zslurm.run.run_dir import RunDir
from zslurm.train.jsonl import read_jsonl


class RunLocation(TypedDict):
    """The fields of a submission that tell which directory its job works in."""

    run_dir: str
    inode: int


def location(run: RunDir) -> RunLocation:
    """Return the fields that a submission records.

    The path and the inode of the directory that its job works in.
    """
    return {"run_dir": str(run.path.absolute()), "inode": run.path.stat().st_ino}


def original_of(run: RunDir, submission: Mapping[str, Any]) -> Path | None:
    """Return the directory that a submission's job works in, if `run`, which records it, is a copy of it.

    None if that directory is `run` itself.
    """
    recorded = _recorded_dir(run, submission)
    if recorded is None or recorded == str(run.path.absolute()):
        return None
    original = Path(recorded)
    with contextlib.suppress(OSError):
        if original.samefile(run.path):
            return None
    with contextlib.suppress(OSError):
        same = submission.get("inode", run.path.stat().st_ino) == run.path.stat().st_ino
        if same and not _holds(RunDir(original), submission):
            return None
    return original


def _recorded_dir(run: RunDir, submission: Mapping[str, Any]) -> str | None:
    """Return the directory that a submission's job works in; None if nothing names it.

    Versions before this one recorded none, and rows of successors have none: then it is the one in config.json,
    which the same submission wrote.
    """
    if isinstance(recorded := submission.get("run_dir"), str):
        return recorded
    section = (read_json(run.config) or {}).get("run")
    names = (section.get("runs_dir"), section.get("name")) if isinstance(section, dict) else ()
    if not names or not all(isinstance(name, str) for name in names):
        return None
    path = Path(*map(str, names))
    return str(path) if path.is_absolute() else None


def _holds(run: RunDir, submission: Mapping[str, Any]) -> bool:
    """Return whether this submission is among those of `run`."""
    with contextlib.suppress(OSError):
        return any(row == submission for row in read_jsonl(run.submissions))
    return False


def job_ids(run: RunDir) -> set[str]:
    """Return every job that a run was ever submitted as, including the jobs of a run that it is a copy of."""
    return {job_id for job_id, _ in submitted_jobs(run)}


def submitted_jobs(run: RunDir) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each job that a run was submitted as, and the row of submissions.jsonl that records it."""
    for event in select(read_jsonl(run.submissions), Submitted, SuccessorSubmitted):
        job_id = event.successor if isinstance(event, SuccessorSubmitted) else event.job_id
        if job_id:
            yield job_id, event.row


def forget_original(run: RunDir) -> None:
    """Remove from a copy what names processes of its original, so that nothing here can reach them.

    Raises:
        OSError: a file cannot be removed.
    """
    stale = [run.supervisor, run.path / "agent.json", run.checkpoints / ".lock", *run.path.glob("deputy-*.json")]
    stale += [attempt.step_process for attempt in run.attempt_dirs()]
    for path in stale:
        path.unlink(missing_ok=True)
