"""A job of the executor, and the source of its state: sacct as with submitit, squeue if sacct knows nothing.

On a site without accounting submitit never learns that a job has died, and waits for its result forever.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from typing import TypeVar

from submitit.core import logger
from submitit.slurm import slurm

from zslurm.core.errors import ZslurmError
from zslurm.slurm.states import JobState, parse_state

R = TypeVar("R", covariant=True)

FORGOTTEN = "FORGOTTEN"
"""State of a job that was in the queue, and that Slurm does not know any more: it is over."""


_ASK_SACCT_AGAIN_S = 600.0
"""sacct is asked no more often than this where it fails: a site without accounting has only squeue."""


class JobWatcher(slurm.SlurmInfoWatcher):
    """Asks Slurm for the states of all jobs at once."""

    def __init__(self, delay_s: int = 600) -> None:
        super().__init__(delay_s)
        self._queued: set[str] = set()
        self._sacct_failed = float("-inf")

    def update(self) -> None:
        """Ask sacct, and squeue about the jobs that it does not know."""
        answered = False
        if time.time() - self._sacct_failed > _ASK_SACCT_AGAIN_S:
            answered = self._ask_sacct()
            self._sacct_failed = float("-inf") if answered else time.time()
        open_jobs = self._registered - self._finished
        unknown = {job for job in open_jobs if not (answered and job in self._info_dict)}
        if unknown and shutil.which("squeue") is not None:
            self._ask_queue(unknown)
        self._last_status_check = time.time()
        self._finished |= {job for job in open_jobs if self.is_done(job, mode="cache")}

    def _ask_sacct(self) -> bool:
        """Take what accounting knows; returns whether it answered. submitit warns if it does not."""
        command = self._make_command()
        if command is None:
            return True
        self._num_calls += 1
        try:
            self._output = subprocess.check_output(command, stderr=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError):
            return False
        self._info_dict.update(self.read_info(self._output))
        return True

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Return whether a job is over; submitit takes one that is suspended or starting for one.

        A preempted job may return to the queue: its end, if it is one, is in the result that its task writes.
        """
        state = self.get_state(job_id, mode=mode)
        return state == FORGOTTEN or (parse_state(state).is_over and parse_state(state) is not JobState.PREEMPTED)

    def _ask_queue(self, jobs: set[str]) -> None:
        from zslurm.slurm.client import SlurmClient

        try:
            client = SlurmClient()
            records = client.queue(sorted({job.split("_")[0] for job in jobs}))
        except ZslurmError as error:
            logger.get_logger().warning(f"squeue does not answer, states may be old: {error}")
            return
        asked = set()
        for record in records.values():
            for job in jobs.intersection(_ids(record.job_id)):
                self._info_dict[job] = {"JobID": job, "State": record.state.name, "NodeList": record.nodes}
                asked.add(job)
        for job in jobs & self._queued - asked:
            # That an answer lacks a job is not its end: the controller must say that the job is unknown.
            with contextlib.suppress(ZslurmError):
                if not client.queue([job]):
                    self._info_dict[job] = {"JobID": job, "State": FORGOTTEN}
        self._queued |= asked

    def clear(self) -> None:
        """Forget everything that was found out."""
        super().clear()
        self._queued, self._sacct_failed = set(), float("-inf")


def _ids(job: str) -> list[str]:
    """Return the ids of the jobs that squeue shows as one: `12_[0-3%2]` is four."""
    ids = []
    for main, *index in slurm.read_job_id(job):
        if not index:
            ids.append(main)
        else:
            ids += [f"{main}_{number}" for number in range(int(index[0]), int(index[-1]) + 1)]
    return ids


class ZslurmJob(slurm.SlurmJob[R]):
    """A job with submitit's methods, and with a state on sites without accounting too."""

    watcher = JobWatcher()
