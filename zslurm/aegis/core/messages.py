"""Events, which the shell reports to the core, and actions, which the core asks the shell for.

Times called `now` are monotonic seconds of the supervisor, those called `wall` are UNIX seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from zslurm.aegis.core.detection.flight_records import Culprits
from zslurm.aegis.core.detection.witnesses import WitnessReport
from zslurm.aegis.logs.name_lookups import FailedLookups
from zslurm.aegis.protocol import Report
from zslurm.aegis.types import Fault
from zslurm.run.events.event import Event
from zslurm.slurm.on_nodes.srun_output import TaskFailure


@dataclass(frozen=True)
class StopState:
    """Whether and by what the run is asked to save and stop.

    Attributes:
        asked: it is.
        name: the signal that asked; None if none did.
        asked_by: what asked, for messages.
        requeued: Slurm has put the job back into the queue.
        preempted: what Slurm does with the job if it preempts it.
        deadline: until when the ranks may save (monotonic seconds).
        comes_back: the job is to be put back into the queue: it is not cancelled, and Slurm has not done it yet.
    """

    asked: bool = False
    name: str | None = None
    asked_by: str = ""
    requeued: bool = False
    preempted: Literal["requeue", "cancel"] | None = None
    deadline: float | None = None
    comes_back: bool = False


# --- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resumed:
    """Another supervisor has watched the attempt before this one.

    Attributes:
        recorded: what it recorded of the attempt, oldest first.
        in_log: the bad ends of tasks that srun has reported so far.
        ends: what those of these ranks recorded that exited with the code of an orderly stop.
    """

    recorded: tuple[Event, ...]
    in_log: tuple[TaskFailure, ...]
    ends: Mapping[int, Mapping[str, Any]]
    now: float
    wall: float


@dataclass(frozen=True)
class StopChanged:
    """The request to save and stop is another one."""

    stop: StopState


@dataclass(frozen=True)
class ReportReceived:
    """An agent has reported; the times are those at which the report came."""

    report: Report
    now: float
    wall: float


@dataclass(frozen=True)
class RanksFailed:
    """Ranks have ended badly, by srun, or by the step of warm processes.

    Attributes:
        failure: what was reported: of tasks of the step, whose numbers ranks had at its start, or of `warm` ranks.
        ends: what ranks recorded that exited with the code of an orderly stop.
        warm: the ranks were in a step of warm processes, and have their present numbers.
    """

    failure: TaskFailure
    ends: Mapping[int, Mapping[str, Any]]
    now: float
    warm: bool = False


@dataclass(frozen=True)
class EndRead:
    """The record of a rank's end was read; `end` is None if there is none. See `ReadEnd`."""

    rank: int
    end: Mapping[str, Any] | None
    gone_s: float
    now: float


@dataclass(frozen=True)
class FaultsFound:
    """The shell has found faults in logs and records."""

    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class LookupsFailed:
    """A rank's log ends with tries to resolve a name, on a node."""

    node: str
    failed: FailedLookups


@dataclass(frozen=True)
class StepCancelled:
    """srun reports that the step was cancelled."""

    fault: Fault


@dataclass(frozen=True)
class Recovered:
    """Other processes are in the place of ranks, or these were left out; or ranks have moved as planned.

    Attributes:
        ranks: their numbers before.
        dead: nodes that died, on which some of them were.
        left: nodes that ranks have left as planned: nothing there matters any more.
        left_out: no process is in their place, and the others are numbered from 0 on.
        rank_nodes: the node of each rank now; None if that is not known yet.
    """

    ranks: frozenset[int]
    dead: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    left_out: bool = False
    rank_nodes: tuple[str, ...] | None = None
    now: float = 0.0


@dataclass(frozen=True)
class Tick:
    """Time has passed, and this is what the shell knows besides reports.

    Attributes:
        failed_nodes: nodes that Slurm has reported as failed in this attempt.
        trouble: unheard nodes that may be dead by what Slurm does or reports, with a message.
        witness_reports: what was answered about silent nodes.
        over: the attempt is over: nothing hangs any more, and no node has to prove that it lives.
    """

    now: float
    wall: float
    failed_nodes: tuple[str, ...] = ()
    trouble: Mapping[str, str] = field(default_factory=dict)
    witness_reports: Mapping[str, WitnessReport] = field(default_factory=dict)
    over: bool = False


@dataclass(frozen=True)
class Assess:
    """The shell asks whether the attempt continues, after everything that is new was reported.

    Attributes:
        responding: agents have reported lately.
        memory: recovery in memory is not possible (any more), may be tried, or is under way.
        broken: why the attempt cannot continue by what the shell sees itself; empty if it can.
        moving: nodes that the ranks are about to leave as planned.
    """

    now: float
    wall: float
    responding: bool = False
    memory: Literal["off", "ready", "active"] = "off"
    broken: str = ""
    moving: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ProgressRead:
    """How far the run is by its files; see `AttemptState.needs_progress`.

    Attributes:
        committed_step: step of the newest checkpoint; -1 before the first.
        progressed_at: when the slowest rank last finished a step (UNIX seconds); None if that is not known.
    """

    committed_step: int
    progressed_at: float | None


@dataclass(frozen=True)
class Paused:
    """The supervisor itself was stopped for some seconds, and the ranks probably as well."""

    seconds: float


@dataclass(frozen=True)
class HangExamined:
    """The witnesses of a hang were asked; see `ExamineHang`.

    Attributes:
        culprits: ranks for which others wait, by the dumps of flight recorders.
        behind: ranks that the RAS service shows behind the others.
        faults: what the dumps show.
        recorded: what was answered, for the run's events.
    """

    culprits: tuple[Culprits, ...] = ()
    behind: frozenset[int] = frozenset()
    faults: tuple[Fault, ...] = ()
    recorded: tuple[Event, ...] = ()


@dataclass(frozen=True)
class MemoryAnswered:
    """Why ranks could not be replaced in memory if they were lost; empty if they could. See `AskMemory`."""

    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class RanksKilled:
    """Ranks that hang were killed, or `reason` is why not all of them could be; see `KillRanks`."""

    ranks: tuple[int, ...]
    reason: str
    now: float


CoreEvent = (
    Resumed
    | StopChanged
    | ReportReceived
    | RanksFailed
    | EndRead
    | FaultsFound
    | LookupsFailed
    | StepCancelled
    | Recovered
    | Tick
    | Assess
    | ProgressRead
    | Paused
    | HangExamined
    | MemoryAnswered
    | RanksKilled
)


# --- actions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """Write an event to the run's events."""

    event: Event


@dataclass(frozen=True)
class ReadLastWords:
    """Read what ranks that failed recorded, or the end of their logs; answered by `FaultsFound`."""

    failure: TaskFailure
    ago_s: float = 0.0


@dataclass(frozen=True)
class ReadEnd:
    """Read the record of a rank whose process is gone for `gone_s` seconds; answered by `EndRead`."""

    rank: int
    gone_s: float


@dataclass(frozen=True)
class LookForCancel:
    """Look whether srun reports that the step was cancelled; answered by `StepCancelled` if it was."""


@dataclass(frozen=True)
class LookForPreemption:
    """Ask Slurm whether it preempts the job: a signal has reached only the steps."""


@dataclass(frozen=True)
class GiveUp:
    """End the attempt.

    Attributes:
        reason: one line.
        root: the fault for which, if it is one.
        overdue: the ranks were asked to save and stop, and did not in time.
    """

    reason: str
    root: Fault | None = None
    overdue: bool = False


@dataclass(frozen=True)
class ExamineHang:
    """Read the dumps of the flight recorders and ask the RAS service; answered by `HangExamined`."""


@dataclass(frozen=True)
class AskMemory:
    """Find out whether ranks could be replaced in memory; answered by `MemoryAnswered`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class DumpStacks:
    """Have every rank that is left write the stacks of its threads to its log."""


@dataclass(frozen=True)
class KillRanks:
    """Have agents kill ranks that hang; answered by `RanksKilled`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RefuseMemory:
    """Recover nothing in memory any more in this attempt: these ranks cannot be replaced."""

    ranks: tuple[int, ...]
    reason: str


CoreAction = (
    Record
    | ReadLastWords
    | ReadEnd
    | LookForCancel
    | LookForPreemption
    | GiveUp
    | ExamineHang
    | AskMemory
    | DumpStacks
    | KillRanks
    | RefuseMemory
)
