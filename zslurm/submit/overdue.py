"""Notify once, from the login node, that a run waits in the queue for longer than expected.

While a job waits no process of zslurm runs in it: `zslurm status`, by a person or in a crontab, and `zslurm watch`
notice. What they did not notice the supervisor records when the job starts.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping

from zslurm.aegis.notify.hooks import NotDelivered, hooks, message
from zslurm.config.load import load_spec
from zslurm.core.errors import ZslurmError
from zslurm.run.events import QueueOverdue
from zslurm.run.events.by_user import record_by_user
from zslurm.run.queue_wait import read_waits, why_overdue
from zslurm.run.run_dir import RunDir
from zslurm.run.secrets import with_secrets


def notify_overdue(run: RunDir, job_id: str) -> str:
    """Record and send once that the job of a run waits for too long; return what hooks did not take it for.

    Raises:
        ZslurmError: the run's files cannot be read or written.
    """
    waits, now = read_waits(run), time.time()
    if not why_overdue(waits, now, set_s=0.0):  # whatever is expected: most runs need no more
        return ""
    spec = with_secrets(load_spec(run.config), run.secrets)
    why = why_overdue(waits, now, set_s=spec.aegis.expected_wait_s)
    if not why:
        return ""
    event = QueueOverdue(job_id=job_id, reason=why)
    record_by_user(run, event)
    if QueueOverdue.NAME not in spec.aegis.notify.events:
        return ""
    values = {name: value for name, value in spec.cluster.env.items() if value is not None}
    sent = message(event, {"run": run.name, "run_dir": str(run.path)})
    problems = []
    for hook in hooks(spec.aegis.notify, {**os.environ, **values}):
        try:
            hook.deliver(sent)
        except NotDelivered as error:
            problems.append(f"aegis.notify.{hook.name}: {error}")
    return "; ".join(problems)


def notify_all_overdue(waiting: Mapping[RunDir, str]) -> list[str]:
    """Do so for runs that wait, each with its job; return a line for each problem."""
    problems = []
    for run, job_id in waiting.items():
        with contextlib.suppress(ZslurmError, OSError):  # a run of another user
            if problem := notify_overdue(run, job_id):
                problems.append(f"{run.name}: {problem}")
    return problems
