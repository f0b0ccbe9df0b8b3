"""The states of a Slurm job, and the words that squeue, scontrol and sacct use for them.

A job has a base state and flags; the commands show one word, and a flag may hide the base state: COMPLETING means
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


def _states(names: str) -> frozenset[JobState]:
    return frozenset(map(JobState, names.split()))


_OVER = _states("COMPLETED CANCELLED FAILED TIMEOUT NODE_FAIL PREEMPTED BOOT_FAIL DEADLINE OUT_OF_MEMORY REVOKED")
_WAITING = _states(
    "PENDING EXPEDITING LAUNCH_FAILED RECONFIG_FAIL REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT"
)
_ON_NODES = _states("RUNNING SUSPENDED COMPLETING CONFIGURING POWER_UP_NODE RESIZING SIGNALING STAGE_OUT STOPPED")


def parse_state(text: str) -> JobState:
    """Return the state that Slurm's words name: `CANCELLED by 1000` and `CANCELLED+` are CANCELLED.

    If several words are given (`PENDING,REQUEUED`), the first known one counts.
    """
    for word in text.upper().replace(",", " ").replace("+", " ").split():
        if word in JobState.__members__:
            return JobState[word]
    return JobState.UNKNOWN
