"""The per-user index of jobs: which run directory a job id belongs to.

One small JSON file for each submission below $XDG_STATE_HOME/zslurm/jobs (default ~/.local/state): written by
rename, never changed, so any number of login nodes may write and read at the same time without a lock.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from zslurm.core.errors import NotFound, ZslurmError
from zslurm.core.files import read_json, write_atomically
from zslurm.core.paths import LONGEST_NAME, expand, home
from zslurm.run.identity import job_ids, original_of, submitted_jobs
from zslurm.run.run_dir import RunDir
from zslurm.train.jsonl import read_jsonl

_LONGEST_NAME_OF_A_FILE = 255
_LOCAL = re.compile(r"local-(\d+)")


@dataclass(frozen=True)
class IndexedJob:
    """One submission of a run."""

    job_id: str
    run_dir: Path
    cluster: str
    launcher: str
    submitted: float


def state_dir() -> Path:
    """Return the directory of this user's state."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else home() / ".local" / "state") / "zslurm"


def _folder() -> Path:
    folder = state_dir() / "jobs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ZslurmError(
            f"{folder}: cannot be made: {error.strerror}; set XDG_STATE_HOME to a directory of yours"
        ) from error
    return folder


def claim_local_id(run: RunDir) -> str:
    """Return a job id `local-N` that no other local submission of this user gets, and no job of `run` ever had.

    The index counts for one home only. The run's own files name their jobs too: a user with two homes, or with
    none that can be written, must not get a number in them twice. Call it under the submit lock.
    """
    number = 1 + max((int(match[1]) for name in _names_of_jobs(run) if (match := _LOCAL.search(name))), default=0)
    try:
        folder = _folder()
        used = [int(match[1]) for path in folder.iterdir() if (match := _LOCAL.match(path.name))]
    except (OSError, ZslurmError):  # `record` fails too, and the submission notes it
        return f"local-{number}"
    number = max(number, max(used, default=0) + 1)
    while True:
        try:
            (folder / f"local-{number}.json").touch(exist_ok=False)
        except FileExistsError:
            number += 1
        except OSError:
            return f"local-{number}"
        else:
            return f"local-{number}"


def _names_of_jobs(run: RunDir) -> set[str]:
    """Return every text in a run's files that may hold the id of one of its jobs."""
    names = {path.name for folder in (run.path, run.logs) for path in folder.glob("job-*")}
    return names | job_ids(run) | {str(row.get("job_id")) for row in read_jsonl(run.events)}


def record(job: IndexedJob) -> None:
    """Add a submission.

    Raises:
        ZslurmError: the index cannot be written.
    """
    name = job.job_id if job.launcher == "local" else f"{job.cluster}-{job.job_id}"
    path = _folder() / f"{name}.json"
    try:
        write_atomically(path, json.dumps(asdict(job), default=str) + "\n")
    except OSError as error:
        raise ZslurmError(
            f"{path}: cannot be written: {error.strerror}; set XDG_STATE_HOME to a directory of yours"
        ) from error


def _read(path: Path) -> IndexedJob | None:
    """Return an entry; None for an id that is being claimed this moment, and for a damaged one."""
    body = read_json(path) or {}
    try:
        names = str(body["cluster"]), str(body["launcher"])
        return IndexedJob(str(body["job_id"]), Path(body["run_dir"]), *names, float(body["submitted"]))
    except (KeyError, TypeError, ValueError):
        return None


def jobs() -> list[IndexedJob]:
    """Return every submission whose run still exists, newest first."""
    return [job for job in _entries() if RunDir(job.run_dir).exists]


def _entries() -> list[IndexedJob]:
    """Return every submission, newest first; none if this user has no place for an index."""
    entries = [job for path in (state_dir() / "jobs").glob("*.json") if (job := _read(path)) is not None]
    return sorted(entries, key=lambda job: job.submitted, reverse=True)


def run_of_job(job_id: str) -> RunDir | None:
    """Return the run whose job this is; None if none is known.

    The directory may have been moved aside or renamed since, and another run may have taken its name: a run counts
    only if its own files name the job. It is looked for under its recorded path, then next to it.
    """
    for job in _entries():
        if job.job_id != job_id:
            continue
        run = RunDir(job.run_dir)
        candidates = [run, *(RunDir(path.parent) for path in sorted(run.path.parent.glob("*/config.json")))]
        for candidate in candidates:
            if candidate.exists and _is_job_of(job_id, candidate, indexed=candidate == run):
                return candidate
    return None


def _is_job_of(job_id: str, run: RunDir, *, indexed: bool) -> bool:
    """Return whether a run was submitted as this job, and is no copy of the run that was."""
    if not run.submitted:
        return indexed  # an entry is all that is left of it
    row = next((row for job, row in submitted_jobs(run) if job == job_id), None)
    return row is not None and (indexed or original_of(run, row) is None)


def known_runs() -> list[RunDir]:
    """Return every run of this user that still exists: the newest submission first, and those in ./runs."""
    paths = [job.run_dir for job in jobs()]
    paths += sorted(p.parent.absolute() for p in Path("runs").glob("*/config.json"))
    return [RunDir(path) for path in dict.fromkeys(paths)]


def find_run(reference: str) -> RunDir:
    """Return the run that a name, a path or a job id means.

    Raises:
        NotFound: none; the nearest names are suggested.
    """
    if max(map(len, map(os.fsencode, reference.split("/")))) > _LONGEST_NAME_OF_A_FILE:
        raise NotFound(
            f"{reference[:20]}...: no run with this name, path or job id: a run's name has at most {LONGEST_NAME} "
            f"characters, this has {len(reference)}"
        )
    as_path = expand(reference)
    if RunDir(as_path.absolute()).exists:
        return RunDir(as_path.absolute())
    if RunDir((Path("runs") / reference).absolute()).exists:
        return RunDir((Path("runs") / reference).absolute())
    if (run_dir := run_of_job(reference)) is not None:
        return run_dir
    for job in jobs():
        if job.run_dir.name == reference:
            return RunDir(job.run_dir)
    if reference.isdigit() or _LOCAL.fullmatch(reference):
        raise NotFound(f"{reference}: no run of yours has this job id; `zslurm status` lists them")
    near = difflib.get_close_matches(reference, [run.name for run in known_runs()], n=1)
    hint = f"did you mean `{near[0]}`?" if near else "`zslurm status` lists your runs"
    raise NotFound(f"{reference}: no run with this name, path or job id; {hint}")


def new_entry(job_id: str, run: RunDir, cluster: str, launcher: str) -> IndexedJob:
    """Return a submission made now."""
    return IndexedJob(job_id, run.path, cluster, launcher, time.time())
