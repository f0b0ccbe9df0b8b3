"""The last root cause in the comment of the Slurm job, which everyone sees who looks at the queue.

    squeue -o '%i %T %k'
    4711 RUNNING zslurm: 11-22 04:31 attempt 2, swap: GPU RAS uncorrectable on node3, GPU 2: ...

A comment that the job has already (a project, what a site's plugin wrote) stays, in front. Other programs read
comments too: only plain ASCII without quotes, `=`, `|` and the like goes in, so that no log line can end a field
of `sacct -P`, look like another key of `scontrol show job`, or be more than text if it is pasted into a
shell. scontrol itself takes all that follows `Comment=` in that word of its command line as it is.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from zslurm.aegis.notify.queue import DeliveryQueue
from zslurm.core.redact import redact
from zslurm.run.events import Decided, RunEnded
from zslurm.run.events.event import Event
from zslurm.run.events.event_text import describe_cause, describe_fault
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.jobs import JobRecord
from zslurm.slurm.run_command import Retries

LONGEST = 200
_OURS = "zslurm: "
_BETWEEN = "; "
_TIMEOUT_S = 5.0
_UNWANTED = re.compile(r"[^\x20-\x7e]|[\"'`\\|;<>$=&]")


class Commentable(Protocol):
    """What a job's comment needs of Slurm: a SlurmClient."""

    def job(self, job_id: str) -> JobRecord | None:
        """Return a job; None if Slurm has forgotten it."""

    def update(self, job_id: str, **settings: str) -> None:
        """Change settings of a job."""


class JobComment:
    """Keeps the comment of one job. One try for each cause, in a separate thread."""

    def __init__(
        self,
        job_id: str,
        environ: Mapping[str, str],
        failed: Callable[[str], None] = lambda reason: None,
        *,
        client: Commentable | None = None,
    ) -> None:
        """Do nothing yet.

        Args:
            job_id: the job whose comment it is.
            environ: has PATH and SLURM_CONF.
            failed: called with one line, from another thread, why the comment could not be written; again only
                after it could.
            client: Slurm.
        """
        self._job_id = job_id
        self._client = client or SlurmClient(environ, timeout_s=_TIMEOUT_S, retries=Retries(attempts=1))
        self._queue: DeliveryQueue[str] = DeliveryQueue("job comment", self._write, failed, limit=1)

    def notify(self, event: Event) -> None:
        """Write the cause that an event holds, if it holds one. Never waits, never raises."""
        if (text := cause_line(event)) is not None:
            self._queue.take(text)

    def flush(self, timeout_s: float) -> None:
        """Wait until it was tried, within a limit: before a requeue ends this process."""
        self._queue.flush(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Wait for the last try, within a limit; nothing is written after it."""
        self._queue.close(timeout_s)

    def _write(self, text: str) -> None:
        """Write the text, and keep what others wrote.

        Raises:
            ZslurmError: Slurm does not answer, or refuses.
        """
        job = self._client.job(self._job_id)
        before = job.comment if job is not None else ""
        comment = beside(before, text)
        if comment != before:
            self._client.update(self._job_id, Comment=comment)


def cause_line(event: Event) -> str | None:
    """Return the root cause that an event holds, as it may stand in a comment; None if it holds none."""
    try:
        if isinstance(event, Decided) and event.acted and event.root:
            what, cause = event.action, describe_fault(event.root)
        elif isinstance(event, RunEnded) and event.cause:
            what, cause = event.outcome, describe_cause(event.cause)
        else:
            return None
        attempt = "the run" if event.attempt is None else f"attempt {event.attempt}"
        when = time.strftime("%m-%d %H:%M", time.localtime(event.time or time.time()))
    except (KeyError, TypeError, ValueError, OverflowError):  # a root or a cause that is damaged
        return None
    return plain(f"{when} {attempt}, {what}: {cause}")


def plain(text: str) -> str:
    """Return the text as it may stand in a comment: one short line of harmless characters, without secrets."""
    line = " ".join(_UNWANTED.sub(" ", redact(text[: 10 * LONGEST])).split())
    most = LONGEST - len(_OURS)
    return line if len(line) <= most else line[: most - 3] + "..."


def beside(before: str, text: str) -> str:
    """Return the comment with this text of ours, in place of what we wrote before, behind what others wrote."""
    theirs = before if not before.startswith(_OURS) else ""
    if (at := theirs.rfind(_BETWEEN + _OURS)) >= 0:
        theirs = theirs[:at]
    return f"{theirs}{_BETWEEN}{_OURS}{text}" if theirs else f"{_OURS}{text}"
