"""Monitors one attempt, from its start, or from the last look of another supervisor, to its end.

collect faults (fault_collector.py) -> pass requests to stop on (stop_forwarder.py) -> give up?
-> end what is left of it (teardown.py) -> how it ended
"""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

from zslurm.aegis.core.ending import (
    asks_who_stopped,
    awaits_rescue,
    awaits_step,
    is_shown_by_records,
    is_to_be_cleared,
    outcome_of,
    outcome_without_run_dir,
    why_without_store,
)
from zslurm.aegis.core.messages import Cleared, GiveUp
from zslurm.aegis.core.policy.outcome import AttemptOutcome
from zslurm.aegis.supervisor.attempt_starter import RunningAttempt
from zslurm.aegis.supervisor.fault_collector import FaultCollector, read_step_log
from zslurm.aegis.supervisor.rank_exits import rank_ends
from zslurm.aegis.supervisor.stop_forwarder import StopForwarder
from zslurm.aegis.supervisor.teardown import clear
from zslurm.job.step import kill_step
from zslurm.run.events import RunDirLost, StepKilled
from zslurm.run.events.event import only_known

_WATCHFUL_S, _RECOVERING_S = 0.1, 0.02
"""Seconds between two looks if lost ranks are replaced in memory, and while they are."""

_STEPS_END_S = 10.0
"""Seconds that steps get to end by themselves once every rank has recorded its end."""

_LAST_LOOK_S = 0.5
"""Seconds that the agents get to report what their sensors saw when they learned that an attempt is over."""


class AttemptMonitor:
    """Monitors one attempt.

    Attributes:
        job: the start of the job that the attempt belongs to.
        collected: the faults that were noticed, and their sources.
        overdue: the ranks were asked to save and stop, and did not in time.
    """

    def __init__(self, collected: FaultCollector) -> None:
        """Prepare; `until_end` does the work."""
        self.collected = collected
        self.job, self._agents = collected.job, collected.agents
        self._memory = collected.running.memory
        self.overdue = False
        self._stop = StopForwarder(self.job, self._running)

    @property
    def _running(self) -> RunningAttempt:
        return self.collected.running

    def until_end(self) -> AttemptOutcome:
        """Wait for the end of the step, or bring it about; nothing of the attempt is left when this returns."""
        try:
            return self._until_end()
        finally:
            self.collected.close()

    def _until_end(self) -> AttemptOutcome:
        job, collected, process = self.job, self.collected, self._running.process
        collected.resume()
        why: str | None = None
        while self._runs():
            process.reap()
            if (lost := job.presence.lost()) is not None:
                return self._abandon(lost)
            collected.tell_pause()
            self._stop.forward()
            given_up = collected.look(self._why_broken())
            self._look_once_signalled()
            if given_up is not None:
                why = given_up.reason
                collected.find_cancel()
                self._give_up(given_up)
                break
            time.sleep(self._poll_s())
        else:
            self._let_steps_end()
            collected.collect_last()
            self._look_once_signalled()
            collected.find_cancel()
            if not process.left_exit_code:
                kill_step(process, self._running.attempt, job.slurm_id)
        if (lost := job.presence.settled()) is not None:
            return self._abandon(lost)
        collected.note_early_exits()
        outcome = self._outcome(why)
        if asks_who_stopped(outcome, job.stop.state()):
            self._stop.find_who_asked(rank_ends(self._running.attempt))
        if is_to_be_cleared(outcome):
            self._clear()
            if collected.note_early_exits():
                outcome = self._outcome(why)
            collected.note_late(outcome)
        process.reap()
        process.signal_group(signal.SIGKILL)  # what a rank started in the background
        self._remove_progress()
        return outcome

    def _poll_s(self) -> float:
        """Return the seconds until the next look."""
        poll_s, memory = self.job.spec.aegis.poll_s, self.collected.state.memory
        if memory is None:
            return poll_s
        return _RECOVERING_S if memory.active else min(poll_s, _WATCHFUL_S)

    def _runs(self) -> bool:
        """Return whether the attempt has ranks that have not ended: in its step, or in steps of warm processes."""
        step_runs, memory = self._running.process.poll() is None, self._memory
        if memory is None or not is_shown_by_records(self.collected.state):
            return step_runs
        return (step_runs or memory.holds_ranks(self._members)) and not self._all_ended()

    @property
    def _members(self) -> list[str]:
        memory = self.collected.state.memory
        return memory.members if memory is not None else []

    def _all_ended(self) -> bool:
        attempt, ranks = self._running.attempt, len(self.collected.state.rank_nodes)
        return attempt.rank_end(0).exists() and len(rank_ends(attempt)) == ranks

    def _let_steps_end(self) -> None:
        """Give the steps a moment in which to end by themselves, if ranks were replaced."""
        state, deadline = self.collected.state, time.monotonic() + _STEPS_END_S
        while is_shown_by_records(state) and time.monotonic() < deadline:
            step_runs = self._running.process.poll() is None
            if self._all_ended() and not awaits_step(state, step_runs=step_runs):
                return
            time.sleep(_WATCHFUL_S)

    def _look_once_signalled(self) -> None:
        """Ask Slurm whether it preempts the job if an agent has reported a signal."""
        self._stop.signalled |= self.collected.signalled
        self.collected.signalled = False
        self._stop.look_once_signalled()

    def _remove_progress(self) -> None:
        """Remove the records that killed ranks have left."""
        shutil.rmtree(self._running.attempt.progress(self.job.environ), ignore_errors=True)

    def _abandon(self, why: str) -> AttemptOutcome:
        """End an attempt whose run directory is lost: after a save elsewhere, if one is set."""
        process, job = self._running.process, self.job
        rescue = job.spec.checkpoint.rescue_dir
        job.record(RunDirLost(attempt=self._running.attempt.number, reason=why, rescue_dir=rescue))
        began, save_s, can_save, asked = time.monotonic(), job.spec.aegis.save_s, rescue is not None, False
        while awaits_rescue(time.monotonic() - began, save_s, can_save=can_save, runs=process.record.alive):
            self._stop.send()
            asked = True
            process.reap()
            time.sleep(job.spec.aegis.poll_s)
        kill_step(process, self._running.attempt, job.slurm_id)
        self._clear()
        process.reap()
        self._remove_progress()
        return outcome_without_run_dir(
            why, str(Path(rescue) / job.run.name) if rescue is not None and asked else ""
        )

    # --- giving up ----------------------------------------------------------------------------------------------

    def _why_broken(self) -> str:
        """Return why the attempt cannot continue though its ranks run; empty if it can."""
        broken, memory = self._running.broken, self._memory
        if broken or memory is None or not memory.store.has_ended:
            return broken
        log = str(self._running.attempt.store_log)
        return why_without_store(log, never_listened=memory.store.never_listened)

    def _give_up(self, given_up: GiveUp) -> None:
        """Record it, and have every rank that is left write the stacks of its threads to its log."""
        root = given_up.root
        self.overdue = given_up.overdue
        about = None if root is None else root.fields()
        if not self.collected.state.killed_before:
            self.job.record(
                only_known(StepKilled(attempt=self._running.attempt.number, reason=given_up.reason, root=about))
            )
        self.collected.dump_stacks()

    # --- the end ------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        """End every process of the attempt, wherever it is, and make sure of it."""
        job, collected, agents = self.job, self.collected, self._agents
        collected.note(clear(job, self._running, collected.state, agents, self._collect_meanwhile))
        self._collect_meanwhile()
        collected.tell(Cleared(time.monotonic()))
        if collected.state.nodes_heard.any_responding(time.monotonic()):
            time.sleep(_LAST_LOOK_S)
            self._collect_meanwhile()
        while collected.state.awaits_nodes(time.monotonic()):
            time.sleep(job.spec.aegis.poll_s)
            self._collect_meanwhile()

    def _collect_meanwhile(self) -> bool:
        """Take what the agents report while processes are waited for; returns whether the run is asked to stop."""
        self.collected.collect_from_nodes(over=True)
        self._look_once_signalled()
        return self.job.stop.asked

    def _outcome(self, killed_because: str | None) -> AttemptOutcome:
        """Return how the attempt ended."""
        attempt, code = self._running.attempt, self._running.process.poll()
        log = read_step_log(attempt)
        return outcome_of(self.collected.state, code, rank_ends(attempt), log, killed_because)
