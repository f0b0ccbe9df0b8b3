"""Pairs of faults: the second strikes while the run is busy with the first. It ends as the worse half would alone.

What is expected follows from the two rows (`Expected.of`); a pair states only what does not. The worse half is the
one that needs the dearer answer: to stop, to go back into the queue, to leave a node, to start again, nothing.

Of all that can meet, these differ in what they put to the test:

- whatever acts on faults is itself away or new: slurmctld, the supervisor, an agent, the batch host. Each of them
  meets every kind of answer (start again, swap, shrink, requeue, stop), and the moments between noticing a fault
  and training again: noticed, tearing down, decided, excluded, loading;
- two answers are owed at once, of one kind or of two: hardware on two nodes, hardware and a program's own fault, a
  checkpoint that is damaged or cannot be written just when it is needed;
- the job leaves the nodes for another's sake: its time limit, a requeue, a preemption with a grace time;
- what ends a run for good, or takes its files away: a rank that exits 0, the same NaN again, a directory moved.

Left out is what takes the same way as one of these: an ECC error where a NIC's link goes down already, or the
other way round (`test_replacements.py` has both for an agent and for a supervisor that is replaced), a bug at
import where a bug at a step is stopped, a node that dies while it saves, which to the second fault is just dead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tests.faults import further, moments
from tests.faults.further import (
    CABLE_PULLED,
    CHECKPOINT_DAMAGED,
    CONTROLLER_AWAY,
    DISK_FULL,
    EXITS_0,
    MOVED_AWAY,
    OTHER,
    PREEMPTED,
    SAME_NAN,
    later,
    on_rank,
)
from tests.faults.harness import AT, FaultRun
from tests.faults.matrix import ROWS, Row
from tests.faults.moments import Moment

_REQUEUED_BY_SLURM = {16, 18}
"""Rows whose job goes back into the queue without a decision of the supervisor."""
_STANDBY_ACTS = {18}
_SUPERVISOR_DIES = {23}


@dataclass(frozen=True)
class Pair:
    """Two faults that meet.

    Attributes:
        first: the first.
        second: the second.
        when: it strikes.
        heal: ends the first fault, if it does not end by itself.
        healed_when: how far the run has come by then since the second fault.
        sample: also run by `make faults`.
        settings: for the run, on top of those of the rows: keys of `FaultRun.submit`.
        stated: what does not follow from the rows: attributes of `Expected`.
    """

    first: Row
    second: Row
    when: Moment
    heal: Callable[[FaultRun], None] | None = None
    healed_when: Moment = moments.AT_ONCE
    sample: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    stated: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> tuple[Row, Row]:
        return self.first, self.second

    @property
    def id(self) -> str:
        """As pytest shows it: the numbers of the rows and the moment."""
        moment = self.when.words.replace(",", "").replace(" ", "-")
        return f"{self.first.number:02d}+{self.second.number:02d}-{moment}"

    @property
    def needs_preemption(self) -> bool:
        return PREEMPTED.number in (row.number for row in self.rows)

    def submission(self) -> dict[str, Any]:
        """Arguments of `FaultRun.submit`: what both rows need; spares for both."""
        spares = sum(row.slurm.get("spares", 0) for row in self.rows)
        merged: dict[str, Any] = {
            "in_ranks": [fault for row in self.rows for fault in row.in_ranks],
            "pace_s": max(row.pace_s for row in self.rows),
            "nodes": max(row.nodes for row in self.rows),
            "slurm": self.first.slurm | self.second.slurm | ({"spares": spares} if spares else {}),
            "aegis": self.first.aegis | self.second.aegis,
            "checkpoint": self.first.checkpoint | self.second.checkpoint,
        }
        for name, value in self.settings.items():
            merged[name] = merged[name] | value if isinstance(value, dict) else value
        return merged


@dataclass(frozen=True)
class Expected:
    """What a pair must come to.

    Attributes:
        ends: how the run ends.
        same_size: no attempt has fewer ranks than the first, so that the curve is the same to the last bit.
        starts: attempts at most, without those that Slurm would not start.
        requeues: times that the job may go back into the queue.
        supervisors_killed: how many more supervisors there may be than starts of the job.
        standby: whether an agent may act in the supervisor's place.
        actions: decisions that may be taken.
        kinds: faults or events of which one at least must be recorded; empty if nothing need be.
        excludes: whether the guilty nodes of the first, and of the second, must be excluded.
        leaves: whether the last attempt must run without the guilty nodes of the first, and of the second.
        intervals: of checkpoints that may be lost at most each time.
        cause: words that `zslurm status` must show of a run that was stopped.
    """

    ends: Literal["completed", "stopped", "gone"]
    same_size: bool
    starts: int
    requeues: int
    supervisors_killed: int
    standby: bool
    actions: frozenset[str]
    kinds: frozenset[str]
    excludes: tuple[bool, bool]
    leaves: tuple[bool, bool]
    intervals: int
    cause: str

    @classmethod
    def of(cls, pair: Pair) -> Expected:
        """What follows from its rows, unless the pair says otherwise."""
        first, second = pair.rows
        worst = max(severity(first), severity(second))
        worse = [row for row in pair.rows if severity(row) == worst]
        follows = cls(
            ends=max((row.ends for row in pair.rows), key=["completed", "stopped", "gone"].index),
            same_size=all(row.same_size for row in pair.rows),
            starts=1 + _starts(first) + _starts(second),
            requeues=_requeues(first) + _requeues(second),
            supervisors_killed=sum(row.number in _SUPERVISOR_DIES for row in pair.rows),
            standby=any(row.number in _STANDBY_ACTS for row in pair.rows),
            actions=frozenset({*first.actions, *second.actions}),
            kinds=frozenset(kind for row in worse for kind in row.kinds),
            excludes=(first.excludes and first in worse, second.excludes and second in worse),
            leaves=(first.excludes, second.excludes),
            intervals=max(row.intervals for row in pair.rows),
            cause=next((row.cause for row in pair.rows if row.ends == "stopped"), ""),
        )
        return replace(follows, **pair.stated)


def severity(row: Row) -> int:
    """How dear the answer to a fault is, if it comes alone."""
    if row.ends == "gone":
        return 6
    if row.ends == "stopped":
        return 5
    if _requeues(row):
        return 4
    dear = {"shrink": 3, "swap": 2, "restart": 1}
    return max((dear.get(action, 0) for action in row.actions), default=0)


def _requeues(row: Row) -> int:
    return row.actions.count("requeue") + (row.number in _REQUEUED_BY_SLURM)


def _starts(row: Row) -> int:
    """Attempts that a fault costs."""
    return len([action for action in row.actions if action != "stop"]) + (row.number in _REQUEUED_BY_SLURM)


def _row(number: int) -> Row:
    return ROWS[number - 1]


_KILLED, _EXITS, _STOPPED, _DIES = (_row(number) for number in (1, 2, 3, 4))
_ECC, _LINK, _HOST_OOM, _NAN = (_row(number) for number in (7, 8, 10, 12))
_TIME, _REQUEUE, _BATCH_HOST, _BUG = (_row(number) for number in (15, 16, 18, 19))
_AGENT, _SUPERVISOR, _PARTITION_FULL, _BAD_GPU = (_row(number) for number in (22, 23, 24, 25))

_OFTEN: dict[str, Any] = {"in_ranks": ({"what": "gpu_oom", "step": AT + 10, "rank": OTHER, "times": 1000},)}
"""Not before step `AT`, after which the first fault happens."""
_SLOW: dict[str, Any] = {"pace_s": 1.0}
"""For what only an agent can notice, which has to be started first: 35 s are left then."""
_IMPATIENT: dict[str, Any] = {"aegis": {"tolerate_s": 10}}
_SLURM_EXCLUDES: dict[str, Any] = {"excludes": (False, False)}
"""Where the job is requeued, a dead node may be left to Slurm."""
_DIES_ALONE = replace(_DIES, slurm={})
"""Where the job is requeued in any case: no spare is needed."""


def _controller_back(when: Moment) -> dict[str, Any]:
    return {"heal": further.bring_controller_back, "healed_when": when}


PAIRS = (
    # slurmctld away while something else breaks, or breaking off in the middle of an answer
    Pair(CONTROLLER_AWAY, _DIES, moments.AT_ONCE, **_controller_back(moments.CANNOT_START)),
    Pair(CONTROLLER_AWAY, _AGENT, moments.AT_ONCE, settings=_SLOW, **_controller_back(moments.AGENT_LOST)),
    Pair(CONTROLLER_AWAY, _SUPERVISOR, moments.AT_ONCE, **_controller_back(moments.SUPERVISED)),
    Pair(CONTROLLER_AWAY, _BATCH_HOST, moments.AT_ONCE, **_controller_back(moments.STANDBY_AT_WORK)),
    Pair(_TIME, CONTROLLER_AWAY, moments.ASKED_TO_STOP, **_controller_back(moments.CANNOT_START)),
    Pair(
        _KILLED,
        CONTROLLER_AWAY,
        moments.TEARING_DOWN,
        **_controller_back(moments.CANNOT_START_OR_TRAINS),
        stated={"starts": 4},
    ),
    Pair(_REQUEUE, CONTROLLER_AWAY, moments.ASKED_TO_STOP, **_controller_back(moments.RUN_ENDED)),
    # the supervisor is replaced
    Pair(_KILLED, _SUPERVISOR, moments.TEARING_DOWN, sample=True),
    Pair(_KILLED, _SUPERVISOR, moments.BEFORE_FIRST_STEP),
    Pair(_STOPPED, _SUPERVISOR, moments.AT_ONCE),
    Pair(_DIES, _SUPERVISOR, moments.NOTICED),
    Pair(_ECC, _SUPERVISOR, moments.EXCLUDED),
    Pair(_LINK, _SUPERVISOR, moments.NOTICED, settings=_IMPATIENT),
    Pair(_TIME, _SUPERVISOR, moments.ASKED_TO_STOP),
    Pair(_BUG, _SUPERVISOR, moments.DECIDED),
    Pair(_BAD_GPU, _SUPERVISOR, moments.CLEARED_AGAIN),
    Pair(_PARTITION_FULL, _SUPERVISOR, moments.DECIDED),
    Pair(_SUPERVISOR, _DIES, moments.AT_ONCE),
    Pair(_SUPERVISOR, _ECC, moments.AT_ONCE, settings=_SLOW),
    # an agent is replaced
    Pair(_AGENT, _LINK, moments.AT_ONCE, settings=_SLOW | _IMPATIENT),
    Pair(_AGENT, _HOST_OOM, moments.AT_ONCE),
    Pair(_AGENT, _STOPPED, moments.AT_ONCE),
    Pair(_AGENT, _DIES, moments.AT_ONCE),
    Pair(_AGENT, _SUPERVISOR, moments.AT_ONCE),
    Pair(_KILLED, _AGENT, moments.TEARING_DOWN),
    Pair(_DIES, on_rank(22), moments.NOTICED),
    # hardware and hardware, hardware and programs
    Pair(_ECC, on_rank(7), moments.AT_ONCE),
    Pair(_ECC, on_rank(4), moments.BEFORE_FIRST_STEP),
    Pair(CABLE_PULLED, on_rank(1), moments.NOTICED, heal=further.plug_cable_in(), healed_when=moments.STARTING),
    Pair(_DIES, _BATCH_HOST, moments.NOTICED, stated=_SLURM_EXCLUDES),
    Pair(_ECC, _REQUEUE, moments.EXCLUDED),
    Pair(_TIME, _DIES_ALONE, moments.ASKED_TO_STOP, stated=_SLURM_EXCLUDES),
    Pair(CHECKPOINT_DAMAGED, _DIES, moments.AT_ONCE),
    Pair(
        DISK_FULL,
        _KILLED,
        moments.SAVE_FAILED,
        heal=further.free_disk,
        healed_when=moments.CANNOT_LOCK_OR_TRAINS,
        stated={"intervals": 3, "starts": 3},  # one finds the disk full
    ),
    Pair(_NAN, later(_EXITS, 10), moments.TRAINING_AGAIN),
    Pair(_DIES, replace(on_rank(11), **_OFTEN), moments.AT_ONCE),
    # preemption, exit code 0, the same NaN again, no directory any more
    Pair(PREEMPTED, _SUPERVISOR, moments.IN_GRACE),
    Pair(PREEMPTED, _DIES_ALONE, moments.IN_GRACE, stated=_SLURM_EXCLUDES),
    Pair(PREEMPTED, CONTROLLER_AWAY, moments.IN_GRACE, **_controller_back(moments.OVER_OR_WAITING)),
    Pair(_KILLED, PREEMPTED, moments.BEFORE_FIRST_STEP),
    Pair(EXITS_0, _SUPERVISOR, moments.AT_ONCE),
    Pair(SAME_NAN, _SUPERVISOR, moments.DECIDED),
    Pair(MOVED_AWAY, _KILLED, moments.AT_ONCE),
    Pair(MOVED_AWAY, _SUPERVISOR, moments.AT_ONCE),
)
