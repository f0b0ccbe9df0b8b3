"""When the second fault of a pair happens: conditions that the run's own events and its ranks' marks show.

Each waits until the run has come so far since the first fault. What has passed while the harness looked is no
failure: the pair still happened, only a little later; the table of results shows after which event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.faults.harness import FaultRun
from tests.waiting import wait_for

Reached = Callable[[FaultRun, float], Any]
"""Whether a run has come so far since a time (UNIX seconds)."""


@dataclass(frozen=True)
class Moment:
    """A moment in the recovery from a fault.

    Attributes:
        words: as the table shows it.
        reached: whether it has come.
        before_the_end: it is a moment of a run that continues: one that ends before it came fails the test.
    """

    words: str
    reached: Reached
    before_the_end: bool = True

    def wait(self, run: FaultRun, since: float) -> None:
        """Wait for it.

        Raises:
            AssertionError: the run came to its end before.
            TimeoutError: it did not come.
        """

        def come() -> Any:
            if value := self.reached(run, since):
                return value
            over = run.ended() if self.before_the_end else None
            assert over is None, f"{run.name} ended before it was {self.words}: {over}"
            return None

        wait_for(come, f"{run.name} to be {self.words}", every_s=0.02)


def on_event(words: str, *kinds: str, count: int = 1, before_the_end: bool = True) -> Moment:
    """The moment of the `count`-th event of any of these kinds; a fault's kind counts as one."""

    def reached(run: FaultRun, since: float) -> bool:
        found = [
            event
            for event in run.events()
            if event["time"] >= since and (event["event"] in kinds or event.get("kind") in kinds)
        ]
        return len(found) >= count

    return Moment(words, reached, before_the_end)


def on_mark(words: str, kind: str, *, ranks: int = 1) -> Moment:
    """The moment when so many ranks of a new attempt have made a mark (see in_ranks/sitecustomize.py)."""

    def reached(run: FaultRun, since: float) -> bool:
        made = [mark for mark in run.marks(kind) if mark["time"] >= since]
        newest = max((mark["attempt"] for mark in made), default=0)
        return len({mark["rank"] for mark in made if mark["attempt"] == newest}) >= ranks

    return Moment(words, reached)


def _has_failed_to_save(run: FaultRun, since: float) -> bool:
    return any(row["state"] == "FAILED" for row in run.metrics("checkpoint"))


def _has_lease(run: FaultRun, since: float) -> bool:
    return any(run.path.glob("deputy-*.json"))


def first_of(words: str, *several: Moment) -> Moment:
    """The moment that comes first."""
    return Moment(words, lambda run, since: any(moment.reached(run, since) for moment in several))


AT_ONCE = Moment("struck at once", lambda run, since: True)
NOTICED = on_event("noticed", "fault_detected", "ranks_ended", "agent_lost")
TEARING_DOWN = on_event("ending what is left", "step_killed", "ranks_ended")
"""Ranks have ended, or are being ended: before `attempt_cleared`."""
DECIDED = on_event("decided upon", "decision")
EXCLUDED = on_event("without the node", "nodes_excluded")
STARTING = on_event("starting again", "attempt_started")
BEFORE_FIRST_STEP = on_mark("importing, before its first step", "python", ranks=2)
TRAINING_AGAIN = on_mark("training again", "stepped")
CANNOT_START = on_event("waiting for Slurm", "start_postponed")
ASKED_TO_STOP = on_event("asked to save and stop", "signal")
AGENT_LOST = on_event("without an agent", "agent_lost")
SUPERVISED = on_event("supervised again", "supervisor_started")
SAVE_FAILED = Moment("failing to save", _has_failed_to_save)
CLEARED_AGAIN = on_event("cleared for the second time", "attempt_cleared", count=2)
IN_GRACE = on_event("saving in its grace time", "preempted", "signal", "ranks_ended")
"""Slurm itself asks the ranks to end; the supervisor may hear of it later."""
CANNOT_START_OR_TRAINS = first_of("waiting for Slurm, or training again", CANNOT_START, TRAINING_AGAIN)
CANNOT_LOCK_OR_TRAINS = first_of(
    "without space for the lock of its checkpoints, or training again",
    on_event("without space", "storage_full"),
    TRAINING_AGAIN,
)
STANDBY_AT_WORK = Moment("in the hands of the standby supervisor", _has_lease)
RUN_ENDED = on_event("at its end", "run_ended", before_the_end=False)
OVER_OR_WAITING = first_of("waiting for Slurm, or at its end in this job", CANNOT_START, RUN_ENDED)
