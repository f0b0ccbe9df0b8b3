"""The states of a Slurm job, and the words that squeue, scontrol and sacct use for them.

A job has a base state and flags; the commands show one word, and a flag may hide the base state: COMPLETING says
that nodes are being cleaned up, not how the job ended.
"""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """What Slurm calls a job: https://slurm.schedmd.com/job_state_codes.html."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    # Flags that are shown in place of the base state.
    COMPLETING = "COMPLETING"
    CONFIGURING = "CONFIGURING"
    EXPEDITING = "EXPEDITING"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    POWER_UP_NODE = "POWER_UP_NODE"
    RECONFIG_FAIL = "RECONFIG_FAIL"
    REQUEUED = "REQUEUED"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    RESIZING = "RESIZING"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    REVOKED = "REVOKED"
    SIGNALING = "SIGNALING"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    STAGE_OUT = "STAGE_OUT"
    STOPPED = "STOPPED"
    UNKNOWN = "UNKNOWN"
    """A word that this table does not have, of a later Slurm: neither over, nor waiting, nor on nodes."""

    @property
    def is_over(self) -> bool:
        """Terminal: the job will not run again by itself."""
        return self in _OVER

    @property
    def is_waiting(self) -> bool:
        """In the queue: holds no node, and will run when it is scheduled or released."""
        return self in _WAITING

    @property
    def is_on_nodes(self) -> bool:
        """Holds an allocation: about to start, running, stopped or cleaning up."""
        return self in _ON_NODES

    @property
    def is_active(self) -> bool:
        """Not over: waiting, on nodes, or unknown."""
        return not self.is_over


_OVER = frozenset(
    {
        JobState.COMPLETED,
        JobState.CANCELLED,
        JobState.FAILED,
        JobState.TIMEOUT,
        JobState.NODE_FAIL,
        JobState.PREEMPTED,
        JobState.BOOT_FAIL,
        JobState.DEADLINE,
        JobState.OUT_OF_MEMORY,
        JobState.REVOKED,
    }
)
_WAITING = frozenset(
    {
        JobState.PENDING,
        JobState.EXPEDITING,
        JobState.LAUNCH_FAILED,
        JobState.RECONFIG_FAIL,
        JobState.REQUEUED,
        JobState.REQUEUE_FED,
        JobState.REQUEUE_HOLD,
        JobState.RESV_DEL_HOLD,
        JobState.SPECIAL_EXIT,
    }
)
_ON_NODES = frozenset(
    {
        JobState.RUNNING,
        JobState.SUSPENDED,
        JobState.COMPLETING,
        JobState.CONFIGURING,
        JobState.POWER_UP_NODE,
        JobState.RESIZING,
        JobState.SIGNALING,
        JobState.STAGE_OUT,
        JobState.STOPPED,
    }
)


def parse_state(text: str) -> JobState:
    """The state of squeue's, scontrol's or sacct's words: `CANCELLED by 1000` and `CANCELLED+` are CANCELLED.

    Where several words are given (`PENDING,REQUEUED`), the first known one counts.
    """
    for word in text.upper().replace(",", " ").replace("+", " ").split():
        if word in JobState.__members__:
            return JobState[word]
    return JobState.UNKNOWN
