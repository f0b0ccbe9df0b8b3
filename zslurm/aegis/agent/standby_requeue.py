"""What a standby supervisor does: put the job back into the queue, or end it if that cannot be.

The job is requeued once Slurm calls its batch node down, and starts nothing there. If it does not, the node may
be well and the batch script about to start the supervisor again: the standby supervisor, also one on that very
node, waits as long as Slurm would need to notice, and then requeues without that node, if the partition has enough
others. If Slurm refuses, or the node has no scontrol, the job is ended instead: a successor that waits for its
end continues the run, and without one it is better to end than to hold nodes that do nothing. If there is no
scancel either, nothing can be done from here, and the events record it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum

from zslurm.core.errors import NotFound, SlurmRefused, SlurmUnavailable
from zslurm.run.events import DeputyActed
from zslurm.run.events.event import only_known
from zslurm.run.run_dir import RunDir
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.exclusion import requeue_excluding, wait_until_down
from zslurm.slurm.hostlist import expand
from zslurm.slurm.inventory import usable_nodes
from zslurm.slurm.jobs import JobRecord
from zslurm.slurm.states import JobState
from zslurm.train.jsonl import JsonLinesWriter

_PAUSE_S = 5.0


class StandbyResult(Enum):
    """What came of acting."""

    REQUEUED = "requeued"
    ENDED = "ended"
    POSTPONED = "postponed"
    """The supervisor has been heard again, or a new one has started: `due` counts again."""
    NOT_NEEDED = "not needed"
    """The job is over, requeued, cancelled, or no longer the run's; or another generation has taken over."""
    LEFT_TO_ANOTHER = "left to another"
    """Another agent holds the lease and is at work: ask again after a while."""
    IMPOSSIBLE = "impossible"
    """Nothing can be done from this node."""


@dataclass
class StandbyRequeue:
    """Requeues or ends the job in the supervisor's place.

    Attributes:
        run: the run.
        client: Slurm.
        job_id: of the job.
        restart: how often Slurm has requeued it.
        node: this one.
        batch_node: the one that the supervisor ran on, if known.
        blocking_reason: why nothing must be done now, by the files of the run; None if something must.
        sleep: waits.
    """

    run: RunDir
    client: SlurmClient
    job_id: str
    restart: int
    node: str
    batch_node: str | None
    blocking_reason: Callable[[], StandbyResult | None]
    sleep: Callable[[float], None]
    _recorded: set[str] = field(default_factory=set)
    _waited_s: float = 0.0
    """Seconds that were waited for Slurm to call the batch node down."""

    def until_done(self) -> StandbyResult:
        """Requeue or end the job; repeated while Slurm does not answer, until nothing must be done any more."""
        self._waited_s = 0.0
        while (reason := self.blocking_reason()) is None:
            try:
                return self._requeue_or_end()
            except (SlurmRefused, SlurmUnavailable) as error:
                if isinstance(error, SlurmRefused) or _not_installed(error):
                    self._record(f"the supervisor sends no heartbeats, and nothing can be done from here: {error}")
                    return StandbyResult.IMPOSSIBLE
            self.sleep(_PAUSE_S)
        return reason

    def _requeue_or_end(self) -> StandbyResult:
        """Requeue the job; end it if that cannot be.

        Raises:
            SlurmUnavailable: the controller does not answer, so nothing was done, or it is not known; or no
                command that would help is on this node.
            SlurmRefused: Slurm refused both.
        """
        try:
            job = self._job()
            if job is None:
                return StandbyResult.NOT_NEEDED
            down = self._wait_until_down()
            if (reason := self.blocking_reason()) is not None:
                return reason
            if self._job() is None:
                return StandbyResult.NOT_NEEDED
            self._record("the supervisor sends no heartbeats; the job is requeued")
            self._requeue(job, down)
            return StandbyResult.REQUEUED
        except NotFound:
            return StandbyResult.NOT_NEEDED
        except SlurmRefused as error:
            if self._job() is None:  # requeued, be it that a part of it was refused
                return StandbyResult.REQUEUED
            why = str(error)
        except SlurmUnavailable as error:
            if not _not_installed(error):
                raise
            why = str(error)
        self._record(f"the job cannot be requeued, so it is ended, and a successor continues the run: {why}")
        with contextlib.suppress(NotFound):
            self.client.cancel(self.job_id)
        return StandbyResult.ENDED

    def _wait_until_down(self) -> set[str]:
        """Wait until Slurm calls the batch node down; what was waited before a failed requeue counts."""
        if self.batch_node is None:
            return set()

        def sleep(seconds: float) -> None:
            self._waited_s += seconds
            self.sleep(seconds)

        return wait_until_down(
            self.client, [self.batch_node], dead_s={self.batch_node: self._waited_s},
            given_up=lambda: self.blocking_reason() is not None, sleep=sleep,
        )  # fmt: skip

    def _requeue(self, job: JobRecord, down: Collection[str]) -> None:
        exclude = [node for node in self._excludable(job) if node not in down]
        done = requeue_excluding(self.client, job.job_id, exclude, restarts=self.restart, sleep=self.sleep)
        if done.problem:
            self._record(f"the job is requeued, and may start on {self.batch_node} again: {done.problem}")

    def _excludable(self, job: JobRecord) -> list[str]:
        """Return the batch node, if it is known, is not this one, and the partition has enough others.

        If the site hides its nodes (PrivateData=nodes) it is not known how many others there are.
        """
        if self.batch_node is None or self.batch_node == self.node:
            return []
        shown = self.client.nodes_if_shown()
        if shown is None:
            return [self.batch_node]
        avoided = {self.batch_node, *expand(self.client.excluded_nodes(job.job_id))}
        usable = usable_nodes(shown, job.partition) - avoided
        return [self.batch_node] if len(usable) >= job.n_nodes else []

    def _job(self) -> JobRecord | None:
        """Return what Slurm reports of this start of the job; None if it is over.

        Raises:
            SlurmUnavailable, SlurmRefused: from Slurm.
        """
        job = self.client.queue([self.job_id]).get(self.job_id)
        if job is None or job.restarts != self.restart or job.state not in (JobState.RUNNING, JobState.SUSPENDED):
            return None
        return job

    def _record(self, reason: str) -> None:
        """Record it once among the run's events, as the supervisor would; the lease makes us their one writer."""
        if reason in self._recorded:
            return
        self._recorded.add(reason)
        event = only_known(DeputyActed(node=self.node, batch_node=self.batch_node, reason=reason))
        row = {"time": time.time(), "event": event.NAME, "job_id": self.job_id, **event.fields()}
        with contextlib.suppress(OSError), JsonLinesWriter(self.run.events) as events:
            events.append(row)


def _not_installed(error: SlurmUnavailable) -> bool:
    """Return whether the command itself is missing on this node, and not the controller away."""
    return "not found on PATH" in str(error)
