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
from dataclasses import dataclass
from pathlib import Path

from zslurm.errors import NotFound, ZslurmError
from zslurm.launch.run_dir import RunDir, read_json, write_atomically
from zslurm.paths import expand

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
    """Where zslurm keeps this user's state."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "zslurm"


def _folder() -> Path:
    folder = state_dir() / "jobs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ZslurmError(
            f"{folder}: cannot be made: {error.strerror}; set XDG_STATE_HOME to a directory of yours"
        ) from error
    return folder


def claim_local_id() -> str:
    """A job id `local-N` that no other local submission of this user has or gets."""
    folder = _folder()
    used = [int(match[1]) for path in folder.iterdir() if (match := _LOCAL.match(path.name))]
    number = max(used, default=0) + 1
    while True:
        try:
            (folder / f"local-{number}.json").touch(exist_ok=False)
        except FileExistsError:
            number += 1
        else:
            return f"local-{number}"


def record(job: IndexedJob) -> None:
    """Add a submission."""
    name = job.job_id if job.launcher == "local" else f"{job.cluster}-{job.job_id}"
    body = {
        "job_id": job.job_id,
        "run_dir": str(job.run_dir),
        "cluster": job.cluster,
        "launcher": job.launcher,
        "submitted": job.submitted,
    }
    write_atomically(_folder() / f"{name}.json", json.dumps(body) + "\n")


def _read(path: Path) -> IndexedJob | None:
    """An entry; None for an id that is being claimed this moment, and for a damaged one."""
    body = read_json(path) or {}
    try:
        return IndexedJob(
            job_id=str(body["job_id"]),
            run_dir=Path(body["run_dir"]),
            cluster=str(body["cluster"]),
            launcher=str(body["launcher"]),
            submitted=float(body["submitted"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def jobs() -> list[IndexedJob]:
    """Every submission whose run still exists, newest first."""
    found: list[IndexedJob] = []
    for path in (state_dir() / "jobs").glob("*.json"):
        job = _read(path)
        if job is not None and RunDir(job.run_dir).exists:
            found.append(job)
    return sorted(found, key=lambda job: job.submitted, reverse=True)


def known_runs() -> list[RunDir]:
    """Every run of this user that still exists: the newest submission first, and those in ./runs."""
    paths = [job.run_dir for job in jobs()]
    paths += sorted(p.parent.absolute() for p in Path("runs").glob("*/config.json"))
    return [RunDir(path) for path in dict.fromkeys(paths)]


def find_run(reference: str) -> RunDir:
    """The run that a name, a path or a job id means.

    Raises:
        NotFound: none; the nearest names are suggested.
    """
    as_path = expand(reference)
    if RunDir(as_path.absolute()).exists:
        return RunDir(as_path.absolute())
    if RunDir((Path("runs") / reference).absolute()).exists:
        return RunDir((Path("runs") / reference).absolute())
    known = jobs()
    for job in known:
        if job.job_id == reference:
            return RunDir(job.run_dir)
    for job in known:
        if job.run_dir.name == reference:
            return RunDir(job.run_dir)
    if reference.isdigit() or _LOCAL.fullmatch(reference):
        raise NotFound(f"{reference}: no run of yours has this job id; `zslurm status` lists them")
    near = difflib.get_close_matches(reference, [run.name for run in known_runs()], n=1)
    hint = f"did you mean `{near[0]}`?" if near else "`zslurm status` lists your runs"
    raise NotFound(f"{reference}: no run with this name, path or job id; {hint}")


def new_entry(job_id: str, run: RunDir, cluster: str, launcher: str) -> IndexedJob:
    """A submission made now."""
    return IndexedJob(job_id, run.path, cluster, launcher, time.time())
