"""A request to save and stop, from its origin to the ranks of the attempt that runs.

The supervisor gets it as a signal, Slurm makes it when it preempts the job, or a signal reaches only the steps:
then the agents report it, or the ranks save and stop though this supervisor did not ask them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from zslurm.aegis.core.ending import gives_up_answer
from zslurm.aegis.supervisor.attempt_starter import RunningAttempt
from zslurm.aegis.supervisor.job import Job
from zslurm.job.stop_request import StopSender
from zslurm.run.events import StartPostponed, StopAsked, WaitGivenUp

# Ranks that have only just been started have no store yet: the request is repeated until it has arrived.
_REPEAT_S = 2.0
LOOK_AGAIN_S = 5.0
"""Seconds between two questions to Slurm about signals that the agents report."""


class StopForwarder:
    """Passes requests to stop on to the ranks of one attempt, and gives them aegis.save_s."""

    def __init__(self, job: Job, running: RunningAttempt) -> None:
        """Prepare; nothing is sent."""
        self._job, self._number = job, running.attempt.number
        self._sender = StopSender(running.attempt, running.process)
        self._repeat_at = self._look_again_at = 0.0
        self._looked_for: int | None = None
        self.signalled = False
        """An agent has reported a signal, about which Slurm has not been asked yet."""

    def forward(self) -> None:
        """Send the ranks the request if there is one; repeated until it has arrived."""
        now, stop = time.monotonic(), self._job.stop
        self._sender.find()
        if not stop.asked or now < self._repeat_at:
            return
        if stop.deadline is None:
            if stop.name is not None:
                self._job.record(StopAsked(signal=stop.name, attempt=self._number))
            stop.deadline = now + self._job.spec.aegis.save_s
        self.send()
        if stop.signum != self._looked_for:
            self._looked_for = stop.signum
            self._job.look_for_preemption()

    def send(self) -> None:
        """Ask the ranks to save and stop, unless they were asked a moment ago."""
        if time.monotonic() >= self._repeat_at:
            self._sender.send()
            self._repeat_at = time.monotonic() + _REPEAT_S

    def look_once_signalled(self) -> None:
        """Ask Slurm, once for the signals of all nodes: when a grace time begins it signals only the steps."""
        if self.signalled and time.monotonic() >= self._look_again_at:
            self.signalled = not self._job.look_for_preemption()
            self._look_again_at = time.monotonic() + LOOK_AGAIN_S

    def find_who_asked(self, rank_ends: Sequence[Mapping[str, Any]]) -> None:
        """Find out who asked ranks that have saved and stopped before we asked them: Slurm, or a person.

        If Slurm does not answer, it is asked again, for a day at most: a preemption that is taken for a
        person's wish would end the run. A signal that has reached this process as well is recorded, if the ranks
        ended before `forward`.
        """
        job = self._job
        if job.stop.name is not None and job.stop.deadline is None:
            job.record(StopAsked(signal=job.stop.name, attempt=self._number))
        is_recorded, began = False, time.monotonic()
        while not job.look_for_preemption() and not job.stop.asked and job.presence.lost() is None:
            if why := gives_up_answer(time.monotonic() - began):
                job.record(WaitGivenUp(attempt=self._number, reason=why))
                break
            if not is_recorded:
                is_recorded = True
                reason = "the ranks were asked to stop, and Slurm does not answer whether it preempts the job"
                job.record(StartPostponed(reason=reason))
            time.sleep(job.spec.aegis.poll_s)
        names = [str(end["signal"]) for end in rank_ends if end.get("signal")]
        if not job.stop.asked and names and names[0] in signal.Signals.__members__:
            job.stop.signum = signal.Signals[names[0]]
            job.record(StopAsked(signal=names[0], attempt=self._number, to="ranks"))
