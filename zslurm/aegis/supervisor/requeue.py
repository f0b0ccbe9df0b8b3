"""Put the job back into the queue, from inside it, with the nodes that it must not use."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from zslurm.aegis.core.policy.requeueing import next_requeue_step
from zslurm.aegis.fault_kinds import NODE_DEAD
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.types import Decision
from zslurm.core.errors import SlurmUnavailable, ZslurmError
from zslurm.run.events import FaultDetected, StartPostponed
from zslurm.run.events.event import select
from zslurm.run.state.run_state import last_job
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.exclusion import (
    JobSize,
    RequeueResult,
    exclude_requeued,
    has_left,
    requeue_excluding,
    wait_until_down,
)
from zslurm.slurm.hostlist import compress
from zslurm.slurm.run_command import Retries
from zslurm.train.jsonl import read_jsonl

_RETRIES = Retries(attempts=2, first_pause_s=0.5)
_PAUSE_S = 2.0
"""Between two tries while Slurm does not answer."""
_BEFORE_LIMIT_S = 60.0
"""So long before the job's time limit nothing is waited for any more: it could not be requeued after it."""
_TERMINATION = (signal.SIGTERM, signal.SIGCONT, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def requeue_job(
    job: Job,
    decision: Decision,
    *,
    excluded: Collection[str] = (),
    expired: Collection[str] = (),
    dead: Collection[str] = (),
    on_requeued: Callable[[], None] = lambda: None,
    client: SlurmClient | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> RequeueResult | None:
    """Requeue the job that this process runs in, as soon as Slurm answers; call it in the main thread.

    Slurm then sends SIGTERM to every process of the job. This one ignores that from here on, and so does what it
    starts. On a site whose compute nodes have no scontrol, a waiting successor replaces the requeue: nothing is
    done here.

    Args:
        job: the start of the job.
        decision: what was decided.
        excluded: nodes that it must not use from now on.
        expired: nodes whose exclusion has expired: it may use them again.
        dead: nodes of the job that died while it ran.
        on_requeued: called once the job is requeued, before its exclusions are changed; Slurm may kill this
            process meanwhile.
        client: Slurm.
        sleep: waits.

    Returns:
        What the job excludes from now on; None if it was not requeued from here: it was cancelled, or
        Slurm has ended it by itself.

    Raises:
        ZslurmError: Slurm refused.
    """
    client = client or SlurmClient(job.environ, retries=_RETRIES)
    if not client.can_control():
        if job.spec.wants_successor:
            return RequeueResult()
        raise ZslurmError("there is no scontrol on this node, and no successor was submitted (slurm.successor)")
    if job.spec.cluster.gpus_per_node and dead:
        excluded = set(excluded) - _wait_until_down(client, job, dead, sleep)
    size = None
    if decision.n_nodes:
        size = JobSize(decision.n_nodes, job.spec.ranks_per_node, job.spec.cpus_per_task)
    requeue = _Requeue(client, job, tuple(excluded), tuple(expired), size, on_requeued, sleep)
    reported = ""
    while True:
        try:
            with _signals_masked_if_requeued():
                return requeue.once()
        except SlurmUnavailable as error:
            if not requeue.asked and _is_cancelled(job):
                return None
            if str(error) != reported:
                reported = str(error)
                job.record(StartPostponed(reason=f"the job cannot be requeued yet: {reported}"))
        sleep(_PAUSE_S)


@dataclass
class _Requeue:
    """A requeue that is tried until it is known to be done.

    Attributes:
        asked: whether Slurm was asked for it, and may have done it.
    """

    client: SlurmClient
    job: Job
    excluded: tuple[str, ...]
    expired: tuple[str, ...]
    size: JobSize | None
    on_requeued: Callable[[], None]
    sleep: Callable[[float], None]
    asked: bool = False

    def once(self) -> RequeueResult | None:
        """Try once. Returns what `requeue_job` does.

        Raises:
            SlurmUnavailable: it is not known whether it was done.
            SlurmRefused, NotFound: from Slurm.
        """
        client, job_id = self.client, self.job.job_id
        record = client.queue([job_id]).get(job_id)
        changes = bool(self.excluded or self.expired or self.size)
        step = next_requeue_step(
            record, self.job.restart, has_left=has_left(record, self.job.restart), asked=self.asked,
            changes=changes, cancelled=_is_cancelled(self.job),
        )  # fmt: skip
        if step == "nothing":
            return None
        if step == "set exclusions":
            if not changes:
                return RequeueResult()
            if self.asked:
                self.on_requeued()
            done = exclude_requeued(
                client, job_id, self.excluded, expired=self.expired, size=self.size, sleep=self.sleep
            )
            return None if done.problem and not self.asked else done  # it may be cancelled
        self.asked = True
        return requeue_excluding(
            client, job_id, self.excluded, restarts=self.job.restart, expired=self.expired, size=self.size,
            on_requeued=self.on_requeued, sleep=self.sleep,
        )  # fmt: skip


@contextlib.contextmanager
def _signals_masked_if_requeued() -> Iterator[None]:
    """Mask the signals with which Slurm ends the job; unmask them if it was not requeued yet.

    A job that is cancelled while Slurm does not answer must not come back.
    """
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in _TERMINATION}
    try:
        yield
    except SlurmUnavailable:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        raise


def _is_cancelled(job: Job) -> bool:
    """Return whether the run is to end: Slurm's termination came, or a user asked for it."""
    if job.stop.signum in (signal.SIGTERM, signal.SIGINT):
        return True
    with contextlib.suppress(OSError):
        last = last_job(job.run)
        return last is not None and last.cancelled and job.job_id in (last.job_id, last.successor)
    return False


def _wait_until_down(
    client: SlurmClient, job: Job, dead: Collection[str], sleep: Callable[[float], None]
) -> set[str]:
    """Wait until Slurm calls them down, as long as it may take and the time limit leaves; return those it does."""
    ends_at = float("inf")
    with contextlib.suppress(ZslurmError):
        record = client.queue([job.job_id]).get(job.job_id)
        if record is not None and record.end_time is not None:
            ends_at = record.end_time.timestamp()

    def record_wait(seconds: float) -> None:
        reason = (
            f"the job is requeued in {seconds:.0f} s: until then Slurm notices that {compress(dead)} died, and "
            "the site hides its nodes from users (PrivateData=nodes)"
        )
        job.record(StartPostponed(reason=reason))

    return wait_until_down(
        client,
        dead,
        dead_s=_dead_s(job),
        given_up=lambda: _is_cancelled(job) or time.time() > ends_at - _BEFORE_LIMIT_S,
        on_hidden=record_wait,
        sleep=sleep,
    )


def _dead_s(job: Job) -> dict[str, float]:
    """Return seconds since each node of the job died last."""
    now, dead_s = time.time(), dict[str, float]()
    with contextlib.suppress(OSError):
        for event in select(read_jsonl(job.run.events), FaultDetected):
            if event.kind == NODE_DEAD and event.job_id == job.job_id and event.node and event.fault_time:
                dead_s[event.node] = now - event.fault_time
    return dead_s
