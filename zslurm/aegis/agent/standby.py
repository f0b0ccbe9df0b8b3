"""The standby supervisor: what an agent does when the supervisor sends it no heartbeats for too long.

The batch host may have died, and with it the supervisor and the batch script. Slurm then does not end a job with
--no-kill: it would idle to its time limit. So the surviving agent of the lowest number puts the job back into the
queue. An agent belongs to one generation, its supervisor's, and looks for a living
supervisor before it acts (run/supervisor_lease.py):

- if another generation holds the supervisor's lease, this agent was replaced: it ends, and never acts;
- if the supervisor of its generation renews the lease, only the pipe between them is broken. An agent whose
  srun is gone ends, for it is of no use any more; one whose pipe is stuck continues to report. Neither acts;
- the agent of the batch node looks at the supervisor's process itself. While that runs, the agent renews the lease
  in its place, so that the agents of the other nodes know of it.

Only if the lease has lapsed does an agent act: once, one of all (standby_lease.py), and if that is right:

- the job has not ended, was not requeued or cancelled since, and is the run's last;
- no new supervisor has started that has no agents yet (`supervisor.json` is the one under which this agent began).
  If that one sends no heartbeats either, the time without them is counted again.

What it does then is in standby_requeue.py. With the requeue Slurm sends SIGTERM to this process and its children,
and SIGKILL after KillWait: `act` ignores the first. It blocks, until something was done, or the process is killed:
call it in the main thread.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from zslurm.aegis.agent.standby_lease import acquire, renewed_meanwhile
from zslurm.aegis.agent.standby_requeue import StandbyRequeue, StandbyResult
from zslurm.aegis.protocol import BATCH_NODE
from zslurm.core.files import read_json
from zslurm.core.processes import ProcessRecord
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import last_job
from zslurm.run.supervisor_lease import LeaseWatch
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.environment import job_nodes, own_job_id, restart_count, task_node
from zslurm.slurm.run_command import Retries

STAGGER_S = 2.0
"""Seconds by which each agent waits longer than the one before it."""


class StandbySupervisor:
    """One agent, ready to act for the supervisor."""

    def __init__(
        self,
        run: RunDir,
        environ: Mapping[str, str],
        standby_s: float,
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
            standby_s: seconds without a heartbeat of the supervisor after which the first agent acts.
            generation: of the supervisor that started this agent; empty if unknown.
            client: Slurm.
            sleep: waits.
            clock: monotonic seconds.
        """
        self._run, self._standby_s = run, standby_s
        self.heard: Callable[[], bool] = lambda: False
        """Whether the supervisor has been heard again; an agent that listens while it waits sets it."""
        self._job_id = own_job_id(environ)
        restart = restart_count(environ)
        self.node = task_node(environ) or ""
        self.batch_node = environ.get(BATCH_NODE) or None
        nodes = job_nodes(environ)
        self.index = nodes.index(self.node) if self.node in nodes else len(nodes)
        """This agent's position among the nodes of the job: the lowest acts first."""
        client = client or SlurmClient(environ, timeout_s=10.0, retries=Retries(attempts=2))
        self._lease = LeaseWatch(generation, clock)
        self._supervisor = read_json(run.supervisor)
        self._unheard_s = self._asked_s = 0.0
        self._excused_s: float | None = 0.0
        """Seconds without a heartbeat when the present supervisor was seen; None: as they are at the next look."""
        job = self._job_id or ""
        self._requeue = StandbyRequeue(
            run, client, job, restart, self.node, self.batch_node, self.blocking_reason, sleep
        )

    def due(self, unheard_s: float) -> bool:
        """Return whether it is this agent's turn, `unheard_s` after the last heartbeat of the supervisor.

        Never on a machine without Slurm: there the job ends with its supervisor.
        """
        if unheard_s < self._unheard_s:
            self._excused_s = 0.0
        self._unheard_s = unheard_s
        if self._excused_s is None:
            self._excused_s = unheard_s
        patience = self._standby_s + self.index * STAGGER_S
        return self._job_id is not None and unheard_s - self._excused_s >= patience

    def on_missed_heartbeats(self, unheard_s: float, hung_up: bool = False) -> bool:
        """Act if it is time; returns whether the agent has nothing left to do.

        Args:
            unheard_s: seconds since the supervisor was heard last.
            hung_up: the pipe from the supervisor is closed: its srun is gone, or the supervisor itself.
        """
        if self._job_id is None:
            return unheard_s >= self._standby_s
        if unheard_s < self._asked_s:  # it was heard meanwhile
            self._lease.rest()
        self._asked_s = unheard_s
        with contextlib.suppress(OSError):
            self._lease.look(self._run)
        if self._lease.replaced:
            return True
        if self._lease.is_renewed:
            return hung_up
        if self._supervisor_runs():
            return False
        if not self._lease.has_lapsed or not self.due(unheard_s):
            return False
        return self.act() not in (StandbyResult.POSTPONED, StandbyResult.LEFT_TO_ANOTHER)

    # --- whether --------------------------------------------------------------------------------------------

    def blocking_reason(self) -> StandbyResult | None:
        """Return why nothing must be done now, by the files of the run; None if something must."""
        assert self._job_id is not None
        if self.heard():
            return StandbyResult.POSTPONED
        if self._run.job_exit(self._job_id).exists():
            return StandbyResult.NOT_NEEDED
        with contextlib.suppress(OSError):
            self._lease.look(self._run)
        if self._lease.replaced:
            return StandbyResult.NOT_NEEDED
        if self._lease.is_renewed or read_json(self._run.supervisor) != self._supervisor:
            return StandbyResult.POSTPONED
        last = last_job(self._run)
        if last is None or self._job_id not in (last.job_id, last.successor) or last.cancelled:
            return StandbyResult.NOT_NEEDED
        return None

    def _supervisor_runs(self) -> bool:
        """Return whether this is the batch node and the supervisor's process runs; renew the lease for it then.

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

    # --- acting ---------------------------------------------------------------------------------------------

    def act(self) -> StandbyResult:
        """Do what the supervisor would do; repeated while Slurm does not answer. Never raises.

        Call it in the main thread (signals), when `due`; again later if it was left to another.
        """
        try:
            outcome = self.blocking_reason()
            if outcome is None:
                requeue, is_needed = self._requeue, lambda: self.blocking_reason() is None
                lease = acquire(
                    self._run, requeue.job_id, requeue.restart, self.node, is_needed=is_needed, sleep=requeue.sleep
                )
                outcome = StandbyResult.LEFT_TO_ANOTHER if lease is None else self._act_alone(lease)
        except OSError:  # the run directory is away: ask again
            return StandbyResult.LEFT_TO_ANOTHER
        if outcome is StandbyResult.POSTPONED and (present := read_json(self._run.supervisor)) != self._supervisor:
            self._supervisor, self._excused_s = present, None
        return outcome

    def _act_alone(self, lease: Path) -> StandbyResult:
        """Act under the lease."""
        ignored = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            with renewed_meanwhile(lease):
                outcome = self._requeue.until_done()
            if outcome is StandbyResult.IMPOSSIBLE:
                lease.write_text(json.dumps({"impossible": True, "node": self.node}) + "\n", encoding="utf-8")
            elif outcome not in (StandbyResult.REQUEUED, StandbyResult.ENDED):
                lease.unlink(missing_ok=True)
            return outcome
        finally:
            signal.signal(signal.SIGTERM, ignored)
