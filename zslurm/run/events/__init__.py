"""Every event of a run: one class for each, with its meaning, its fields and the sentence that a person reads.

The supervisor writes them to events.jsonl, commands of people to submissions.jsonl. A new event is one class in
the module of its subject, and one line in docs/run-directory.md. How rows become objects is in event.py.
"""

from __future__ import annotations

from zslurm.run.events.attempts import (
    AttemptCleared,
    AttemptEnded,
    AttemptStarted,
    CollectivesExamined,
    Ended,
    FaultDetected,
    Preempted,
    RanksEnded,
    RasAnswered,
    RunEnded,
    StacksDumped,
    StepKilled,
    StopAsked,
)
from zslurm.run.events.decisions import (
    Decided,
    ExcludedNodesUsed,
    ExclusionFailed,
    NodesExcluded,
    NodesReadmitted,
    Requeued,
    RequeueFailed,
    SharedExclusionsFailed,
    SuccessorEnded,
)
from zslurm.run.events.event import CLASSES, Row, from_row
from zslurm.run.events.memory_recovery import (
    HangingRanksEnded,
    MovePlanned,
    MoveRefused,
    RanksExpelled,
    RanksMoved,
    RecoveredInMemory,
    RecoveryFailed,
    RecoveryReady,
    RecoveryStarted,
    RecoveryUnavailable,
)
from zslurm.run.events.people import (
    Action,
    ByUser,
    Cancelled,
    ExcludedByUser,
    MoveAsked,
    Readmitted,
    Released,
    RequeuedByUser,
    Scored,
    Submitted,
    SuccessorSubmitted,
)
from zslurm.run.events.preparation import (
    ConfigRestored,
    ContainerChecked,
    EnvironmentStaged,
    GpuTested,
    KernelsPrepared,
    LockTakenOver,
    RailsDiffer,
    RailsDoubtful,
    RailsIncomplete,
    RailsUnknown,
    SpareChecked,
)
from zslurm.run.events.supervision import (
    AgentLost,
    AgentReportsIgnored,
    AgentRestarted,
    AgentsStarted,
    AgentsUnavailable,
    DeputyActed,
    LeaseLost,
    NotifyFailed,
    NotifyTest,
    RunDirLost,
    StartPostponed,
    SupervisorStarted,
    WaitGivenUp,
)

KINDS = tuple(CLASSES)
"""Every kind of event."""


def describe(row: Row) -> str:
    """Return the event of a row as a sentence; one of an unknown kind, or that has no sense, as its fields."""
    return from_row(row).describe()


__all__ = [
    "KINDS",
    "Action",
    "AgentLost",
    "AgentReportsIgnored",
    "AgentRestarted",
    "AgentsStarted",
    "AgentsUnavailable",
    "AttemptCleared",
    "AttemptEnded",
    "AttemptStarted",
    "ByUser",
    "Cancelled",
    "CollectivesExamined",
    "ConfigRestored",
    "ContainerChecked",
    "Decided",
    "DeputyActed",
    "Ended",
    "EnvironmentStaged",
    "ExcludedByUser",
    "ExcludedNodesUsed",
    "ExclusionFailed",
    "FaultDetected",
    "GpuTested",
    "HangingRanksEnded",
    "KernelsPrepared",
    "LeaseLost",
    "LockTakenOver",
    "MoveAsked",
    "MovePlanned",
    "MoveRefused",
    "NodesExcluded",
    "NodesReadmitted",
    "NotifyFailed",
    "NotifyTest",
    "Preempted",
    "RailsDiffer",
    "RailsDoubtful",
    "RailsIncomplete",
    "RailsUnknown",
    "RanksEnded",
    "RanksExpelled",
    "RanksMoved",
    "RasAnswered",
    "Readmitted",
    "RecoveredInMemory",
    "RecoveryFailed",
    "RecoveryReady",
    "RecoveryStarted",
    "RecoveryUnavailable",
    "Released",
    "RequeueFailed",
    "Requeued",
    "RequeuedByUser",
    "RunDirLost",
    "RunEnded",
    "Scored",
    "SharedExclusionsFailed",
    "SpareChecked",
    "StacksDumped",
    "StartPostponed",
    "StepKilled",
    "StopAsked",
    "Submitted",
    "SuccessorEnded",
    "SuccessorSubmitted",
    "SupervisorStarted",
    "WaitGivenUp",
    "describe",
]
