"""The deputy, or standby supervisor: what an agent does when it has not heard of the supervisor for too long.

The batch host may have died, and with it the supervisor and the batch script. Slurm then does not end a job with
--no-kill: it would idle to its time limit. So the surviving agent of the lowest number puts the job back into the
queue. An agent belongs to one generation, that of the supervisor that started it, and looks for a living
supervisor before it acts (supervisor_lease.py):

- where another generation holds the supervisor's lease, this agent was replaced: it ends, and never acts;
- where the supervisor of its own generation renews the lease, only the pipe between them is broken. An agent whose
  srun is gone ends, for it is of no use any more; one whose pipe is stuck goes on reporting. Neither acts;
- the agent of the batch node looks at the supervisor's process itself. While that runs, the agent renews the lease
  in its place, so that the agents of the other nodes know of it.

Only where the lease has lapsed does an agent act: once, alone, and where that is right:

- the job has not ended, was not requeued or cancelled meanwhile, and is the run's last;
- no new supervisor has started that has no agents yet (`supervisor.json` is the one under which this agent began).
  If that one falls silent too, its silence is counted anew;
- the deputy's own lease is ours: a file of the run directory that only one can create. It holds for one start of
  the job, so leases of earlier starts mean nothing. Its holder renews it; where it is not renewed, its holder died
  as well, and the next agent makes the next lease.

The job is requeued once Slurm calls its batch node down, and starts nothing there. Where it does not, the node may
be well and the batch script about to start the supervisor again: the deputy, also one on that very node, waits as
long as Slurm would need to notice, and then requeues without that node, if the partition has enough others. Where
Slurm refuses, or the node has no scontrol, the job is ended instead: a successor that waits for its end goes on
with the run, and without one it is better to end than to hold nodes that do nothing. Where there is no scancel
either, nothing can be done from here, and the events say so.

With the requeue Slurm sends SIGTERM to this process and its children, and SIGKILL after KillWait: `act` ignores
the first. It blocks, until something was done, or the process is killed: call it in the main thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from pathlib import Path

from zslurm.aegis.protocol import BATCH_NODE
from zslurm.core.errors import NotFound, SlurmRefused, SlurmUnavailable
from zslurm.core.files import read_json
from zslurm.core.processes import ProcessRecord
from zslurm.run.run_dir import RunDir
from zslurm.run.state import last_job
from zslurm.run.supervisor_lease import LeaseWatch
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.commands import Retries
from zslurm.slurm.exclusion import requeue_excluding, wait_until_down
from zslurm.slurm.hostlist import expand
from zslurm.slurm.jobs import JobRecord
from zslurm.slurm.states import JobState
from zslurm.train.jsonl import JsonLinesWriter

STAGGER_S = 2.0
"""Seconds by which each agent waits longer than the one before it."""

_RENEW_S = 5.0
_STALE_S = 60.0
_PAUSE_S = 5.0


class Outcome(Enum):
    """What came of acting."""

    REQUEUED = "requeued"
    ENDED = "ended"
    POSTPONED = "postponed"
    """The supervisor has been heard again, or a new one has started: `due` counts anew."""
    NOT_NEEDED = "not needed"
    """The job is over, requeued, cancelled, or no longer the run's; or another generation has taken over."""
    LEFT_TO_ANOTHER = "left to another"
    """Another agent holds the lease and is at work: ask again after a while."""
    IMPOSSIBLE = "impossible"
    """Nothing can be done from this node."""


class Deputy:
    """One agent's readiness to act for the supervisor."""

    def __init__(
        self,
        run: RunDir,
        environ: Mapping[str, str],
        deputy_s: float,
        *,
        generation: str = "",
        client: SlurmClient | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Remember under which supervisor this agent began.

        Args:
            run: the run.
            environ: of the agent's process: its job, its node, and ZSLURM_BATCH_NODE.
            deputy_s: seconds without a word of the supervisor after which the first agent acts.
            generation: of the supervisor that started this agent; empty where it is not known.
            client: Slurm.
            sleep: waits.
            clock: monotonic seconds.
        """
        self._run, self._deputy_s, self._sleep = run, deputy_s, sleep
        self.heard: Callable[[], bool] = lambda: False
        """Whether the supervisor has been heard since it fell silent; an agent that listens meanwhile sets it."""
        self._told: set[str] = set()
        self._job_id = environ.get("SLURM_JOB_ID")
        self._restart = int(environ.get("SLURM_RESTART_COUNT") or 0)
        self.node = environ.get("SLURMD_NODENAME", "")
        self.batch_node = environ.get(BATCH_NODE) or None
        nodes = expand(environ.get("SLURM_JOB_NODELIST", ""))
        self.index = nodes.index(self.node) if self.node in nodes else len(nodes)
        """This agent's place among the nodes of the job: the lowest acts first."""
        self._client = client or SlurmClient(environ, timeout_s=10.0, retries=Retries(attempts=2))
        self._lease = LeaseWatch(generation, clock)
        self._supervisor = read_json(run.supervisor)
        self._silent_s = self._asked_s = 0.0
        self._excused_s: float | None = 0.0
        """How long the silence was when the present supervisor was seen; None: as it is at the next look."""

    def due(self, silent_s: float) -> bool:
        """Whether it is this agent's turn, so many seconds after the last word of the supervisor.

        Never on a machine without Slurm: there the job ends with its supervisor.
        """
        if silent_s < self._silent_s:
            self._excused_s = 0.0
        self._silent_s = silent_s
        if self._excused_s is None:
            self._excused_s = silent_s
        patience = self._deputy_s + self.index * STAGGER_S
        return self._job_id is not None and silent_s - self._excused_s >= patience

    def on_silence(self, silent_s: float, hung_up: bool = False) -> bool:
        """What an agent asks while the supervisor is silent: true where the agent has nothing left to do.

        Args:
            silent_s: seconds since the supervisor was heard last.
            hung_up: the pipe from the supervisor is closed: its srun is gone, or the supervisor itself.
        """
        if self._job_id is None:
            return silent_s >= self._deputy_s
        if silent_s < self._asked_s:  # it was heard meanwhile
            self._lease.rest()
        self._asked_s = silent_s
        with contextlib.suppress(OSError):
            self._lease.look(self._run)
        if self._lease.replaced:
            return True
        if self._lease.is_renewed:
            return hung_up
        if self._supervisor_runs():
            return False
        if not self._lease.has_lapsed or not self.due(silent_s):
            return False
        return self.act() not in (Outcome.POSTPONED, Outcome.LEFT_TO_ANOTHER)

    # --- whether --------------------------------------------------------------------------------------------

    def blocking_reason(self) -> Outcome | None:
        """Why nothing must be done now, by the files of the run; None where something must."""
        assert self._job_id is not None
        if self.heard():
            return Outcome.POSTPONED
        if self._run.job_exit(self._job_id).exists():
            return Outcome.NOT_NEEDED
        with contextlib.suppress(OSError):
            self._lease.look(self._run)
        if self._lease.replaced:
            return Outcome.NOT_NEEDED
        if self._lease.is_renewed or read_json(self._run.supervisor) != self._supervisor:
            return Outcome.POSTPONED
        last = last_job(self._run)
        if last is None or self._job_id not in (last.job_id, last.successor) or last.cancelled:
            return Outcome.NOT_NEEDED
        return None

    def _supervisor_runs(self) -> bool:
        """Whether this is the batch node and the supervisor's process runs; then the lease is renewed for it.

        A process that is stopped (SIGSTOP) does not count: it would never act.
        """
        if not self.node or self.node != self.batch_node:
            return False
        record = ProcessRecord.read(self._run.supervisor)
        if record is None or not record.alive or record.is_stopped:
            return False
        with contextlib.suppress(OSError):
            self._lease.vouch(self._run)
        return True

    def _job(self) -> JobRecord | None:
        """What Slurm says of this start of the job; None where it is over.

        Raises:
            SlurmUnavailable, SlurmRefused: from Slurm.
        """
        assert self._job_id is not None
        job = self._client.queue([self._job_id]).get(self._job_id)
        if job is None or job.restarts != self._restart or job.state not in (JobState.RUNNING, JobState.SUSPENDED):
            return None
        return job

    # --- the deed -------------------------------------------------------------------------------------------

    def act(self) -> Outcome:
        """Do what the supervisor would do; repeated while Slurm does not answer. Never raises.

        Call it in the main thread (signals), when `due`; again later where it was left to another.
        """
        try:
            outcome = self._act_with_lease()
        except OSError:  # the run directory is away: ask again
            return Outcome.LEFT_TO_ANOTHER
        if outcome is Outcome.POSTPONED and (present := read_json(self._run.supervisor)) != self._supervisor:
            self._supervisor, self._excused_s = present, None
        return outcome

    def _act_with_lease(self) -> Outcome:
        """Raises OSError: the run directory is away."""
        if (reason := self.blocking_reason()) is not None:
            return reason
        lease = self._take_lease()
        if lease is None:
            return Outcome.LEFT_TO_ANOTHER
        return self._act_alone(lease)

    def _act_alone(self, lease: Path) -> Outcome:
        """Under the lease."""
        ignored = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            with _renewed_meanwhile(lease):
                outcome = self._until_done()
            if outcome is Outcome.IMPOSSIBLE:
                lease.write_text(json.dumps({"impossible": True, "node": self.node}) + "\n", encoding="utf-8")
            elif outcome not in (Outcome.REQUEUED, Outcome.ENDED):
                lease.unlink(missing_ok=True)
            return outcome
        finally:
            signal.signal(signal.SIGTERM, ignored)

    def _until_done(self) -> Outcome:
        while (reason := self.blocking_reason()) is None:
            try:
                return self._requeue_or_end()
            except (SlurmRefused, SlurmUnavailable) as error:
                if isinstance(error, SlurmRefused) or _not_installed(error):
                    self._tell(f"nobody has heard of the supervisor, and nothing can be done from here: {error}")
                    return Outcome.IMPOSSIBLE
            self._sleep(_PAUSE_S)
        return reason

    def _requeue_or_end(self) -> Outcome:
        """Requeue the job; end it where that cannot be.

        Raises:
            SlurmUnavailable: the controller does not answer, so nothing was done, or it is not known; or no
                command that would help is on this node.
            SlurmRefused: Slurm wants neither.
        """
        assert self._job_id is not None
        try:
            job = self._job()
            if job is None:
                return Outcome.NOT_NEEDED
            down = wait_until_down(
                self._client,
                [] if self.batch_node is None else [self.batch_node],
                given_up=lambda: self.blocking_reason() is not None,
                sleep=self._sleep,
            )
            if (reason := self.blocking_reason()) is not None:
                return reason
            if self._job() is None:
                return Outcome.NOT_NEEDED
            self._tell("nobody has heard of the supervisor; the job is requeued")
            self._requeue(job, down)
            return Outcome.REQUEUED
        except NotFound:
            return Outcome.NOT_NEEDED
        except SlurmRefused as error:
            if self._job() is None:  # requeued, be it that a part of it was refused
                return Outcome.REQUEUED
            why = str(error)
        except SlurmUnavailable as error:
            if not _not_installed(error):
                raise
            why = str(error)
        self._tell(f"the job cannot be requeued, so it is ended, and a successor goes on with the run: {why}")
        with contextlib.suppress(NotFound):
            self._client.cancel(self._job_id)
        return Outcome.ENDED

    def _requeue(self, job: JobRecord, down: Collection[str]) -> None:
        exclude = [node for node in self._excludable(job) if node not in down]
        if not exclude:
            self._client.requeue(job.job_id)
            return
        try:
            requeue_excluding(self._client, job.job_id, exclude)
        except SlurmUnavailable:
            self._release(job.job_id)
            raise

    def _release(self, job_id: str) -> None:
        """The controller went away in the middle: a job that stays held would wait for ever."""
        while True:
            with contextlib.suppress(SlurmUnavailable):
                job = self._client.queue([job_id]).get(job_id)
                if job is not None and job.state is not JobState.RUNNING:
                    with contextlib.suppress(SlurmRefused):  # it is not held
                        self._client.release(job_id)
                return
            self._sleep(_PAUSE_S)

    def _excludable(self, job: JobRecord) -> list[str]:
        """The batch node, where it is known, is not this one, and the partition has enough others."""
        if self.batch_node is None or self.batch_node == self.node:
            return []
        partitions = set(job.partition.split(","))
        avoided = {self.batch_node, *expand(self._client.excluded_nodes(job.job_id))}
        usable = [
            node
            for node in self._client.nodes()
            if node.is_usable and node.name not in avoided and partitions & set(node.partitions)
        ]
        return [self.batch_node] if len(usable) >= job.n_nodes else []

    def _tell(self, reason: str) -> None:
        """Record it once among the run's events, as the supervisor would; the lease makes us their one writer."""
        if reason in self._told:
            return
        self._told.add(reason)
        row = {
            "time": time.time(),
            "event": "deputy_acted",
            "job_id": self._job_id,
            "node": self.node,
            "batch_node": self.batch_node,
            "reason": reason,
        }
        with contextlib.suppress(OSError), JsonLinesWriter(self._run.events) as events:
            events.append({name: value for name, value in row.items() if value is not None})

    # --- the lease ------------------------------------------------------------------------------------------

    def _leases(self) -> Iterator[Path]:
        """The leases of this start of the job, in the order in which they are taken."""
        number = 1
        while True:
            yield self._run.path / f"deputy-{self._job_id}-{self._restart}-{number}.json"
            number += 1

    def _take_lease(self) -> Path | None:
        """The first lease that can be had; None where another agent holds one and is alive.

        Raises:
            OSError: the run directory cannot be written.
        """
        body = json.dumps(
            {"job_id": self._job_id, "restart": self._restart, "node": self.node, "time": time.time()}
        )
        for lease in self._leases():
            if lease.exists() and not self._abandoned(lease):
                return None
            with contextlib.suppress(FileExistsError):
                number = os.open(lease, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with os.fdopen(number, "w", encoding="utf-8") as file:
                    file.write(body + "\n")
                return lease
        raise AssertionError("leases do not end")

    def _abandoned(self, lease: Path) -> bool:
        """Whether nobody renews a lease: watched for a while, as the clocks of two nodes may differ."""
        first = _renewed(lease)
        for _ in range(round(_STALE_S / _RENEW_S)):
            if first is None or (read_json(lease) or {}).get("impossible"):
                return False
            self._sleep(_RENEW_S)
            if _renewed(lease) != first or self.blocking_reason() is not None:
                return False
        return True


def _renewed(lease: Path) -> int | None:
    try:
        return lease.stat().st_mtime_ns
    except OSError:
        return None


@contextlib.contextmanager
def _renewed_meanwhile(lease: Path) -> Iterator[None]:
    """The lease is renewed while the block runs, however long Slurm takes."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(_RENEW_S):
            with contextlib.suppress(OSError):
                os.utime(lease)

    thread = threading.Thread(target=renew, daemon=True, name="deputy-lease")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _not_installed(error: SlurmUnavailable) -> bool:
    """Whether it is the command itself that is missing on this node, not the controller that is away."""
    return "not found on PATH" in str(error)
