"""The queue as it was a moment ago: one squeue call for all runs, kept in a file for the next few seconds.

slurmctld answers everybody on the cluster, and a shell loop around `zslurm status` must not be what slows it down.
So an answer is used again for some seconds (for longer if it was slow to come), and after a failure the
controller is not asked for a growing while. If it does not answer, the last view is shown with its age. What
decides something (submit, cancel, requeue) never looks here.

One file for each user and cluster below $XDG_CACHE_HOME/zslurm (default ~/.cache), written by rename.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from zslurm.core.errors import ZslurmError
from zslurm.core.files import write_atomically
from zslurm.core.paths import home
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.environment import WHICH_CLUSTER
from zslurm.slurm.jobs import JobRecord
from zslurm.slurm.run_command import Retries

FRESH_S = 3.0
"""Seconds in which an answer is as good as new."""
SLOW = 4.0
"""... or this many times as long as it took to come."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0
"""After a failure the controller is not asked, for twice as long each time."""
_PATIENCE_S = 8.0
"""How long a user at a terminal waits for an answer that can be had from the file."""


@dataclass(frozen=True)
class QueueView:
    """Slurm's last answer about a user's jobs."""

    jobs: dict[str, JobRecord] = field(default_factory=dict)
    asked: float = 0.0
    """When it was asked (UNIX seconds); 0 for never."""
    problem: str | None = None
    """Why this is not newer, if the controller did not answer."""
    no_history: str | None = None
    """Why nothing is known of jobs that the controller has forgotten, if accounting did not answer."""


@dataclass
class _Kept:
    """What the file holds."""

    users: list[str] = field(default_factory=list)
    job_ids: list[str] = field(default_factory=list)
    """What accounting was asked about, besides what the controller knew."""
    asked: float = 0.0
    took_s: float = 0.0
    jobs: dict[str, JobRecord] = field(default_factory=dict)
    ended: dict[str, JobRecord] = field(default_factory=dict)
    """Jobs that the controller has forgotten: accounting's word on them is final."""
    failures: int = 0
    failed: float = 0.0
    problem: str | None = None

    @classmethod
    def read(cls, path: Path) -> _Kept:
        """Return what is kept; nothing if there is no such file, or one of another version."""
        try:
            return _adapter().validate_json(path.read_bytes())
        except (OSError, ValueError):
            return cls()

    def write(self, path: Path) -> None:
        """Keep it; a cache that cannot be written is none, and no reason to stop."""
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(path, _adapter().dump_json(self).decode())

    def is_fresh(self, now: float, not_before: float) -> bool:
        """Return whether the answer is young enough, and younger than what was last done."""
        return self.asked > not_before and 0 <= now - self.asked < max(FRESH_S, SLOW * self.took_s)

    def is_pausing(self, now: float) -> bool:
        """Return whether the controller failed only just now."""
        pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (self.failures - 1))
        return self.failures > 0 and 0 <= now - self.failed < pause


@functools.cache
def _adapter() -> TypeAdapter[_Kept]:
    return TypeAdapter(_Kept)


def view(job_ids: Collection[str], users: Collection[str], not_before: float) -> QueueView:
    """Return Slurm's answer about jobs of these users, or its last one.

    Accounting is asked about those of `job_ids` that the controller has forgotten. A view that is older than
    `not_before` (UNIX seconds) will not do: something was submitted or cancelled since.
    """
    path, now = cache_file(), time.time()
    kept = _Kept.read(path)
    if not set(users) <= set(kept.users):
        kept = _Kept(users=sorted(users))
    jobs_known = {**kept.ended, **kept.jobs}
    if kept.is_fresh(now, not_before) and set(job_ids) <= {*kept.jobs, *kept.job_ids}:
        return QueueView(jobs_known, kept.asked)
    if kept.is_pausing(now):
        return QueueView(jobs_known, kept.asked, kept.problem)
    client = SlurmClient(timeout_s=_PATIENCE_S, retries=Retries(attempts=1))
    active = [job_id for job_id, job in kept.jobs.items() if job.state.is_active]
    try:
        kept.jobs = client.queue(user=",".join(kept.users))
        if not kept.jobs and active:  # an empty answer is no end of them
            kept.jobs = client.queue(active)
    except ZslurmError as error:
        kept.failures, kept.failed, kept.problem = kept.failures + 1, time.time(), str(error)
        kept.write(path)
        return QueueView(jobs_known, kept.asked, kept.problem)
    # `asked` is when the question was put: what is done while it is on its way may not be in the answer.
    kept.asked, kept.took_s, kept.job_ids = now, time.time() - now, sorted(job_ids)
    kept.failures, kept.problem = 0, None
    forgotten = sorted(set(job_ids) - set(kept.jobs))
    kept.ended = {job_id: job for job_id, job in kept.ended.items() if job_id in forgotten}
    no_history = _ask_accounting(client, forgotten, kept)
    kept.write(path)
    return QueueView({**kept.ended, **kept.jobs}, kept.asked, None, no_history)


def _ask_accounting(client: SlurmClient, forgotten: list[str], kept: _Kept) -> str | None:
    """Add what accounting knows of jobs to what is kept; returns why it cannot be asked, if so."""
    try:
        history = client.history([job_id for job_id in forgotten if job_id not in kept.ended])
    except ZslurmError as error:
        return str(error)
    kept.ended |= {job_id: runs[-1] for job_id, runs in history.items()}
    return None


def cache_file() -> Path:
    """Return the path of the view of this user and cluster."""
    base = os.environ.get("XDG_CACHE_HOME")
    which = next((os.environ[name] for name in WHICH_CLUSTER if os.environ.get(name)), "")
    cluster = hashlib.sha256(which.encode()).hexdigest()[:12]
    return (Path(base) if base else home() / ".cache") / "zslurm" / f"queue-{os.getuid()}-{cluster}.json"
